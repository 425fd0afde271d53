"""Which runs a figure takes where several would do, and the pairs in them."""

from __future__ import annotations

from collections.abc import Sequence

from clasp_core.metrics import pairing
from clasp_core.metrics.pairing import Pair
from clasp_core.report.runs import Run
from clasp_core.store import read_analysis


def experiment(run: Run) -> str | None:
    """The experiment that a run belongs to, if any."""
    name = run.manifest.config.get("experiment")
    return None if name is None else str(name)


def main_run(runs: Sequence[Run]) -> Run | None:
    """The run that compares most: of Table 1 if there is one, else one that is no part of a sweep.

    Of those the one with the most methods, and the latest of equal ones.
    """
    found = [run for run in runs if run.rows and run.methods]
    for kinds in (("table1",), (None, "fig3c"), tuple(experiment(run) for run in found)):
        if some := [run for run in found if experiment(run) in kinds]:
            return max(some, key=lambda run: (len(run.methods), run.manifest.start))
    return None


def pairs(run: Run, method: str, task: str | None = None) -> list[Pair]:
    """A method's pairs with the reference on the turns that every method finished, of one task or all."""
    return list(pairing.pairs(run.used(run.reference, task), run.used(method, task)).pairs)


def analysis_rows(runs: Sequence[Run], kind: str) -> tuple[list[Run], list[dict[str, object]]]:
    """The rows of one kind of the latest run of each model that has some, with their runs; `model` is added."""
    latest: dict[str, tuple[Run, list[dict[str, object]]]] = {}
    for run in sorted(runs, key=lambda run: run.manifest.start):
        rows: list[dict[str, object]] = [row for row in read_analysis(run.folder) if row["kind"] == kind]
        if rows:
            latest[run.model] = run, [{**row, "model": run.model} for row in rows]
    return [run for run, _ in latest.values()], [row for _, rows in latest.values() for row in rows]
