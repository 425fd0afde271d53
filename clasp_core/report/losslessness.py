"""`losslessness`: which answers are the reference's, to the id, and what explains those that are not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias, get_args

import pandas as pd

from clasp_core.errors import UserError
from clasp_core.metrics import grading
from clasp_core.records import TurnRecord
from clasp_core.report.runs import Run, add_paths, chosen
from clasp_core.report.tabulate import Published, add_output, provenance, publish

Datum: TypeAlias = dict[str, Any]

GRADES: tuple[grading.Grade, ...] = get_args(grading.Grade)


def add_to(commands: Any) -> None:
    """The command `losslessness`."""
    command: argparse.ArgumentParser = commands.add_parser("losslessness", help="grades of every method's answers")
    add_paths(command)
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write both tables."""
    publish(tables(chosen(arguments)), arguments)


def tables(runs: Sequence[Run]) -> list[Published]:
    """Counts per grade, then every turn that is not exact; UserError where no run has a reference."""
    graded = [run for run in runs if run.reference is not None]
    if not graded:
        raise UserError("no run here has a reference to be graded against; run one without reference=none")
    skipped = tuple(f"{r.manifest.run_id} has no reference and is left out" for r in runs if r.reference is None)
    origin = provenance(graded)
    return [_counts(graded, origin, skipped), _turns(graded, origin)]


# Counts


def _counts(runs: Sequence[Run], origin: str, skipped: tuple[str, ...]) -> Published:
    data = [_count(run, method) for run in runs for method in run.methods]
    columns = ["run", "model", "method", "dtype", "T", "worst", *GRADES, "turns"]
    return Published(
        title="Losslessness: turns by grade",
        caption=(
            "Numbers of turns. exact: the reference's ids; tie: other ids, where the target's own logits leave the two "
            "tokens within the rounding of its dtype; mismatch: other ids and no such explanation, a bug; missing: one "
            f"side has no answer, never counted as equal; sampled: T > 0, where ids differ by design. {origin}"
        ),
        cells=pd.DataFrame([[_text(datum[column]) for column in columns] for datum in data], columns=columns),
        data=pd.DataFrame(data).drop(columns="run", errors="ignore"),
        num_labels=6,
        notes=skipped,
    )


def _count(run: Run, method: str) -> Datum:
    found = grading.grades(run.of(run.reference), run.of(method), run.greedy)
    return {
        **run.named(method),
        "dtype": run.manifest.model.get("dtype", "unknown"),
        "T": run.temperature,
        "worst": found.worst,
        **{str(grade): n for grade, n in found.counts.items()},
        "turns": sum(found.counts.values()),
    }


# Turns


def _turns(runs: Sequence[Run], origin: str) -> Published:
    data = [datum for run in runs for method in run.methods for datum in _not_exact(run, method)]
    keys = ("run", "model", "method", "task", "question", "turn", "repeat", "grade", "index", "gap", "bound", "reason")
    return Published(
        title="Turns that are not exact",
        caption=(
            f"{len(data)} turns. index: of the first differing id; gap: by how much the worse of the two tokens' "
            "logits falls short of the best there, recomputed by the target; bound: the largest gap that is a tie "
            f"(both in logits); n/a: not known, which is no excuse. {origin}"
        ),
        cells=pd.DataFrame([[_text(datum[key]) for key in keys] for datum in data], columns=list(keys)),
        data=pd.DataFrame(data, columns=["run_id", *keys[1:]]),
        num_labels=4,
    )


def _not_exact(run: Run, method: str) -> list[Datum]:
    """Ties, mismatches and missing turns, in the order of the rows."""
    sides = run.of(run.reference), run.of(method)
    reference, mine = ({row.pair: row for row in rows} for rows in sides)
    found = []
    for turn in dict.fromkeys((*reference, *mine)):
        pair = reference.get(turn), mine.get(turn)
        grade = grading.grade_turn(*pair, run.greedy)
        if grade not in ("exact", "sampled"):
            found.append({**run.named(method), **_turn(*pair, grade)})
    return found


def _turn(reference: TurnRecord | None, mine: TurnRecord | None, grade: grading.Grade) -> Datum:
    known = mine or reference
    assert known is not None
    return {
        "task": known.task,
        "question": known.question_id,
        "turn": known.turn,
        "repeat": known.repeat,
        "grade": grade,
        "index": mine and mine.first_divergence,
        "gap": mine and mine.divergence_gap,
        "bound": mine and mine.divergence_bound,
        "reason": _reason(reference, mine) if grade == "missing" else None,
    }


def _reason(reference: TurnRecord | None, mine: TurnRecord | None) -> str:
    for name, row in (("reference", reference), ("method", mine)):
        if row is None:
            return f"no row of the {name}"
        if row.error is not None:
            return f"the {name} failed: {row.error}"
    return "an empty answer"


def _text(value: object) -> str:
    if value is None:
        return "n/a"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
