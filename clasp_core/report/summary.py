"""The table of a run: as plain data (`summary.json`) and as it is printed. Every figure comes from `metrics`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clasp_core import costs
from clasp_core.errors import UserError
from clasp_core.metrics import counting, grading, losses, pairing, speedups
from clasp_core.metrics.pairing import Pair, TurnKey
from clasp_core.metrics.speedups import Interval
from clasp_core.records import TurnRecord

SCHEMA = 1
"""Version of the summary's layout."""

OVERALL = "overall"

Cell: TypeAlias = dict[str, Any]
Note: TypeAlias = dict[str, Any]


# The summary as data


def summarise(
    rows: Sequence[TurnRecord],
    reference: str | None,
    methods: Sequence[str],
    greedy: bool,
    read_bytes: Mapping[str, Any] | None,
    offline_search_s: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Cells per method and task (and `overall`), ladders and notes, as JSON-able data.

    Figures use the turns that every compared method finished; a method that finished none is left out of that
    comparison and noted. Failures, missing turns and grades cover all turns.
    `read_bytes` is the manifest's (null: no ceilings). `reference` null: no speed-ups.
    """
    names = [name for name in dict.fromkeys((reference, *methods)) if name is not None]
    run = _Run([row for row in rows if row.method in names], reference, names, greedy)
    tasks = list(dict.fromkeys(row.task for row in run.rows))
    if OVERALL in tasks:
        raise UserError(f"task name {OVERALL!r} is the summary's own; rename the task")
    scopes = {task: run.only(task) for task in tasks} | {OVERALL: run}
    cells = {name: {scope: _cell(part, name, scope) for scope, part in scopes.items()} for name in names}
    offline = {name: _offline(run, name, seconds) for name, seconds in offline_search_s.items()}
    return {
        "schema": SCHEMA,
        "reference": reference,
        "greedy": greedy,
        "headline": "paired_total",
        "methods": names,
        "tasks": tasks,
        "num_turns": len(run.turns),
        "num_common_turns": len(run.common),
        "cells": cells,
        "ladders": {
            name: {scope: _ladder(part, name, read_bytes) for scope, part in scopes.items()}
            for name in names
            if reference is not None and name != reference
        },
        "offline_search": offline,
        "notes": _notes(run, cells, tasks) + [_note_on_search(*item) for item in offline.items()],
    }


@dataclass(frozen=True, slots=True)
class _Run:
    """The rows under one scope and what is compared in it."""

    rows: list[TurnRecord]
    reference: str | None
    names: list[str]
    greedy: bool

    def only(self, task: str) -> _Run:
        return _Run([row for row in self.rows if row.task == task], self.reference, self.names, self.greedy)

    def of(self, name: str | None) -> list[TurnRecord]:
        return [row for row in self.rows if row.method == name]

    @property
    def turns(self) -> set[TurnKey]:
        return {row.pair for row in self.rows}

    @property
    def compared(self) -> list[str]:
        done = {row.method for row in counting.finished(self.rows)}
        return [name for name in self.names if name in done]

    @property
    def common(self) -> set[TurnKey]:
        return pairing.common_turns(self.rows, self.compared)

    def used(self, name: str | None) -> list[TurnRecord]:
        common = self.common
        return [row for row in counting.finished(self.of(name)) if row.pair in common]

    def pairs(self, name: str) -> tuple[Pair, ...]:
        if self.reference in (None, name):
            return ()
        return pairing.pairs(self.used(self.reference), self.used(name)).pairs

    def failed(self, name: str) -> list[TurnRecord]:
        done = {row.pair for row in counting.finished(self.of(name))}
        return [row for row in self.of(name) if row.pair not in done]


def _cell(run: _Run, name: str, scope: str) -> Cell:
    used = run.used(name)
    failed = {row.pair for row in run.failed(name)}
    return {
        "num_questions": len({(row.task, row.question_id) for row in used}),
        "num_turns": len(used),
        "num_failed": len(failed),
        "num_missing": len(run.turns - {row.pair for row in run.of(name)}),
        "num_repetitive": sum(grading.tokens_repeated(row.output_ids or ()) for row in used),
        **_counting(used),
        "shares": asdict(counting.shares(used)),
        "energy_per_token_j": costs.energy_per_token_j(used),
        "peak_memory_bytes": costs.peak_memory_bytes(used),
        "time_to_first_token_s": counting.time_to_first_token(used),
        "decode_tokens_per_s": counting.decode_tokens_per_s(used),
        "end_to_end_tokens_per_s": counting.end_to_end_tokens_per_s(used),
        **_comparison(run, name, scope),
    }


def _counting(used: Sequence[TurnRecord]) -> Cell:
    levels: tuple[counting.Level, ...] = ("rounds", "questions", "tasks")
    counts = counting.count(used) if any(row.rounds is not None for row in used) else None
    return {
        "num_tokens": counting.num_tokens(used),
        "num_rounds": counts and counts.num_rounds,
        "num_drafted": counts and counts.num_drafted,
        "num_accepted": counts and counts.num_accepted,
        "mean_emitted_per_round": {level: counting.mean_emitted_per_round(used, level) for level in levels},
        "mean_accepted_per_round": {level: counting.mean_accepted_per_round(used, level) for level in levels},
        "acceptance_rate": {level: counting.acceptance_rate(used, level) for level in levels},
    }


def _comparison(run: _Run, name: str, scope: str) -> Cell:
    """What a method's cell says against the reference; null in the reference's own cell."""
    found = run.pairs(name)
    against = run.reference is not None and name != run.reference
    typical, total = speedups.typical(found, run.greedy), speedups.paired_total(found, run.greedy)
    estimates = {
        "paired_total": total,
        "paired_decode": speedups.paired_decode(found, run.greedy),
        "spec_bench": speedups.spec_bench(found),
        "geometric": speedups.geometric(found),
        "mean_of_ratios": speedups.mean_of_ratios(found),
    }
    if scope == OVERALL:
        estimates["paper_overall"] = speedups.paper_overall(found)
    return {
        "speedup": {label: asdict(interval) if interval else None for label, interval in estimates.items()},
        "typical": typical,
        "disturbed": speedups.disturbed(typical, total),
        "slow_share": speedups.slow_share(found),
        "num_equal_turns": sum(pair.equal for pair in found) if against else None,
        "length_ratio": grading.length_ratio(found),
        "grade": asdict(grading.grades(run.of(run.reference), run.of(name), run.greedy)) if against else None,
    }


def _ladder(run: _Run, name: str, read_bytes: Mapping[str, Any] | None) -> Cell | None:
    """The ladder of one scope; the bytes of a draft step are those of its own rows, since skip sets change."""
    c_bytes = losses.c_bytes(run.of(name), read_bytes) if read_bytes else None
    found = losses.ladder(run.pairs(name), run.greedy, c_bytes)
    if found is None:
        return None
    derived = {"efficiency": found.efficiency, "predicted": found.predicted, "host_loss": found.host_loss}
    return {**asdict(found), **derived, "steps": found.steps}


def _offline(run: _Run, name: str, seconds: float) -> Cell:
    """An offline search beside the run: its seconds, and the headline with them inside."""
    found = run.pairs(name)
    return {
        "seconds": seconds,
        "paired_total_with_search": speedups.paired_total_with_search(found, run.greedy, seconds),
        "tokens_to_break_even": speedups.tokens_to_break_even(found, run.greedy, seconds),
    }


def _note_on_search(name: str, cost: Cell) -> Note:
    even = cost["tokens_to_break_even"]
    pays = f"pays for itself after {even:.0f} tokens" if even else "does not pay for itself at this speed"
    text = (
        f"{name}: its skip set took {cost['seconds']:.0f} s to find before the run, outside every figure; charged to "
        f"this run's tokens, paired_total is {_number(cost['paired_total_with_search'])}; the search {pays}"
    )
    return _note("offline_search", name, text)


# Notes: what a reader must know before believing a cell


def _notes(run: _Run, cells: Mapping[str, Mapping[str, Cell]], tasks: Sequence[str]) -> list[Note]:
    notes = _notes_on_turns(run)
    for name in run.names:
        notes += _notes_on_rows(run, name, tasks)
        if name != run.reference:
            notes += _notes_on_prompts(run, name) + _notes_on_comparison(name, cells[name], tasks)
    return notes


def _note(kind: str, method: str | None, text: str) -> Note:
    return {"kind": kind, "method": method, "text": text}


def _notes_on_turns(run: _Run) -> list[Note]:
    notes = [
        _note("nothing_finished", name, f"{name} finished no turn and is left out of the comparison")
        for name in run.names
        if name not in run.compared
    ]
    num_left_out = len(run.turns) - len(run.common)
    if run.compared and num_left_out:
        text = f"{num_left_out} of {len(run.turns)} turns are in no figure, since not every method finished them"
        notes.append(_note("turns_left_out", None, text))
    return notes


def _notes_on_rows(run: _Run, name: str, tasks: Sequence[str]) -> list[Note]:
    notes, num_turns = [], len(run.turns)
    if failed := run.failed(name):
        num_failed = len({row.pair for row in failed})
        text = f"{name} failed on {num_failed} of {num_turns} turns; the first: {failed[0].error or 'no output'}"
        notes.append(_note("failed_turns", name, text))
    if num_missing := len(run.turns - {row.pair for row in run.of(name)}):
        notes.append(_note("missing_turns", name, f"{name} has no row for {num_missing} of {num_turns} turns"))
    if num_repetitive := sum(grading.tokens_repeated(row.output_ids or ()) for row in run.used(name)):
        answers = f"{num_repetitive} of {len(run.used(name))} answers"
        text = f"{name} repeats one 4-gram over and over in {answers}; such text is easy to draft"
        notes.append(_note("repetition", name, text))
    idle = [task for task in tasks if name != run.reference and _drafted_nothing(run.only(task).used(name))]
    if idle:
        where = "" if len(idle) == len(tasks) else f" in {', '.join(idle)}"
        text = f"no drafting happened with {name}{where}; its parameters have no effect there"
        notes.append(_note("no_drafting", name, text))
    return notes


def _drafted_nothing(used: Collection[TurnRecord]) -> bool:
    return bool(used) and all(row.rounds is not None and not any(row.rounds.num_drafted) for row in used)


def _notes_on_prompts(run: _Run, name: str) -> list[Note]:
    """How many turns were no answers to the reference's prompt, which an own history brings about."""
    found = run.pairs(name)
    if not (num_other := sum(not pair.same_prompt for pair in found)):
        return []
    kept = "graded missing and in no paired figure" if run.greedy else "kept in the figures, as times per token"
    text = f"{name} answered another prompt than the reference on {num_other} of {len(found)} turns; they are {kept}"
    return [_note("other_prompts", name, text)]


def _notes_on_comparison(name: str, cells: Mapping[str, Cell], tasks: Sequence[str]) -> list[Note]:
    notes, overall = [], cells[OVERALL]
    if num_mismatches := (overall["grade"] or {"counts": {}})["counts"].get("mismatch"):
        text = f"{name} differs from the reference on {num_mismatches} turns, and no tie explains it: not lossless"
        notes.append(_note("mismatch", name, text))
    ratio = overall["length_ratio"]
    if ratio is not None and not 0.9 <= ratio <= 1.1:
        text = f"{name} emitted {ratio:.2f} times the reference's tokens; read paired_total, on equal answers"
        notes.append(_note("length", name, text))
    if overall["slow_share"]:
        text = f"{overall['slow_share']:.0%} of the turns paired with {name} ran in a slow spell; they are kept"
        notes.append(_note("slow_spells", name, text))
    return notes + _notes_on_disturbance(name, cells, tasks)


def _notes_on_disturbance(name: str, cells: Mapping[str, Cell], tasks: Sequence[str]) -> list[Note]:
    """One note on the overall cell, or else on the tasks that are disturbed without it."""
    overall = cells[OVERALL]
    if not overall["disturbed"]:
        where = [task for task in tasks if cells[task]["disturbed"]]
        text = f"{name}: disturbed in {', '.join(where)}: typical and paired_total differ by more than 10 %"
        return [_note("disturbed", name, text)] if where else []
    total, decode = overall["speedup"]["paired_total"], overall["speedup"]["paired_decode"]
    text = f"{name}: disturbed run: typical {overall['typical']:.2f}, paired_total {total['value']:.2f}"
    if decode and not speedups.disturbed(overall["typical"], Interval(**decode)):
        prefill = overall["shares"]["prefill"]
        text += f"; paired_decode is {decode['value']:.2f}, so prefill ({prefill:.0%} of its time) and no slow spell"
    return [_note("disturbed", name, text)]


# The summary as it is printed

_COLUMNS = MappingProxyType(
    {
        "n": "questions",
        "tokens": "emitted tokens",
        "emitted\n/round": "MAT: committed tokens per target pass, over all rounds, the target's own token included",
        "acc.\n/round": "accepted draft tokens per target pass, over all rounds, the target's own token not counted",
        "acc.\nrate": "accepted over drafted tokens, over all rounds; n/a where nothing was drafted",
        "draft\n%": "share of decode time, which is all after the first token",
        "verify\n%": "the same for the target's passes",
        "select\n%": "the same for searching a skip set",
        "host\n%": "the rest of decode time: sampling, cache, Python",
        "tok/s": "tokens per second end to end, prefill inside",
        "speed-up\n[low,high]": "paired_total, see below, with its 95 % bootstrap interval over questions",
        "grade": "worst grade of a turn, how many turns got it, of how many; failed and missing turns included",
    }
)

_ESTIMATORS = MappingProxyType(
    {
        "paired_total": "total time, prefill inside, over pairs with equal ids (sampling: time per token)",
        "paired_decode": "the same over decode time",
        "spec_bench": "pooled: mean of the questions' tokens/s over that of the reference",
        "paper_overall": "unweighted mean of the tasks' spec_bench",
        "geometric": "geometric mean of the questions' ratios of tokens/s",
    }
)

_ROBUST = MappingProxyType(
    {
        "typical": "decode speed-up if every round had cost the median of its kind",
        "slow\n%": "pairs whose reference time per token is over twice the median",
    }
)

_LADDER = MappingProxyType(
    {
        "ceiling": "1 / c_bytes",
        "oracle": "T / (R + A c), as if every drafted token were kept",
        "draft": "T / (R + D c), wasted drafts paid",
        "verify": "T / (R v + D c), the wider pass paid",
        "search": "T / (R v + D c + P p), the search paid; the predicted speed-up",
        "measured": "paired_decode; what it lacks to the step before is the host's",
        "effi-\nciency": "measured / oracle",
        "host\nloss %": "1 - measured / search",
        "c": "one draft step by the clock, in reference tokens",
        "c_bytes": "one draft step by the bytes it reads",
        "v": "one verification pass, as wide as it ran, in reference tokens",
        "p": "one search for a skip set, in reference tokens",
    }
)


def render(summary: Mapping[str, Any], console: Console) -> None:
    """Print a table per task, the overall one, the speed-ups by estimator, the ladder and the notes."""
    for scope in (*summary["tasks"], OVERALL):
        console.print(_main_table(summary, scope))
    _print_legend(console, _COLUMNS)
    if summary["ladders"]:
        console.print(_estimator_table(summary))
        _print_legend(console, {**_ESTIMATORS, **_ROBUST})
        console.print(_ladder_table(summary))
        _print_legend(console, _LADDER)
    for note in summary["notes"]:
        console.print(Text(f"note: {note['text']}", style="yellow"))


def _main_table(summary: Mapping[str, Any], scope: str) -> Table:
    scale = f", {summary['num_common_turns']} of {summary['num_turns']} turns" if scope == OVERALL else ""
    table = _table(f"{scope}{scale}: speed-up by {summary['headline']} [95 % interval over questions]", _COLUMNS)
    for name in summary["methods"]:
        cell, is_reference = summary["cells"][name][scope], name == summary["reference"]
        speedup = "reference" if is_reference else _interval(cell["speedup"][summary["headline"]])
        _add(table, name, [*_figures(cell), speedup, "-" if is_reference else _grade(cell["grade"])])
    return table


def _figures(cell: Cell) -> list[str]:
    return [
        str(cell["num_questions"]),
        str(cell["num_tokens"]),
        _number(cell["mean_emitted_per_round"]["rounds"]),
        _number(cell["mean_accepted_per_round"]["rounds"]),
        _number(cell["acceptance_rate"]["rounds"], 3),
        *(_percent(cell["shares"][part]) for part in ("draft", "verify", "select", "host")),
        _number(cell["end_to_end_tokens_per_s"], 1),
    ]


def _estimator_table(summary: Mapping[str, Any]) -> Table:
    table = _table("overall: speed-up by estimator [95 % interval over questions]", {**_ESTIMATORS, **_ROBUST})
    for name in summary["ladders"]:
        cell = summary["cells"][name][OVERALL]
        estimates = [_interval(cell["speedup"][label]) for label in _ESTIMATORS]
        _add(table, name, [*estimates, _number(cell["typical"]), _percent(cell["slow_share"])])
    return table


def _ladder_table(summary: Mapping[str, Any]) -> Table:
    table = _table("overall: loss ladder, the decode speed-up that is left after each loss", _LADDER)
    for name, by_scope in summary["ladders"].items():
        found = by_scope[OVERALL] or {}
        levels = [_number(found.get(label)) for label in ("ceiling", "oracle", "draft", "verify", "search", "measured")]
        costs = [_number(found.get(label), 3) for label in ("c", "c_bytes", "v", "p")]
        _add(table, name, [*levels, _number(found.get("efficiency")), _percent(found.get("host_loss")), *costs])
    return table


def _table(title: str, labels: Iterable[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column("method", overflow="fold", no_wrap=True)
    for label in labels:
        has_interval = label in _ESTIMATORS or label.startswith("speed-up")
        justify: Literal["left", "right"] = "left" if label == "grade" else "right"
        table.add_column(Text(label), justify=justify, min_width=len("[0.00,0.00]") if has_interval else None)
    return table


def _add(table: Table, name: str, values: Iterable[str]) -> None:
    table.add_row(Text(name), *(Text(value) for value in values))


def _print_legend(console: Console, meanings: Mapping[str, str]) -> None:
    for label, meaning in meanings.items():
        name = label.replace("-\n", "").replace("\n", " ")
        console.print(Text(f"  {name}: {meaning}", style="dim"))
    console.print()


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.0f}"


def _interval(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "n/a"
    if interval["low"] is None:
        return f"{interval['value']:.2f} [n/a]"
    return f"{interval['value']:.2f} [{interval['low']:.2f},{interval['high']:.2f}]"


def _grade(grade: Mapping[str, Any] | None) -> str:
    if grade is None:
        return "n/a"
    worst, num_graded = grade["worst"], sum(grade["counts"].values())
    return f"{worst} {grade['counts'].get(worst, 0)}/{num_graded}"
