"""The table of a run as plain data (`summary.json`); `printing` shows it. Every figure comes from `metrics`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

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
    even, charged = cost["tokens_to_break_even"], cost["paired_total_with_search"]
    pays = f"pays for itself after {even:.0f} tokens" if even else "does not pay for itself at this speed"
    text = (
        f"{name}: its skip set took {cost['seconds']:.0f} s to find before the run, outside every figure; charged to "
        f"this run's tokens, paired_total is {'n/a' if charged is None else f'{charged:.2f}'}; the search {pays}"
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
