"""`check`: how far our runs reproduce the paper's Table 1, cell by cell and in the order of the methods."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import pandas as pd

from clasp_core.metrics import pairing, speedups
from clasp_core.metrics.speedups import Interval
from clasp_core.report import paper
from clasp_core.report.cells import Line, Measured, measured, on_the_papers_questions, used_runs
from clasp_core.report.runs import Run, add_paths, chosen
from clasp_core.report.summary import OVERALL
from clasp_core.report.tabulate import Published, add_output, provenance, publish

Datum: TypeAlias = dict[str, Any]

SCOPES = (*paper.TASKS, OVERALL)
PRINTED = 0.005
"""Half of the paper's last digit, by which a printed value may be off."""


def add_to(commands: Any) -> None:
    """The command `check`."""
    command: argparse.ArgumentParser = commands.add_parser("check", help="does our measurement agree with the paper's")
    add_paths(command)
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write both tables; what is not run is no failure."""
    publish(tables(chosen(arguments, at_least=0)), arguments)


def tables(runs: Sequence[Run]) -> list[Published]:
    """Agreement of the speed-ups, then of the methods' order."""
    published, (ours, left_out) = paper.table1(), measured(runs)
    origin = provenance(used_runs(each for line, each in ours.items() if _is_papers(line, published)))
    cells = [_cell(key, theirs, ours.get(key[:3])) for key, theirs in published.items()]
    orders = [order for key in _pairs_of_methods(published) for order in _orders(*key, published, ours)]
    return [_agreement(cells, origin, left_out), _ordering(orders, origin)]


def _is_papers(line: Line, published: Mapping[paper.Key, paper.Cell]) -> bool:
    return (*line, OVERALL) in published


# Cells


def _cell(key: paper.Key, theirs: paper.Cell, ours: Measured | None) -> Datum:
    """One cell of the paper: our value by the paper's way, its interval, and the verdict."""
    task = key[3]
    found = ours.speedup(task, "paper") if ours is not None else None
    difference = found.value - theirs.speedup if found else None
    return {
        **dict(zip(("temperature", "model", "method", "task"), key, strict=True)),
        "status": _status(theirs, found, ours, task),
        "paper_speedup": theirs.speedup,
        "speedup": found and found.value,
        "low": found and found.low,
        "high": found and found.high,
        "difference": difference,
        "n_questions": ours.n(task) if ours is not None else 0,
        "paper_tau": theirs.tau,
        "tau": ours.per_round(task, "mean_accepted_per_round", "rounds") if ours is not None else None,
        "run_id": ours.run.manifest.run_id if ours is not None else None,
    }


def _status(theirs: paper.Cell, found: Interval | None, ours: Measured | None, task: str) -> str:
    if ours is None or found is None:
        return "not run"
    if not on_the_papers_questions(ours.run):
        return "other questions"
    if task == OVERALL and not all(ours.n(each) for each in paper.TASKS):
        return "not all tasks"
    if found.low is None or found.high is None:
        return "no interval"
    return "agrees" if found.low - PRINTED <= theirs.speedup <= found.high + PRINTED else "differs"


def _agreement(cells: Sequence[Datum], origin: str, left_out: Sequence[str]) -> Published:
    return Published(
        title="Agreement with the paper's Table 1",
        caption=(
            f"{len(cells)} speed-ups (ratios): {_tally(cells)}. agrees: the paper's value lies in our 95 % interval "
            "over questions; a signed number: ours minus the paper's, outside it. tau stands in the CSV beside the "
            f"paper's and is not judged, since what the paper counts is not certain. {origin}"
        ),
        cells=_grid(cells, ("temperature", "model", "method"), _said),
        data=pd.DataFrame(cells),
        num_labels=3,
        notes=tuple(left_out),
    )


def _said(cell: Datum) -> str:
    return f"{cell['difference']:+.2f}" if cell["status"] == "differs" else str(cell["status"])


# The order of the methods


