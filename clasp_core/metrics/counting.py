"""Counts, shares of time and tokens per second of one method's rows (MEASUREMENT 1 and 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from clasp_core.records import TurnRecord

Level: TypeAlias = Literal["rounds", "questions", "tasks"]
Work: TypeAlias = Callable[[TurnRecord], tuple[int, float] | None]
"""Tokens and seconds of a row; None where they are unknown or nothing was done."""


# Counting (MEASUREMENT 1)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over every round of some finished rows; times in seconds."""

    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    num_draft_steps: int
    num_searches: int
    draft_s: float
    verify_s: float
    select_s: float


def finished(rows: Iterable[TurnRecord]) -> list[TurnRecord]:
    """The rows that answer their turn: no error, and ids to show for it."""
    return [row for row in rows if row.error is None and row.output_ids]


def num_tokens(rows: Iterable[TurnRecord]) -> int:
    """Emitted tokens of finished rows, counted on the ids for every method alike (P3)."""
    return sum(answer_length(row) for row in finished(rows))


def count(rows: Iterable[TurnRecord]) -> Counts:
    """Sums of the round traces of finished rows; a row without a trace adds nothing."""
    traces = [row.rounds for row in finished(rows) if row.rounds is not None]
    return Counts(
        num_rounds=sum(len(trace) for trace in traces),
        num_drafted=sum(sum(trace.num_drafted) for trace in traces),
        num_accepted=sum(sum(trace.num_accepted) for trace in traces),
        num_emitted=sum(sum(trace.num_emitted) for trace in traces),
        num_draft_steps=sum(sum(trace.num_draft_steps) for trace in traces),
        num_searches=sum(sum(trace.num_searches) for trace in traces),
        draft_s=sum(sum(trace.draft_s) for trace in traces),
        verify_s=sum(sum(trace.verify_s) for trace in traces),
        select_s=sum(sum(trace.select_s) for trace in traces),
    )


def mean_emitted_per_round(rows: Iterable[TurnRecord], level: Level) -> float | None:
    """MAT: committed tokens per verification pass, the target's own token included; 1 for autoregressive decoding.

    `rounds` pools all rounds; `questions` and `tasks` average the pooled value of each question or task.
    """
    return _mean(rows, level, lambda counts: divide(counts.num_emitted, counts.num_rounds))


def mean_accepted_per_round(rows: Iterable[TurnRecord], level: Level) -> float | None:
    """Kept draft tokens per verification pass, the target's own token not counted; 0 for autoregressive decoding."""
    return _mean(rows, level, lambda counts: divide(counts.num_accepted, counts.num_rounds))


def acceptance_rate(rows: Iterable[TurnRecord], level: Level) -> float | None:
    """Kept over proposed draft tokens; questions or tasks where nothing was drafted have none and are left out."""
    return _mean(rows, level, lambda counts: divide(counts.num_accepted, counts.num_drafted))


def _mean(rows: Iterable[TurnRecord], level: Level, ratio: Callable[[Counts], float | None]) -> float | None:
    known = [value for group in _groups(rows, level) if (value := ratio(count(group))) is not None]
    return fmean(known) if known else None


def _groups(rows: Iterable[TurnRecord], level: Level) -> list[list[TurnRecord]]:
    groups: dict[tuple[object, ...], list[TurnRecord]] = defaultdict(list)
    for row in rows:
        groups[{"rounds": (), "questions": (row.task, row.question_id), "tasks": (row.task,)}[level]].append(row)
    return list(groups.values())


def divide(numerator: float, denominator: float) -> float | None:
    """The quotient; None where the denominator is not positive."""
    return numerator / denominator if denominator > 0 else None


def answer_length(row: TurnRecord) -> int:
    """How many tokens a row emitted, counted on its ids."""
    return len(row.output_ids or ())


# Where the time went, and tokens per second (MEASUREMENT 2)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of decode time (they sum to 1; `host` is the rest), and beside them the prefill's share of the total."""

    draft: float | None
    verify: float | None
    select: float | None
    host: float | None
    prefill: float | None


def shares(rows: Iterable[TurnRecord]) -> Shares:
    """Where the seconds of finished rows went; rows without a trace say nothing about decode."""
    done = finished(rows)
    traced = [row for row in done if row.rounds is not None and row.decode_s is not None]
    counts, decode_s = count(traced), sum(row.decode_s or 0.0 for row in traced)
    host_s = decode_s - counts.draft_s - counts.verify_s - counts.select_s
    timed = [row for row in done if row.total_s is not None]
    return Shares(
        draft=divide(counts.draft_s, decode_s),
        verify=divide(counts.verify_s, decode_s),
        select=divide(counts.select_s, decode_s),
        host=divide(host_s, decode_s),
        prefill=divide(sum(row.prefill_s or 0.0 for row in timed), sum(row.total_s or 0.0 for row in timed)),
    )


def time_to_first_token(rows: Iterable[TurnRecord]) -> float | None:
    """Mean over turns of the seconds up to and including the first token."""
    known = [row.prefill_s for row in finished(rows) if row.prefill_s is not None]
    return fmean(known) if known else None


def decode_tokens_per_s(rows: Iterable[TurnRecord]) -> float | None:
    """Tokens after the first over decode seconds; turns of one token decoded nothing and are left out."""
    return _tokens_per_s(rows, decoding)


def end_to_end_tokens_per_s(rows: Iterable[TurnRecord]) -> float | None:
    """All tokens over prefill and decode seconds; Spec-Bench's definition of speed."""
    return _tokens_per_s(rows, end_to_end)


def _tokens_per_s(rows: Iterable[TurnRecord], work: Work) -> float | None:
    done = [part for row in finished(rows) if (part := work(row)) is not None]
    return divide(sum(tokens for tokens, _ in done), sum(seconds for _, seconds in done))


def end_to_end(row: TurnRecord) -> tuple[int, float] | None:
    """All tokens and all seconds of a row, prefill inside; None where a part of the time is unknown."""
    return (answer_length(row), row.total_s) if row.total_s else None


def decoding(row: TurnRecord) -> tuple[int, float] | None:
    """Tokens and seconds after the first token; None where there are none or the time is unknown."""
    return (answer_length(row) - 1, row.decode_s) if row.decode_s and answer_length(row) > 1 else None
