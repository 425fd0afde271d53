"""Every published figure as a function of rows: counts, shares, speed-ups, the loss ladder, grades.

Sources are the sections of MEASUREMENT.md named in the docstrings. Unknown or not applicable is `None`, never 0 or 1.
Failed rows never enter a figure. "Decode" is everything after the first token; the prefill pass is not a round.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clasp_core.errors import UserError
from clasp_core.records import TurnRecord
from clasp_core.skip import LayerSkip

Floats: TypeAlias = NDArray[np.float64]
TurnKey: TypeAlias = tuple[str, int, int, int]
Level: TypeAlias = Literal["rounds", "questions", "tasks"]
Grade: TypeAlias = Literal["sampled", "exact", "tie", "missing", "mismatch"]

NUM_DRAWS = 10_000
SEED = 0
_CELLS_PER_CHUNK = 1_000_000
_SEVERITY: tuple[Grade, ...] = ("sampled", "exact", "tie", "missing", "mismatch")


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
    return sum(_length(row) for row in finished(rows))


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
    return _mean(rows, level, lambda counts: _divide(counts.num_emitted, counts.num_rounds))


def mean_accepted_per_round(rows: Iterable[TurnRecord], level: Level) -> float | None:
    """Kept draft tokens per verification pass, the target's own token not counted; 0 for autoregressive decoding."""
    return _mean(rows, level, lambda counts: _divide(counts.num_accepted, counts.num_rounds))


def acceptance_rate(rows: Iterable[TurnRecord], level: Level) -> float | None:
    """Kept over proposed draft tokens; questions or tasks where nothing was drafted have none and are left out."""
    return _mean(rows, level, lambda counts: _divide(counts.num_accepted, counts.num_drafted))


def _mean(rows: Iterable[TurnRecord], level: Level, ratio: Callable[[Counts], float | None]) -> float | None:
    known = [value for group in _groups(rows, level) if (value := ratio(count(group))) is not None]
    return fmean(known) if known else None


def _groups(rows: Iterable[TurnRecord], level: Level) -> list[list[TurnRecord]]:
    groups: dict[tuple[object, ...], list[TurnRecord]] = defaultdict(list)
    for row in rows:
        groups[{"rounds": (), "questions": (row.task, row.question_id), "tasks": (row.task,)}[level]].append(row)
    return list(groups.values())


def _divide(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _length(row: TurnRecord) -> int:
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
        draft=_divide(counts.draft_s, decode_s),
        verify=_divide(counts.verify_s, decode_s),
        select=_divide(counts.select_s, decode_s),
        host=_divide(host_s, decode_s),
        prefill=_divide(sum(row.prefill_s or 0.0 for row in timed), sum(row.total_s or 0.0 for row in timed)),
    )


def time_to_first_token(rows: Iterable[TurnRecord]) -> float | None:
    """Mean over turns of the seconds up to and including the first token."""
    known = [row.prefill_s for row in finished(rows) if row.prefill_s is not None]
    return fmean(known) if known else None


def decode_tokens_per_s(rows: Iterable[TurnRecord]) -> float | None:
    """Tokens after the first over decode seconds; turns of one token decoded nothing and are left out."""
    return _tokens_per_s(rows, _decoding)


def end_to_end_tokens_per_s(rows: Iterable[TurnRecord]) -> float | None:
    """All tokens over prefill and decode seconds; Spec-Bench's definition of speed."""
    return _tokens_per_s(rows, _end_to_end)


Work: TypeAlias = Callable[[TurnRecord], tuple[int, float] | None]


def _tokens_per_s(rows: Iterable[TurnRecord], work: Work) -> float | None:
    done = [part for row in finished(rows) if (part := work(row)) is not None]
    return _divide(sum(tokens for tokens, _ in done), sum(seconds for _, seconds in done))


def _end_to_end(row: TurnRecord) -> tuple[int, float] | None:
    return (_length(row), row.total_s) if row.total_s else None