def _pairs_of_methods(published: Mapping[paper.Key, paper.Cell]) -> list[tuple[float, str, str, str]]:
    """Temperature, model and two methods, the later one of the paper's lines first."""
    settings = dict.fromkeys((temperature, model) for temperature, model, _, _ in published)
    duels = [(first, second) for second, first in combinations(paper.METHODS, 2)]
    return [(temperature, model, *duel) for temperature, model in settings for duel in duels]


def _orders(
    temperature: float,
    model: str,
    first: str,
    second: str,
    published: Mapping[paper.Key, paper.Cell],
    ours: Mapping[Line, Measured],
) -> list[Datum]:
    """For each task and overall: the paper's ratio of the first method to the second, ours, and the verdict."""
    pair = ours.get((temperature, model, first)), ours.get((temperature, model, second))
    orders = []
    for task in SCOPES:
        theirs = [published[temperature, model, method, task].speedup for method in (first, second)]
        found = _ratio(*pair, task)
        orders.append(
            {
                "temperature": temperature,
                "model": model,
                "methods": f"{paper.METHODS[first]} / {paper.METHODS[second]}",
                "task": task,
                "status": _verdict(theirs[0] / theirs[1], found, pair),
                "paper_ratio": theirs[0] / theirs[1],
                "ratio": found and found.value,
                "low": found and found.low,
                "high": found and found.high,
                "n_questions": found.n if found else 0,
            }
        )
    return orders


def _ratio(first: Measured | None, second: Measured | None, task: str) -> Interval | None:
    """The first method's speed-up over the second, paired by turns; none unless one run holds both."""
    if first is None or second is None or first.run.folder != second.run.folder:
        return None
    rows = [row for row in first.run.rows if task in (OVERALL, row.task)]
    sides = [[row for row in rows if row.method == each.method] for each in (second, first)]
    pairs = pairing.pairs(*sides).pairs
    return speedups.paper_overall(pairs) if task == OVERALL else speedups.spec_bench(pairs)


def _verdict(theirs: float, found: Interval | None, pair: tuple[Measured | None, Measured | None]) -> str:
    if None in pair:
        return "not run"
    if pair[0] and pair[1] and pair[0].run.folder != pair[1].run.folder:
        return "other runs"
    if not all(each and on_the_papers_questions(each.run) for each in pair):
        return "other questions"
    if theirs == 1:
        return "a tie there"
    if found is None or found.low is None or found.high is None or found.low <= 1 <= found.high:
        return "undecided"
    return "holds" if (found.low > 1) == (theirs > 1) else "reversed"


def _ordering(orders: Sequence[Datum], origin: str) -> Published:
    return Published(
        title="Order of the methods",
        caption=(
            f"{len(orders)} comparisons: {_tally(orders)}. In brackets the paper's ratio of the two speed-ups. holds: "
            "ours is on the same side of 1, its whole 95 % interval (paired over questions of one run) too; reversed: "
            f"on the other; undecided: the interval holds 1 or is unknown. {origin}"
        ),
        cells=_grid(orders, ("temperature", "model", "methods"), lambda o: f"{o['status']} ({o['paper_ratio']:.2f})"),
        data=pd.DataFrame(orders),
        num_labels=3,
    )


def _tally(data: Sequence[Datum]) -> str:
    """How often each status occurs, the most frequent first."""
    counts = Counter(each["status"] for each in data)
    return ", ".join(f"{number} {status}" for status, number in counts.most_common())


def _grid(data: Sequence[Datum], labels: Sequence[str], text: Callable[[Datum], str]) -> pd.DataFrame:
    """One line per combination of labels, one column per task, each cell as `text` says it."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for each in data:
        names = (f"{each['temperature']:g}", *(_theirs(str(each[label])) for label in labels[1:]))
        lines.setdefault(names, {})[each["task"]] = text(each)
    rows = [[*names, *(cells[task] for task in SCOPES)] for names, cells in lines.items()]
    return pd.DataFrame(rows, columns=["T", *labels[1:], *paper.TASKS.values(), OVERALL])


def _theirs(name: str) -> str:
    return paper.MODELS.get(name, paper.METHODS.get(name, name))
