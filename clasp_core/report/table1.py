"""`table1`: the paper's Table 1 with our numbers beside it, greedy and sampled apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pandas as pd

from clasp_core.metrics.speedups import Interval
from clasp_core.report import paper
from clasp_core.report.cells import ESTIMATORS, Line, Measured, measured, on_the_papers_questions, regime_of, used_runs
from clasp_core.report.runs import Run, add_paths, chosen
from clasp_core.report.summary import OVERALL
from clasp_core.report.tabulate import Published, add_output, number, provenance, publish, span

PER_ROUND: Mapping[str, str] = MappingProxyType({"tau": "mean_accepted_per_round", "mat": "mean_emitted_per_round"})

_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "tau": "tau: mean accepted draft tokens per round, the target's own token not counted. The paper prints values "
        "below 1, which a count with that token cannot give; so this is most likely its tau",
        "mat": "mat: mean emitted tokens per round (MAT), the target's own token counted; the paper's tau beside it "
        "most likely leaves that token out",
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """How our cells are computed: the estimator of speed-ups, the per-round figure and its level."""

    estimator: str = "paper"
    per_round: str = "tau"
    level: str = "rounds"


def add_to(commands: Any) -> None:
    """The command `table1`."""
    command: argparse.ArgumentParser = commands.add_parser("table1", help="the paper's Table 1 beside our numbers")
    add_paths(command)
    command.add_argument("--estimator", choices=ESTIMATORS, default="paper", help="of our speed-ups (%(default)s)")
    command.add_argument("--per-round", choices=tuple(PER_ROUND), default="tau", help="beside them (%(default)s)")
    command.add_argument("--level", choices=("rounds", "questions", "tasks"), default="rounds", help="of that mean")
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write the tables."""
    choice = Choice(arguments.estimator, arguments.per_round, arguments.level)
    publish(tables(chosen(arguments, at_least=0), choice), arguments)


def tables(runs: Sequence[Run], choice: Choice) -> list[Published]:
    """One table per temperature: the paper's two, and any other that a run of ours has."""
    published, (ours, left_out) = paper.table1(), measured(runs)
    temperatures = sorted({*paper.TEMPERATURES, *(line[0] for line in ours)})
    return [_table(each, published, ours, left_out, choice) for each in temperatures]


def lines(temperature: float, published: Iterable[paper.Key], ours: Iterable[Line]) -> list[Line]:
    """Model and method of every line at a temperature: the paper's, each model followed by our further methods."""
    found = list(dict.fromkeys(key[:3] for key in published if key[0] == temperature))
    found += [line for line in ours if line[0] == temperature and line not in found]
    models = list(dict.fromkeys((*paper.MODELS, *(line[1] for line in found))))
    methods = [*paper.METHODS, *(line[2] for line in found)]
    return sorted(found, key=lambda line: (models.index(line[1]), methods.index(line[2])))


def _table(
    temperature: float,
    published: Mapping[paper.Key, paper.Cell],
    ours: Mapping[Line, Measured],
    left_out: Sequence[str],
    choice: Choice,
) -> Published:
    shown = lines(temperature, published, ours)
    here = {line: ours[line] for line in shown if line in ours}
    cells = [text for line in shown for text in _texts(line, published, here.get(line), choice)]
    data = [_datum(line, task, published, here.get(line), choice) for line in shown for task in _scopes()]
    names = [name for task in paper.TASKS.values() for name in (task, choice.per_round)]
    return Published(
        title=f"Table 1, {'greedy' if temperature == 0 else 'sampling'} (T={temperature:g})",
        caption=_caption(here, choice),
        cells=pd.DataFrame(cells, columns=["model", "method", "source", *names, OVERALL, "pooled"]),
        data=pd.DataFrame(data),
        num_labels=3,
        notes=_notes(here, left_out, choice),
    )


# One line of the paper is up to four lines here: the paper's, ours, our interval, and n


