"""Whether a method's answers are the reference's: grades, divergence, degenerate text (MEASUREMENT 5)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clasp_core.metrics.counting import divide, finished, num_tokens
from clasp_core.metrics.pairing import Pair, by_turn
from clasp_core.records import TurnRecord

Grade: TypeAlias = Literal["sampled", "exact", "tie", "missing", "mismatch"]
_SEVERITY: tuple[Grade, ...] = ("sampled", "exact", "tie", "missing", "mismatch")


@dataclass(frozen=True, slots=True)
class Grades:
    """The worst grade of a method's turns, and how many turns got each grade."""

    worst: Grade
    counts: dict[Grade, int]


def grades(reference_rows: Sequence[TurnRecord], method_rows: Sequence[TurnRecord], greedy: bool) -> Grades:
    """Grade every turn that either side has a row of, failed ones too; joined by key, never by position (P39)."""
    reference, method = by_turn(reference_rows), by_turn(method_rows)
    turns = {row.pair for row in (*reference_rows, *method_rows)}
    counts = Counter(grade_turn(reference.get(turn), method.get(turn), greedy) for turn in turns)
    worst: Grade = max(counts, key=_SEVERITY.index, default="missing")
    return Grades(worst, {grade: counts[grade] for grade in _SEVERITY})


def grade_turn(reference: TurnRecord | None, method: TurnRecord | None, greedy: bool) -> Grade:
    """One turn's grade. A turn without an answer on both sides is missing; ids of samples are not compared.

    A greedy answer to another prompt than the reference's (own history) is missing too: nothing shows what the
    reference would have said to it.
    Different ids are a tie only if the method's row holds a top-1 minus top-2 gap within its bound, taken where the
    ids really part; without such evidence they are a mismatch.
    """
    if reference is None or method is None or not finished([reference]) or not finished([method]):
        return "missing"
    if not greedy:
        return "sampled"
    if not Pair(reference, method).same_prompt:
        return "missing"
    index = first_divergence(reference.output_ids or (), method.output_ids or ())
    if index is None:
        return "exact"
    gap, bound = method.divergence_gap, method.divergence_bound
    if gap is None or bound is None or method.first_divergence != index:
        return "mismatch"
    return "tie" if gap <= bound else "mismatch"


def mismatches(
    reference_rows: Sequence[TurnRecord], method_rows: Sequence[TurnRecord], greedy: bool
) -> list[TurnRecord]:
    """The method's rows whose grade is a mismatch, in the order given; one of them fails a run."""
    reference = by_turn(reference_rows)
    return [row for row in method_rows if grade_turn(reference.get(row.pair), row, greedy) == "mismatch"]


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing id, the shorter length if one is a prefix of the other; null if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def tokens_repeated(ids: Sequence[int]) -> bool:
    """Whether a text is degenerate: one 4-gram occurs 10 times or more and makes up a fifth of it (P55)."""
    grams = Counter(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    most = max(grams.values(), default=0)
    return most >= 10 and 4 * most >= math.ceil(len(ids) / 5)


def length_ratio(found: Sequence[Pair]) -> float | None:
    """Emitted tokens of the method over those of the reference, on the same turns (P13)."""
    return divide(num_tokens(pair.method for pair in found), num_tokens(pair.reference for pair in found))
