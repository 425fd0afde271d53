"""Which stored run speaks for a cell of a published table, and what it says there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from clasp_core import costs
from clasp_core.metrics import counting, speedups
from clasp_core.report.paper import QUESTIONS
from clasp_core.report.runs import Run
from clasp_core.report.summary import OVERALL

ESTIMATORS = ("paper", "paired_total", "paired_decode", "spec_bench", "geometric", "mean_of_ratios", "paper_overall")
"""`paper` is the paper's way: `spec_bench` in a task, `paper_overall` over the tasks."""

Line: TypeAlias = tuple[float, str, str]
"""Temperature, model, method: one line of Table 1."""

GRAVE = ("mismatch", "nothing_finished", "failed_turns", "missing_turns", "disturbed", "length", "offline_search")
"""Kinds of a summary's notes that a reader of a published number must see."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One method of one run, with the run's summary."""

    run: Run
    summary: Mapping[str, Any]
    method: str

    def n(self, task: str) -> int:
        """Questions in a task's figures, or in all; 0 where nothing was run."""
        return int(self._cell(task).get("num_questions", 0))

    def speedup(self, task: str, estimator: str) -> speedups.Interval | None:
        """The speed-up over the reference by one of `ESTIMATORS`."""
        found = self._cell(task).get("speedup", {}).get(_named(estimator, task))
        return speedups.Interval(**found) if found else None

    def per_round(self, task: str, quantity: str, level: str) -> float | None:
        """`mean_accepted_per_round` (tau) or `mean_emitted_per_round` (MAT) at a level."""
        value: float | None = self._cell(task).get(quantity, {}).get(level)
        return value

    @property
    def notes(self) -> list[str]:
        """What a reader must know of this method's run."""
        found = [note["text"] for note in self.summary["notes"] if note["method"] == self.method]
        kinds = [note["kind"] for note in self.summary["notes"] if note["method"] == self.method]
        return [f"{self.run.manifest.run_id}: {text}" for kind, text in zip(kinds, found, strict=True) if kind in GRAVE]

    def _cell(self, task: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary["cells"][self.method].get(task, {})
        return found


def _named(estimator: str, task: str) -> str:
    """`paper_overall` is a mean over tasks, so that a single task's figure is `spec_bench`."""
    if estimator in ("paper", "paper_overall"):
        return "paper_overall" if task == OVERALL else "spec_bench"
    return estimator


def measured(runs: Sequence[Run]) -> tuple[dict[Line, Measured], list[str]]:
    """The run that speaks for each line, and a note on those that do not.

    A run that did not end well speaks for none. Of several one with a reference wins, then one on the paper's
    questions, then the one with most questions, then the one that compares most methods, then the latest: runs are
    never pooled, since settings differ.
    """
    by_line: dict[Line, list[Run]] = defaultdict(list)
    ended = [run for run in runs if run.manifest.status == "ok"]
    for run in ended:
        for method in run.methods:
            by_line[run.temperature, run.model, method].append(run)
    winners = {line: max(found, key=partial(_weight, line[2])) for line, found in by_line.items()}
    summaries = {run.folder: run.summary() for run in {run.folder: run for run in winners.values()}.values()}
    chosen = {line: Measured(run, summaries[run.folder], line[2]) for line, run in winners.items()}
    not_well = [
        f"{run.manifest.run_id} is in no table: its status is {run.manifest.status}" for run in runs if run not in ended
    ]
    return chosen, [*not_well, *_left_out(by_line, winners)]


def used_runs(found: Iterable[Measured]) -> list[Run]:
    """The runs behind some lines, each once."""
    return list({each.run.folder: each.run for each in found}.values())


def regime_of(run: Run, method: str) -> str:
    """One sentence: what bounds a method's result, and the numbers behind the word."""
    step_s = costs.reference_step_s(run.used(run.reference))
    bandwidth = run.manifest.conditions.get("bandwidth_bytes_per_s")
    widths = costs.verify_by_width(run.used(method), step_s)
    found = costs.regime(widths, step_s, run.token_bytes, bandwidth)
    row = "n/a" if found.extra_row is None else f"{found.extra_row:.3f} reference tokens"
    speed, probe = (f"{each / 1e9:.3g} GB/s" if each else "n/a" for each in (found.bytes_per_s, bandwidth))
    return (
        f"regime of {method} in {run.manifest.run_id}: {found.word} (one more verified row costs {row}; the "
        f"reference's reading of weights: {speed}; the machine's measured bandwidth: {probe})"
    )


def on_the_papers_questions(run: Run) -> bool:
    """Whether a run asked Spec-Bench's questions and no others."""
    return run.question_files == [QUESTIONS]


def _weight(method: str, run: Run) -> tuple[bool, bool, int, int, str]:
    questions = {(row.task, row.question_id) for row in counting.finished(run.of(method))}
    size = (len(questions), len(run.methods))
    return (run.reference is not None, on_the_papers_questions(run), *size, run.manifest.start)


def _left_out(by_line: Mapping[Line, Sequence[Run]], winners: Mapping[Line, Run]) -> list[str]:
    notes = []
    for (temperature, model, method), found in by_line.items():
        others = [run.manifest.run_id for run in found if run is not winners[temperature, model, method]]
        if others:
            notes.append(
                f"{method} on {model} at T={temperature:g} is shown from "
                f"{winners[temperature, model, method].manifest.run_id}, and not from {', '.join(others)}"
            )
    return notes