def _decoding(row: TurnRecord) -> tuple[int, float] | None:
    return (_length(row) - 1, row.decode_s) if row.decode_s and _length(row) > 1 else None


# Pairing (MEASUREMENT 2, 6)


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
    reference, method = _by_turn(reference_rows), _by_turn(method_rows)
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


def _by_turn(rows: Iterable[TurnRecord]) -> dict[TurnKey, TurnRecord]:
    by_turn: dict[TurnKey, TurnRecord] = {}
    for row in finished(rows):
        if row.pair in by_turn:
            raise UserError(f"two finished rows answer turn {row.pair}; give one method of one run, each row once")
        by_turn[row.pair] = row
    return by_turn


def _comparable(found: Iterable[Pair], greedy: bool) -> list[Pair]:
    """Greedy answers are compared where they are the same text; sampled ones differ by design.

    Samples of one run have different prompts with an own history only, where the summary notes it.
    """
    return [pair for pair in found if pair.equal or not greedy]


def _decoded(found: Iterable[Pair], greedy: bool) -> list[Pair]:
    """The pairs under every decode figure: comparable, and both sides decoded something in a known time."""
    return [p for p in _comparable(found, greedy) if _decoding(p.reference) and _decoding(p.method)]


# Speed-up estimators (MEASUREMENT 3)


@dataclass(frozen=True, slots=True)
class Interval:
    """A speed-up with its 95 % bootstrap interval over `n` questions; no interval from one question."""

    value: float
    low: float | None
    high: float | None
    n: int


def paired_total(found: Iterable[Pair], greedy: bool) -> Interval | None:
    """Headline: total reference time over total method time, end to end.

    Greedy: over pairs with equal ids. Sampled: over all pairs, each side's time per emitted token.
    """
    return _interval(_sums(_comparable(found, greedy), _end_to_end), _ratio_of_times)


def paired_total_with_search(found: Iterable[Pair], greedy: bool, search_s: float) -> float | None:
    """`paired_total` with the seconds of an offline search charged to the method once, over all of these pairs.

    The more tokens the pairs have, the less it weighs; see `tokens_to_break_even`.
    """
    sums = _sums(_comparable(found, greedy), _end_to_end).sum(axis=0)
    if not len(sums) or not sums[0]:
        return None
    return float((sums[1] / sums[0]) / ((sums[3] + search_s) / sums[2]))


def tokens_to_break_even(found: Iterable[Pair], greedy: bool, search_s: float) -> float | None:
    """Tokens after which an offline search has earned its seconds back; None where the method is no faster."""
    sums = _sums(_comparable(found, greedy), _end_to_end).sum(axis=0)
    if not sums[0] or not sums[2]:
        return None
    saved_s = float(sums[1] / sums[0] - sums[3] / sums[2])
    return search_s / saved_s if saved_s > 0 else None


def paired_decode(found: Iterable[Pair], greedy: bool) -> Interval | None:
    """`paired_total` over decode time and the tokens after the first; the measured step of the ladder."""
    return _interval(_sums(_decoded(found, greedy), _decoding), _ratio_of_times)


def spec_bench(found: Iterable[Pair]) -> Interval | None:
    """Mean over questions of the method's tokens/s, over the same mean of the reference; turns of a question summed."""
    return _interval(_speeds(found), _ratio_of_speeds)


def geometric(found: Iterable[Pair]) -> Interval | None:
    """Geometric mean of the questions' ratios of tokens/s."""
    speeds = _speeds(found)
    return _interval(np.log(speeds[:, 1:] / speeds[:, :1]), lambda means: np.exp(means[..., 0]))


def mean_of_ratios(found: Iterable[Pair]) -> Interval | None:
    """Arithmetic mean of the questions' ratios of tokens/s (P32); flatters, and is offered for comparison only."""
    speeds = _speeds(found)
    return _interval(speeds[:, 1:] / speeds[:, :1], lambda means: means[..., 0])


