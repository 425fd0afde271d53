"""Runs side by side, from their folders alone: estimators, ladder, losslessness and what differs in configuration."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clasp_core.provenance import commit_of, differing, value_at
from clasp_core.report.runs import Run
from clasp_core.report.summary import OVERALL
from clasp_core.report.values import Columns, estimators, ladders
from clasp_core.store import read_runs

ESTIMATORS = ("paired_total", "paired_decode", "spec_bench", "paper_overall", "geometric")
GRADES = ("sampled", "exact", "tie", "missing", "mismatch")
NOT_COMPARED = ("results_dir", "resume", "tracker")
"""Configuration that changes no number."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compared run: what it is called here, and its summary, made anew from its rows."""

    label: str
    run: Run
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is shown. `left_out` are runs that did not end well; `stamps` what must be read first."""

    title: str
    entries: tuple[Entry, ...]
    left_out: tuple[tuple[str, Run], ...]
    stamps: tuple[str, ...]


def compare(title: str, runs: Sequence[Run], force: bool) -> Comparison:
    """The comparison of runs that ended well.

    Raises UserError, naming the field, where their fingerprints differ; with `force` that is stamped on it instead.
    """
    labels = _labels(runs)
    good = [(label, run) for label, run in zip(labels, runs, strict=True) if run.manifest.status == "ok"]
    if not force:
        read_runs(run.folder for _, run in good)
    return Comparison(
        title=title,
        entries=tuple(Entry(label, run, run.summary()) for label, run in good),
        left_out=tuple(pair for pair in zip(labels, runs, strict=True) if pair not in good),
        stamps=tuple(_stamps(good)),
    )


def _labels(runs: Sequence[Run]) -> list[str]:
    """The random end of each run's id, or all of it where two share that end."""
    ends = [run.short_id for run in runs]
    return [end if ends.count(end) == 1 else run.manifest.run_id for end, run in zip(ends, runs, strict=True)]


def _stamps(good: Sequence[tuple[str, Run]]) -> Iterator[str]:
    """What makes the runs unequal beyond what was meant to be compared."""
    for label, run in good[1:]:
        first = good[0][1].manifest
        if keys := differing(first.fingerprint, run.manifest.fingerprint):
            fields = ", ".join(keys)
            yield f"FORCED: the fingerprints of {good[0][0]} and {label} differ in {fields}; do not relate their times"
        if first.config.get("questions_sha256") != run.manifest.config.get("questions_sha256"):
            yield f"{label} answered other questions than {good[0][0]}"
        if first.git != run.manifest.git:
            yield f"{label} was made by another state of the code than {good[0][0]}"


# The tables


def run_table(comparison: Comparison) -> Columns:
    """One line per run, those left out included."""
    columns = [
        "run",
        "run_id",
        "status",
        "start",
        "model",
        "methods",
        "tasks",
        "temperature",
        "revision",
        "ar_tokens_per_s",
    ]
    speeds = {entry.label: _reference_speed(entry) for entry in comparison.entries}
    everyone = [*((entry.label, entry.run) for entry in comparison.entries), *comparison.left_out]
    return columns, [[label, *_about(run), speeds.get(label)] for label, run in everyone]


def _about(run: Run) -> list[Any]:
    manifest = run.manifest
    names, tasks = " ".join(run.methods), " ".join(run.tasks)
    head = [manifest.run_id, manifest.status, manifest.start, run.model]
    return [*head, names, tasks, run.temperature, commit_of(manifest.git)]


def _reference_speed(entry: Entry) -> float | None:
    cells = entry.summary["cells"].get(entry.run.reference)
    return cells[OVERALL]["end_to_end_tokens_per_s"] if cells else None


def estimator_table(comparison: Comparison) -> Columns:
    """Every estimator with interval and n, per run, method and task; the long form."""
    return _stacked(comparison, estimators)


def ladder_table(comparison: Comparison) -> Columns:
    """The loss ladder per run, method and task."""
    return _stacked(comparison, ladders)


def _stacked(comparison: Comparison, table: Any) -> Columns:
    columns, lines = ["method", "task"], []
    for entry in comparison.entries:
        columns, found = table(entry.summary)
        lines += [[entry.label, *line] for line in found]
    return ["run", *columns], lines


