"""A method's rows joined with the reference's, turn by turn (MEASUREMENT 2 and 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clasp_core.errors import UserError
from clasp_core.metrics.counting import Work, decoding, finished
from clasp_core.records import TurnRecord

Floats: TypeAlias = NDArray[np.float64]
TurnKey: TypeAlias = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two finished answers to one turn."""

    reference: TurnRecord
    method: TurnRecord

    @property
    def same_prompt(self) -> bool:
        """Whether both answered the same prompt; with an own history a second turn's may differ."""
        return self.reference.prompt_sha256 == self.method.prompt_sha256

    @property
    def equal(self) -> bool:
        """Whether both emitted the same ids behind the same prompt."""
        return self.same_prompt and self.reference.output_ids == self.method.output_ids

    @property
    def question(self) -> tuple[str, int]:
        """The unit of resampling: all turns and repeats of one question."""
        return (self.method.task, self.method.question_id)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The pairs of a method with the reference, and the turns that only one of them finished."""

    pairs: tuple[Pair, ...]
    missing: tuple[TurnKey, ...]
    """Finished by the reference only."""
    extra: tuple[TurnKey, ...]
    """Finished by the method only."""


def pairs(reference_rows: Iterable[TurnRecord], method_rows: Iterable[TurnRecord]) -> Pairing:
    """Join one method's finished rows with the reference's, by task, question, turn and repeat (P39)."""
    reference, method = by_turn(reference_rows), by_turn(method_rows)
    return Pairing(
        pairs=tuple(Pair(row, method[turn]) for turn, row in reference.items() if turn in method),
        missing=tuple(turn for turn in reference if turn not in method),
        extra=tuple(turn for turn in method if turn not in reference),
    )


def common_turns(rows: Iterable[TurnRecord], methods: Collection[str]) -> set[TurnKey]:
    """The turns that every one of `methods` finished: those a table may use (MEASUREMENT 6)."""
    turns: dict[str, set[TurnKey]] = {method: set() for method in methods}
    for row in finished(rows):
        if row.method in turns:
            turns[row.method].add(row.pair)
    return set.intersection(*turns.values()) if turns else set()


def by_turn(rows: Iterable[TurnRecord]) -> dict[TurnKey, TurnRecord]:
    """One method's finished rows by their turn; UserError where two answer the same one."""
    found: dict[TurnKey, TurnRecord] = {}
    for row in finished(rows):
        if row.pair in found:
            raise UserError(f"two finished rows answer turn {row.pair}; give one method of one run, each row once")
        found[row.pair] = row
    return found


def comparable(found: Iterable[Pair], greedy: bool) -> list[Pair]:
    """Greedy answers are compared where they are the same text; sampled ones differ by design.

    Samples of one run have different prompts with an own history only, where the summary notes it.
    """
    return [pair for pair in found if pair.equal or not greedy]


def decoded(found: Iterable[Pair], greedy: bool) -> list[Pair]:
    """The pairs under every decode figure: comparable, and both sides decoded something in a known time."""
    return [p for p in comparable(found, greedy) if decoding(p.reference) and decoding(p.method)]


def question_sums(found: Iterable[Pair], work: Work) -> Floats:
    """One line per question: reference tokens and seconds, method tokens and seconds, over its turns and repeats."""
    sums: dict[tuple[str, int], Floats] = {}
    for pair in found:
        reference, method = work(pair.reference), work(pair.method)
        if reference is not None and method is not None:
            sums[pair.question] = sums.get(pair.question, np.zeros(4)) + np.array([*reference, *method])
    return np.array(list(sums.values())).reshape(-1, 4)