def paper_overall(found: Iterable[Pair]) -> Interval | None:
    """Unweighted mean of the tasks' `spec_bench`; questions are resampled within their task.

    No interval where a task has a single question, since its spread is unknown.
    """
    by_task: dict[str, list[Pair]] = defaultdict(list)
    for pair in found:
        by_task[pair.method.task].append(pair)
    tables = [table for task in sorted(by_task) if len(table := _speeds(by_task[task]))]
    if not tables:
        return None
    value = float(np.mean([_ratio_of_speeds(table.mean(axis=0)) for table in tables]))
    n = sum(len(table) for table in tables)
    if min(len(table) for table in tables) == 1:
        return Interval(value, None, None, n)
    draws = [_ratio_of_speeds(_resampled_means(table, (SEED, index))) for index, table in enumerate(tables)]
    return Interval(value, *_percentiles(np.mean(draws, axis=0)), n)


def _sums(found: Iterable[Pair], work: Work) -> Floats:
    """One line per question: reference tokens and seconds, method tokens and seconds, over its turns and repeats."""
    sums: dict[tuple[str, int], Floats] = {}
    for pair in found:
        reference, method = work(pair.reference), work(pair.method)
        if reference is not None and method is not None:
            sums[pair.question] = sums.get(pair.question, np.zeros(4)) + np.array([*reference, *method])
    return np.array(list(sums.values())).reshape(-1, 4)


def _speeds(found: Iterable[Pair]) -> Floats:
    """One line per question: tokens/s of the reference and of the method, end to end."""
    sums = _sums(found, _end_to_end)
    return sums[:, 0::2] / sums[:, 1::2]


def _ratio_of_times(means: Floats) -> Floats:
    return (means[..., 1] / means[..., 0]) / (means[..., 3] / means[..., 2])


def _ratio_of_speeds(means: Floats) -> Floats:
    return means[..., 1] / means[..., 0]


def _interval(table: Floats, statistic: Callable[[Floats], Floats]) -> Interval | None:
    """`statistic` of the column means of a question table, with its paired bootstrap over the lines."""
    if not len(table):
        return None
    value = float(statistic(table.mean(axis=0)))
    if len(table) == 1:
        return Interval(value, None, None, 1)
    return Interval(value, *_percentiles(statistic(_resampled_means(table, (SEED, 0)))), len(table))


