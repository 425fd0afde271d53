"""What a run's own rounds say of the machine: verification by width, the regime, memory and energy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from clasp_core.metrics.counting import finished, num_tokens
from clasp_core.records import TurnRecord

RegimeWord: TypeAlias = Literal["launch-bound", "bandwidth-bound", "compute-bound verification", "unknown"]

COSTLY_ROW = 0.1
"""Verification is called compute-bound if one more row costs at least a tenth of a reference token."""
BANDWIDTH_SHARE = 0.6
"""Decoding is called bandwidth-bound if it reads weights at this share of the measured bandwidth or more."""


# Verification by width (MEASUREMENT 4, 7)


@dataclass(frozen=True, slots=True)
class WidthCost:
    """Verification passes of one width: `width` rows, that is the drafted tokens and the one before them."""

    width: int
    num_rounds: int
    verify_s: float
    """Median seconds of a pass."""
    v: float | None
    """The same over the reference's median step; unknown without one."""


def reference_step_s(rows: Iterable[TurnRecord]) -> float | None:
    """Median seconds of the reference's pass, host time outside; per token of a turn where it keeps no trace."""
    done = finished(rows)
    passes = [seconds for row in done if row.rounds is not None for seconds in row.rounds.verify_s]
    if passes:
        return median(passes)
    turns = [(row.decode_s, len(row.output_ids or ()) - 1) for row in done]
    per_token = [decode_s / steps for decode_s, steps in turns if decode_s and steps > 0]
    return median(per_token) if per_token else None


def verify_by_width(method_rows: Iterable[TurnRecord], step_s: float | None) -> list[WidthCost]:
    """The median verification pass of each width that the method ran, narrow ones first; `step_s` is the unit."""
    by_width: dict[int, list[float]] = defaultdict(list)
    for row in finished(method_rows):
        if row.rounds is not None:
            for drafted, seconds in zip(row.rounds.num_drafted, row.rounds.verify_s, strict=True):
                by_width[drafted + 1].append(seconds)
    medians = {width: median(seconds) for width, seconds in sorted(by_width.items())}
    return [WidthCost(w, len(by_width[w]), each, each / step_s if step_s else None) for w, each in medians.items()]


def extra_row(costs: Sequence[WidthCost]) -> float | None:
    """What one more verified row costs, in reference tokens: the mean of (v - 1) / (width - 1) over the rounds.

    Unknown where no pass was wider than one row.
    """
    wide = [(cost.num_rounds, (cost.v - 1) / (cost.width - 1)) for cost in costs if cost.width > 1 and cost.v]
    num_rounds = sum(n for n, _ in wide)
    return sum(n * slope for n, slope in wide) / num_rounds if num_rounds else None


# The regime (MEASUREMENT 7)


@dataclass(frozen=True, slots=True)
class Regime:
    """What bounds a result, and the two numbers that say so."""

    word: RegimeWord
    extra_row: float | None
    """One more verified row, in reference tokens."""
    bytes_per_s: float | None
    """Weights read per second by the reference's median step."""


def regime(
    costs: Sequence[WidthCost], step_s: float | None, token_bytes: int | None, bandwidth: float | None
) -> Regime:
    """The regime by stated rules, first match first.

    A further row that costs `COSTLY_ROW` or more: compute-bound verification. Else, against a measured `bandwidth`
    (bytes per second; None: not probed): `BANDWIDTH_SHARE` of it or more is bandwidth-bound, less is launch-bound.
    Without a probe the word is unknown, since a fast machine that waits and a slow one that reads look alike.
    `token_bytes` are those that one reference step reads.
    """
    row = extra_row(costs)
    bytes_per_s = token_bytes / step_s if token_bytes and step_s else None
    return Regime(_word(row, bytes_per_s, bandwidth), row, bytes_per_s)


def _word(row: float | None, bytes_per_s: float | None, bandwidth: float | None) -> RegimeWord:
    if row is not None and row >= COSTLY_ROW:
        return "compute-bound verification"
    if bytes_per_s is None or bandwidth is None:
        return "unknown"
    return "bandwidth-bound" if bytes_per_s >= BANDWIDTH_SHARE * bandwidth else "launch-bound"


# Memory and energy


def energy_per_token_j(rows: Iterable[TurnRecord]) -> float | None:
    """Joules of the model's GPUs per emitted token, prefill inside; over the rows whose energy is known."""
    known = [row for row in finished(rows) if row.energy_j is not None]
    return sum(row.energy_j or 0.0 for row in known) / num_tokens(known) if known else None


def peak_memory_bytes(rows: Iterable[TurnRecord]) -> dict[str, int] | None:
    """The highest peak of each device over finished turns; unknown where no row says."""
    peaks: dict[str, int] = {}
    for row in finished(rows):
        for name, peak in (row.peak_memory_bytes_by_device or {}).items():
            peaks[name] = max(peak, peaks.get(name, 0))
    return peaks or None