def lossless_table(comparison: Comparison) -> Columns:
    """The worst grade, the turns of each grade and the failed ones, per run and method, over all tasks."""
    columns = ["run", "method", "worst", *GRADES, "num_failed", "length_ratio"]
    lines = []
    for entry, name, cell in _compared(comparison):
        grade = cell["grade"]
        counts = [grade["counts"].get(label, 0) for label in GRADES]
        lines.append([entry.label, name, grade["worst"], *counts, cell["num_failed"], cell["length_ratio"]])
    return columns, lines


def config_table(comparison: Comparison) -> Columns:
    """The configuration keys at which the runs differ, one line each, with every run's value."""
    configs = [entry.run.manifest.config for entry in comparison.entries]
    keys = {key for config in configs[1:] for key in differing(configs[0], config, NOT_COMPARED)}
    lines = [[key, *(value_at(config, key) for config in configs)] for key in sorted(keys)]
    return ["key", *(entry.label for entry in comparison.entries)], lines


def _compared(comparison: Comparison) -> Iterator[tuple[Entry, str, Mapping[str, Any]]]:
    for entry in comparison.entries:
        for name in entry.summary["ladders"]:
            yield entry, name, entry.summary["cells"][name][OVERALL]


def _overview(comparison: Comparison) -> Columns:
    """Methods x estimators over all tasks, with intervals; what the long form says in one look."""
    columns = ["run", "method", "n", *ESTIMATORS, "typical", "disturbed", "emitted/round", "acc. rate"]
    lines = []
    for entry, name, cell in _compared(comparison):
        speedups = cell["speedup"]
        figures = [cell["mean_emitted_per_round"]["rounds"], cell["acceptance_rate"]["rounds"]]
        shown = [interval_text(speedups[label]) for label in ESTIMATORS]
        disturbed = {True: "yes", False: "no"}.get(cell["disturbed"])
        lines.append([entry.label, name, cell["num_questions"], *shown, cell["typical"], disturbed, *figures])
    return columns, lines


def _by_task(comparison: Comparison) -> Columns:
    """The headline per task, with intervals."""
    tasks = list(dict.fromkeys(task for entry in comparison.entries for task in entry.summary["tasks"]))
    lines = []
    for entry, name, _ in _compared(comparison):
        cells = entry.summary["cells"][name]
        shown = [interval_text(cells[task]["speedup"]["paired_total"]) if task in cells else None for task in tasks]
        lines.append([entry.label, name, *shown])
    return ["run", "method", *tasks], lines


# As text


def markdown(comparison: Comparison) -> str:
    """The comparison as one Markdown text; what is unknown or not compared is a dash."""
    ladder_columns, ladder_lines = ladder_table(comparison)
    overall = [line for line in ladder_lines if line[2] == OVERALL]
    parts = [f"# {comparison.title}", *(f"> **{stamp}**" for stamp in comparison.stamps)]
    parts += [f"> {label} ended as {run.manifest.status} and is not compared" for label, run in comparison.left_out]
    for heading, table in (
        ("Runs", run_table(comparison)),
        ("Speed-up by estimator, all tasks [95 % interval over questions]", _overview(comparison)),
        ("Speed-up by task: paired_total", _by_task(comparison)),
        ("Loss ladder, all tasks", (ladder_columns, overall)),
        ("Losslessness, all tasks", lossless_table(comparison)),
        ("What differs in the configuration", config_table(comparison)),
    ):
        parts += [f"## {heading}", _markdown_table(table)]
    notes = [f"- {entry.label}: {note['text']}" for entry in comparison.entries for note in entry.summary["notes"]]
    parts += ["## Notes", "\n".join(notes) or "none"]
    return "\n\n".join(parts) + "\n"


def csv_text(table: Columns) -> str:
    """A table as CSV with full precision; unknown cells are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table[0])
    writer.writerows(table[1])
    return out.getvalue()


def interval_text(interval: Mapping[str, Any] | None) -> str | None:
    """`1.25 [1.10,1.41]`, or the value alone where one question has no spread."""
    if interval is None:
        return None
    limits = "" if interval["low"] is None else f" [{interval['low']:.2f},{interval['high']:.2f}]"
    return f"{interval['value']:.2f}{limits}"


def _markdown_table(table: Columns) -> str:
    columns, lines = table
    if not lines:
        return "none"
    return "\n".join([_line(columns), _line("---" for _ in columns), *(_line(map(_cell, line)) for line in lines)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return "—"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")
