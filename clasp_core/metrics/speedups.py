"""Speed-ups of paired answers with their bootstrap intervals, and what slow spells did to them (MEASUREMENT 3)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from clasp_core.metrics.counting import answer_length, decoding, divide, end_to_end
from clasp_core.metrics.pairing import Floats, Pair, comparable, decoded, question_sums
from clasp_core.records import TurnRecord

NUM_DRAWS = 10_000
SEED = 0
_CELLS_PER_CHUNK = 1_000_000


# Estimators


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
    return _interval(question_sums(comparable(found, greedy), end_to_end), _ratio_of_times)


def paired_total_with_search(found: Iterable[Pair], greedy: bool, search_s: float) -> float | None:
    """`paired_total` with the seconds of an offline search charged to the method once, over all of these pairs.

    The more tokens the pairs have, the less it weighs; see `tokens_to_break_even`.
    """
    sums = question_sums(comparable(found, greedy), end_to_end).sum(axis=0)
    if not len(sums) or not sums[0]:
        return None
    return float((sums[1] / sums[0]) / ((sums[3] + search_s) / sums[2]))


def tokens_to_break_even(found: Iterable[Pair], greedy: bool, search_s: float) -> float | None:
    """Tokens after which an offline search has earned its seconds back; None where the method is no faster."""
    sums = question_sums(comparable(found, greedy), end_to_end).sum(axis=0)
    if not sums[0] or not sums[2]:
        return None
    saved_s = float(sums[1] / sums[0] - sums[3] / sums[2])
    return search_s / saved_s if saved_s > 0 else None


def paired_decode(found: Iterable[Pair], greedy: bool) -> Interval | None:
    """`paired_total` over decode time and the tokens after the first; the measured step of the ladder."""
    return _interval(question_sums(decoded(found, greedy), decoding), _ratio_of_times)


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


def _speeds(found: Iterable[Pair]) -> Floats:
    """One line per question: tokens/s of the reference and of the method, end to end."""
    sums = question_sums(found, end_to_end)
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


# Robustness to slow spells


def typical(found: Iterable[Pair], greedy: bool) -> float | None:
    """T / (R v + D c + P p) with every cost the median of its kind and width, and the reference's median token as unit.

    Over the pairs of `paired_decode`. Both sides are summed from medians in the same way, so that the host's time is
    in neither and the reference against itself gives 1. A reference without a trace counts its median turn instead.
    """
    used = decoded(found, greedy)
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
    token_s = [_decode_token_s(pair.reference) for pair in found if decoding(pair.reference)]
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
    return divide(seconds, sum(answer_length(row) - 1 for row in rows))


def _sum_at_medians(costs: Iterable[tuple[int, float]]) -> float:
    by_width: dict[int, list[float]] = defaultdict(list)
    for width, seconds in costs:
        by_width[width].append(seconds)
    return sum(len(group) * median(group) for group in by_width.values())


def _decode_token_s(row: TurnRecord) -> float:
    return (row.decode_s or 0.0) / (answer_length(row) - 1)
