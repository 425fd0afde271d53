"""Acceptance by position in the draft: how far down a chain the target still agrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clasp_core.metrics.counting import finished
from clasp_core.records import RoundTrace, TurnRecord


@dataclass(frozen=True, slots=True)
class Position:
    """What became of the draft token at one position of the chain, the first being 0; numbers are rounds."""

    position: int
    num_drafted: int
    """Rounds that drafted a token here."""
    num_reached: int
    """Those of them whose tokens before it were all kept, and that no stop token or budget ended before it."""
    num_accepted: int
    """Those of them that kept it."""

    @property
    def rate(self) -> float:
        """Kept over drafted: it falls with the position, since one rejection ends a draft."""
        return self.num_accepted / self.num_drafted

    @property
    def conditional_rate(self) -> float | None:
        """Kept over reached: the chance of one more token once all before it are kept; unknown if never reached."""
        return self.num_accepted / self.num_reached if self.num_reached else None


def acceptance_by_position(rows: Iterable[TurnRecord]) -> tuple[Position, ...] | None:
    """Positions 0, 1, ... of the drafts of finished rows; empty where nothing was drafted.

    None where a draft was a tree, whose tokens have no single position, and where a row has no trace.
    """
    traces = [row.rounds for row in finished(rows)]
    rounds = [each for trace in traces if trace is not None for each in _rounds(trace)]
    if None in traces or any(_is_tree(trace) for trace in traces if trace is not None):
        return None
    longest = max((drafted for drafted, _, _ in rounds), default=0)
    return tuple(_position(rounds, index) for index in range(longest))


def _rounds(trace: RoundTrace) -> list[tuple[int, int, int]]:
    return list(zip(trace.num_drafted, trace.num_accepted, trace.num_emitted, strict=True))


def _is_tree(trace: RoundTrace) -> bool:
    """A chain costs a forward pass per token, or none at all (copies); fewer passes than tokens make a tree."""
    return any(0 < steps < drafted for steps, drafted in zip(trace.num_draft_steps, trace.num_drafted, strict=True))


def _position(rounds: Sequence[tuple[int, int, int]], index: int) -> Position:
    here = [(accepted, emitted) for drafted, accepted, emitted in rounds if drafted > index]
    # a round that was cut emitted kept draft tokens only, and its verdict on the next one is not in the row
    reached = [accepted for accepted, emitted in here if accepted > index or accepted == index < emitted]
    return Position(index, len(here), len(reached), sum(accepted > index for accepted, _ in here))