def _resampled_means(table: Floats, seed: tuple[int, int]) -> Floats:
    """Column means of `NUM_DRAWS` resamples of the lines, as weighted sums, in chunks that bound the memory."""
    rng, n = np.random.default_rng(seed), len(table)
    chunk = max(1, _CELLS_PER_CHUNK // n)
    means = []
    for start in range(0, NUM_DRAWS, chunk):
        size = min(chunk, NUM_DRAWS - start)
        picks = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        times_picked = np.bincount(picks.ravel(), minlength=size * n).reshape(size, n)
        means.append(times_picked @ table / n)
    return np.concatenate(means)


def _percentiles(draws: Floats) -> tuple[float, float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


# Robustness to slow spells (MEASUREMENT 3)


def typical(found: Iterable[Pair], greedy: bool) -> float | None:
    """T / (R v + D c + P p) with every cost the median of its kind and width, and the reference's median token as unit.

    Over the pairs of `paired_decode`. Both sides are summed from medians in the same way, so that the host's time is
    in neither and the reference against itself gives 1. A reference without a trace counts its median turn instead.
    """
    used = _decoded(found, greedy)
    method_s = _typical_token_s([pair.method for pair in used])
    reference_s = _typical_token_s([pair.reference for pair in used])
    if reference_s is None and used:
        reference_s = median(_decode_token_s(pair.reference) for pair in used)
    return reference_s / method_s if reference_s and method_s else None


def disturbed(typical_speedup: float | None, paired: Interval | None) -> bool | None:
    """Whether `typical` and a paired estimate differ by more than 10 %; unknown where either is."""
    if typical_speedup is None or paired is None:
        return None
    return abs(typical_speedup / paired.value - 1) > 0.10


def slow_share(found: Iterable[Pair]) -> float | None:
    """Share of pairs whose reference decode time per token is more than twice the median: hit by a slow spell."""
    token_s = [_decode_token_s(pair.reference) for pair in found if _decoding(pair.reference)]
    if not token_s:
        return None
    limit_s = 2 * median(token_s)
    return sum(s > limit_s for s in token_s) / len(token_s)


def _typical_token_s(rows: Sequence[TurnRecord]) -> float | None:
    """Seconds per token after the first, every round at the median cost of rounds of its width."""
    draft, verify, select = [], [], []
    for row in rows:
        if row.rounds is None:
            return None
        trace = row.rounds
        steps = trace.num_draft_steps if any(trace.num_draft_steps) else trace.num_drafted
        draft += list(zip(steps, trace.draft_s, strict=True))
        verify += list(zip(trace.num_drafted, trace.verify_s, strict=True))
        select += list(zip(trace.num_searches, trace.select_s, strict=True))
    seconds = sum(_sum_at_medians(costs) for costs in (draft, verify, select))
    return _divide(seconds, sum(_length(row) - 1 for row in rows))


def _sum_at_medians(costs: Iterable[tuple[int, float]]) -> float:
    by_width: dict[int, list[float]] = defaultdict(list)
    for width, seconds in costs:
        by_width[width].append(seconds)
    return sum(len(group) * median(group) for group in by_width.values())


def _decode_token_s(row: TurnRecord) -> float:
    return (row.decode_s or 0.0) / (_length(row) - 1)


# Loss ladder (MEASUREMENT 4)


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
        """Share of the predicted speed-up that sampling, cache, Python and synchronisation cost."""
        return 1 - self.measured / self.search


def ladder(found: Iterable[Pair], greedy: bool, c_bytes: float | None) -> Ladder | None:
    """The ladder over the pairs of `paired_decode`; none where a pair lacks a trace or nothing was timed.

    D counts the drafter's forward passes, or the drafted tokens where it makes none (copies), so that D c is the
    measured draft time.
    """
    used = _decoded(found, greedy)
    rows = [pair.method for pair in used]
    counts = count(rows)
    if any(row.rounds is None for row in rows) or not counts.num_rounds or not counts.verify_s:
        return None
    ref_tokens, ref_s, num_emitted, decode_s = _sums(used, _decoding).sum(axis=0).tolist()
    unit_s = ref_s / ref_tokens
    num_steps = counts.num_draft_steps or counts.num_drafted
    c = _divide(counts.draft_s / unit_s, num_steps)
    draft, verify, select = counts.draft_s / unit_s, counts.verify_s / unit_s, counts.select_s / unit_s
    return Ladder(
        c=c,
        v=verify / counts.num_rounds,
        p=_divide(select, counts.num_searches),
        c_bytes=c_bytes,
        ceiling=_divide(1.0, c_bytes or 0.0),
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


# Losslessness (MEASUREMENT 5)


@dataclass(frozen=True, slots=True)
class Grades:
    """The worst grade of a method's turns, and how many turns got each grade."""

    worst: Grade
    counts: dict[Grade, int]


def grades(reference_rows: Sequence[TurnRecord], method_rows: Sequence[TurnRecord], greedy: bool) -> Grades:
    """Grade every turn that either side has a row of, failed ones too; joined by key, never by position (P39)."""
    reference, method = _by_turn(reference_rows), _by_turn(method_rows)
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
    reference = _by_turn(reference_rows)
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
    return _divide(num_tokens(pair.method for pair in found), num_tokens(pair.reference for pair in found))


# Bytes


def c_bytes(rows: Iterable[TurnRecord], read_bytes: Mapping[str, Any]) -> float | None:
    """Bytes that one draft step reads / bytes that one target token reads, averaged over draft steps.

    `read_bytes` is the manifest's: `attn` and `mlp` per layer, and `head`. None where no step skipped layers
    of the target (a draft model's bytes are not known here).
    """
    full = sum(read_bytes["attn"]) + sum(read_bytes["mlp"]) + read_bytes["head"]
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
    return _divide(read / full, steps)
