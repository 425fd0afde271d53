"""The loss ladder: from the speed-up that a draft's bytes allow down to what the clock saw (MEASUREMENT 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from clasp_core.metrics.counting import count, decoding, divide, finished
from clasp_core.metrics.pairing import Pair, decoded, question_sums
from clasp_core.records import TurnRecord
from clasp_core.skip import LayerSkip


@dataclass(frozen=True, slots=True)
class Ladder:
    """Speed-ups from what the draft's bytes allow down to what the clock saw; costs in units of a reference token."""

    c: float | None
    """One draft step by the clock; null where nothing was drafted."""
    v: float
    """One verification pass, as wide as it ran."""
    p: float | None
    """One search for a skip set; null where there was none."""
    c_bytes: float | None
    """One draft step by the bytes it reads."""
    ceiling: float | None
    oracle: float
    draft: float
    verify: float
    search: float
    measured: float

    @property
    def steps(self) -> dict[str, float | None]:
        """What each cause leaves of the speed-up above it; their product is measured over ceiling."""
        return {
            "rejection": None if self.ceiling is None else self.oracle / self.ceiling,
            "wasted_drafts": self.draft / self.oracle,
            "wide_verification": self.verify / self.draft,
            "search": self.search / self.verify,
            "host": self.measured / self.search,
        }

    @property
    def efficiency(self) -> float:
        """Measured over oracle."""
        return self.measured / self.oracle

    @property
    def predicted(self) -> float:
        """What counters and phase times predict: the search level."""
        return self.search

    @property
    def host_loss(self) -> float:
        """Share of the predicted speed-up that goes between the phases: Python that belongs to no pass or search. The
        choice of tokens and the cache's upkeep are timed with the pass they follow."""
        return 1 - self.measured / self.search


def ladder(found: Iterable[Pair], greedy: bool, c_bytes: float | None) -> Ladder | None:
    """The ladder over the pairs of `paired_decode`; none where a pair lacks a trace or nothing was timed.

    D counts the drafter's forward passes, or the drafted tokens where it makes none (copies), so that D c is the
    measured draft time.
    """
    used = decoded(found, greedy)
    rows = [pair.method for pair in used]
    counts = count(rows)
    if any(row.rounds is None for row in rows) or not counts.num_rounds or not counts.verify_s:
        return None
    ref_tokens, ref_s, num_emitted, decode_s = question_sums(used, decoding).sum(axis=0).tolist()
    unit_s = ref_s / ref_tokens
    num_steps = counts.num_draft_steps or counts.num_drafted
    c = divide(counts.draft_s / unit_s, num_steps)
    draft, verify, select = counts.draft_s / unit_s, counts.verify_s / unit_s, counts.select_s / unit_s
    return Ladder(
        c=c,
        v=verify / counts.num_rounds,
        p=divide(select, counts.num_searches),
        c_bytes=c_bytes,
        ceiling=divide(1.0, c_bytes or 0.0),
        oracle=num_emitted / (counts.num_rounds + counts.num_accepted * (c or 0.0)),
        draft=num_emitted / (counts.num_rounds + draft),
        verify=num_emitted / (verify + draft),
        search=num_emitted / (verify + draft + select),
        measured=unit_s / (decode_s / num_emitted),
    )


def chain_expected_tokens(alpha: float, k: int) -> float:
    """Expected tokens of a round, bonus included, with `k` drafts in a chain each accepted with probability `alpha`."""
    return k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def worth_drafting(path_probability: float, speedup: float, c: float, extra_row: float) -> bool:
    """Whether one more draft token pays: its chance of being reached and kept is at least S* (c + v').

    `speedup` is the reachable one; `c` a draft step and `extra_row` one more verified row, in reference tokens.
    """
    return path_probability >= speedup * (c + extra_row)


def token_bytes(read_bytes: Mapping[str, Any]) -> int:
    """Bytes of weights that one target token reads; `read_bytes` as in `c_bytes`."""
    return int(sum(read_bytes["attn"]) + sum(read_bytes["mlp"]) + read_bytes["head"])


def c_bytes(rows: Iterable[TurnRecord], read_bytes: Mapping[str, Any]) -> float | None:
    """Bytes that one draft step reads / bytes that one target token reads, averaged over draft steps.

    `read_bytes` is the manifest's: `attn` and `mlp` per layer, and `head`. None where no step skipped layers
    of the target (a draft model's bytes are not known here).
    """
    full = token_bytes(read_bytes)
    steps, read = 0, 0
    for row in finished(rows):
        if row.rounds is None:
            continue
        for num_steps, code in zip(row.rounds.num_draft_steps, row.rounds.skip, strict=True):
            if code is not None:
                skip = LayerSkip.decode(code)
                left_out = sum(read_bytes["attn"][i] for i in skip.skipped_attn)
                left_out += sum(read_bytes["mlp"][i] for i in skip.skipped_mlp)
                steps += num_steps
                read += num_steps * (full - left_out)
    return divide(read / full, steps)