def _texts(
    line: Line, published: Mapping[paper.Key, paper.Cell], ours: Measured | None, choice: Choice
) -> list[list[str]]:
    model, method = paper.MODELS.get(line[1], line[1]), paper.METHODS.get(line[2], line[2])
    theirs = [_theirs(published.get((*line, task))) for task in _scopes()]
    head = [model, method, "paper", *[text for pair in theirs for text in pair][:-1]]
    if ours is None:
        return [[*head, ""], ["", "", "ours", *(["not run", ""] * len(paper.TASKS)), "not run", ""]]
    values = [_ours(ours, task, choice) for task in _scopes()]
    found = [ours.speedup(task, choice.estimator) for task in _scopes()]
    pooled = ours.speedup(OVERALL, "spec_bench")
    spans = [span(each.low, each.high) if each else "" for each in (*found, pooled)]
    counts = [str(ours.n(task)) for task in _scopes()]
    return [
        [*head, ""],
        ["", "", "ours", *[text for pair in values for text in pair][:-1], _value(pooled)],
        ["", "", "95 %", *(text for each in spans[:-2] for text in (each, "")), *spans[-2:]],
        ["", "", "n", *(text for each in counts[:-1] for text in (each, "")), counts[-1], counts[-1]],
    ]


def _theirs(cell: paper.Cell | None) -> tuple[str, str]:
    return ("-", "-") if cell is None else (number(cell.speedup), "-" if cell.tau is None else number(cell.tau))


def _ours(ours: Measured, task: str, choice: Choice) -> tuple[str, str]:
    if not ours.n(task):
        return ("not run", "")
    found = ours.speedup(task, choice.estimator)
    return (_value(found), number(ours.per_round(task, PER_ROUND[choice.per_round], choice.level)))


def _value(found: Interval | None) -> str:
    return number(found.value if found else None)


def _datum(
    line: Line, task: str, published: Mapping[paper.Key, paper.Cell], ours: Measured | None, choice: Choice
) -> dict[str, Any]:
    """One observation: a cell of the paper with ours beside it, numbers only."""
    theirs = published.get((*line, task))
    run = ours.run if ours is not None and ours.n(task) else None
    found = ours.speedup(task, choice.estimator) if ours is not None else None
    mean = ours.per_round(task, PER_ROUND[choice.per_round], choice.level) if ours is not None else None
    return {
        "temperature": line[0],
        "model": line[1],
        "method": line[2],
        "task": task,
        "status": "measured" if run else "not run",
        "paper_speedup": theirs and theirs.speedup,
        "paper_tau": theirs and theirs.tau,
        "speedup": found and found.value,
        "low": found and found.low,
        "high": found and found.high,
        "n_questions": ours.n(task) if ours is not None else 0,
        "estimator": choice.estimator,
        choice.per_round: mean,
        "level": choice.level,
        "questions": "+".join(run.question_files) if run else None,
        "run_id": run and run.manifest.run_id,
        "machine": run and run.machine,
    }


def _scopes() -> tuple[str, ...]:
    return (*paper.TASKS, OVERALL)


# Caption and notes


def _caption(here: Mapping[Line, Measured], choice: Choice) -> str:
    way = {"paper": "spec_bench in a task and paper_overall (their unweighted mean) over the tasks"}
    return (
        "Speed-up over this engine's own autoregressive decoding (a ratio), under the data set's name, and beside it "
        f"{choice.per_round} (tokens per round, mean over {choice.level}). Ours by "
        f"{way.get(choice.estimator, choice.estimator)}; pooled: spec_bench over all questions; 95 %: paired bootstrap "
        f"interval over questions; n: questions. Paper: arXiv 2505.24196, A800. {provenance(used_runs(here.values()))}"
    )


def _notes(here: Mapping[Line, Measured], left_out: Sequence[str], choice: Choice) -> tuple[str, ...]:
    columns = ", ".join(f"{name} = {task}" for task, name in paper.TASKS.items())
    notes = [
        f"Columns: {columns}",
        _MEANINGS[choice.per_round],
        "A dash: not in the paper; n/a: no pair of turns that qualifies",
    ]
    for run in used_runs(here.values()):
        if not on_the_papers_questions(run):
            asked = "+".join(run.question_files)
            notes.append(f"{run.manifest.run_id} asked the questions of {asked}, not Spec-Bench's: no reproduction")
        if run.tasks and (absent := [task for task in paper.TASKS if task not in run.tasks]):
            notes.append(f"{run.manifest.run_id} lacks {', '.join(absent)}: its overall is over the others")
        strange = [task for task in run.tasks if task not in paper.TASKS]
        if strange:
            notes.append(f"{run.manifest.run_id} has tasks outside the table, in overall only: {', '.join(strange)}")
    regimes = [regime_of(each.run, each.method) for each in here.values()]
    return (*notes, *regimes, *(text for each in here.values() for text in each.notes), *left_out)
