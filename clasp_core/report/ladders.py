"""`ladder`: where each method's speed-up went, and what its rounds say of the machine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pandas as pd

from clasp_core import costs
from clasp_core.positions import acceptance_by_position
from clasp_core.report.cells import regime_of
from clasp_core.report.runs import Run, add_paths, chosen
from clasp_core.report.summary import OVERALL
from clasp_core.report.tabulate import Published, add_output, number, percent, provenance, publish

Datum: TypeAlias = dict[str, Any]

LEVELS = ("ceiling", "oracle", "draft", "verify", "search", "measured")
GOAL = 0.05
"""Predicted and measured agree within this share on a quiet machine (MEASUREMENT 4)."""


def add_to(commands: Any) -> None:
    """The command `ladder`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "ladder", help="where the speed-up went, and what rounds cost"
    )
    add_paths(command)
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write the tables."""
    publish(tables([run for run in chosen(arguments) if run.rows]), arguments)


def tables(runs: Sequence[Run]) -> list[Published]:
    """The ladder, its costs, the counts at each level, verification by width and acceptance by position."""
    summaries = [(run, run.summary()) for run in runs]
    origin = provenance(runs)
    return [*_ladders(summaries, origin), _counts(summaries, origin), _widths(runs, origin), _positions(runs, origin)]


# The ladder


def _ladders(summaries: Sequence[tuple[Run, Mapping[str, Any]]], origin: str) -> list[Published]:
    data = [
        _rung(run, name, scope, found, summary["cells"][name][scope])
        for run, summary in summaries
        for name, by_scope in summary["ladders"].items()
        for scope, found in by_scope.items()
    ]
    regimes = tuple(regime_of(run, name) for run, summary in summaries for name in summary["ladders"])
    ladder = Published(
        title="Loss ladder: the decode speed-up that is left after each loss",
        caption=(
            "Ratios to autoregressive decoding. ceiling 1 / c_bytes; oracle T / (R + A c); draft T / (R + D c); verify "
            "T / (R v + D c); search T / (R v + D c + P p), the predicted speed-up; measured: paired_decode over pairs "
            "with equal ids; eff.: measured / oracle. pred/meas: the relative difference, within "
            f"{GOAL:.0%} on a quiet machine; host: its share of decode time, which explains it. {origin}"
        ),
        cells=_frame(data, _LADDER),
        data=_numbers(data, _COST_KEYS),
        num_labels=4,
        notes=(
            "product: ceiling (or oracle) times every step down from it, over measured; 1.000 or the sums are wrong",
        ),
    )
    costs_of = Published(
        title="Costs behind the ladder",
        caption=(
            "In reference tokens. c: one draft step by the clock; c_bytes: by the bytes of weights that it reads; "
            "c/c_bytes: their ratio, above 1 is the engine's own loss on the draft path; v: one verification pass, as "
            f"wide as it ran; p: one search for a skip set. {origin}"
        ),
        cells=_frame(data, _COSTS),
        data=_numbers([{key: datum[key] for key in (*_DATUM_NAMES, *_COST_KEYS)} for datum in data]),
        num_labels=4,
        notes=regimes,
    )
    return [ladder, costs_of]


def _rung(run: Run, name: str, scope: str, found: Mapping[str, Any] | None, cell: Mapping[str, Any]) -> Datum:
    """One method and task: the levels, the product of the steps, and prediction against measurement."""
    known = found or {}
    levels = {level: known.get(level) for level in LEVELS}
    c, c_bytes = known.get("c"), known.get("c_bytes")
    return {
        **run.named(name),
        "task": scope,
        "n_questions": cell["num_questions"],
        **levels,
        "product_over_measured": _product(known) / known["measured"] if known else None,
        "predicted_over_measured": known["predicted"] / known["measured"] - 1 if known else None,
        "host_share": cell["shares"]["host"],
        "efficiency": known.get("efficiency"),
        "c": c,
        "c_bytes": c_bytes,
        "c_over_c_bytes": c / c_bytes if c and c_bytes else None,
        "v": known.get("v"),
        "p": known.get("p"),
    }


def _product(found: Mapping[str, Any]) -> float:
    """The top of the ladder times every step below it."""
    steps = [step for step in found["steps"].values() if step is not None]
    return float((found["ceiling"] or found["oracle"]) * math.prod(steps))


# Counts at each level


def _counts(summaries: Sequence[tuple[Run, Mapping[str, Any]]], origin: str) -> Published:
    data = [
        _count(run, name, scope, cell)
        for run, summary in summaries
        for name, cells in summary["cells"].items()
        for scope, cell in cells.items()
        if scope == OVERALL
    ]
    return Published(
        title="Tokens per round, memory and energy, over all tasks",
        caption=(
            "MAT: mean emitted tokens per round, the target's own token counted; tau: accepted draft tokens per round, "
            "not counted; rate: accepted over drafted. Means over all rounds, over questions and over tasks. memory: "
            "the sum of the GPUs' highest peaks in GB (10^9 bytes); energy: joules of the model's GPUs per emitted "
            f"token; both n/a on a CPU. {origin}"
        ),
        cells=_frame(data, _COUNTS),
        data=_numbers(data),
        num_labels=3,
    )


def _count(run: Run, name: str, scope: str, cell: Mapping[str, Any]) -> Datum:
    quantities = ("mean_emitted_per_round", "mean_accepted_per_round", "acceptance_rate")
    means = {f"{quantity}_{level}": value for quantity in quantities for level, value in cell[quantity].items()}
    peaks = cell["peak_memory_bytes"] or {}
    return {
        **run.named(name),
        "task": scope,
        "n_questions": cell["num_questions"],
        "n_rounds": cell["num_rounds"],
        **means,
        "peak_memory_bytes": sum(peaks.values()) if peaks else None,
        **{f"peak_memory_bytes_{device}": peak for device, peak in peaks.items()},
        "energy_per_token_j": cell["energy_per_token_j"],
    }


# Verification by width, acceptance by position


def _widths(runs: Sequence[Run], origin: str) -> Published:
    data = [
        {
            **run.named(name),
            "width": cost.width,
            "n_rounds": cost.num_rounds,
            "verify_s": cost.verify_s,
            "v": cost.v,
        }
        for run in runs
        for step_s in (costs.reference_step_s(run.used(run.reference)),)
        for name in run.methods
        for cost in costs.verify_by_width(run.used(name), step_s)
    ]
    return Published(
        title="Verification by width",
        caption=(
            "width: rows of a pass, the drafted tokens and the one before them; median: of the passes of that width, "
            f"in ms; v: the same over the reference's median step (a ratio); n: rounds. {origin}"
        ),
        cells=_frame(data, _WIDTHS),
        data=_numbers(data),
        num_labels=3,
    )


def _positions(runs: Sequence[Run], origin: str) -> Published:
    found = [(run, name, acceptance_by_position(run.used(name))) for run in runs for name in run.methods]
    data = [
        {
            **run.named(name),
            "position": each.position + 1,
            "n_drafted": each.num_drafted,
            "n_reached": each.num_reached,
            "n_accepted": each.num_accepted,
            "rate": each.rate,
            "conditional_rate": each.conditional_rate,
        }
        for run, name, positions in found
        for each in positions or ()
    ]
    return Published(
        title="Acceptance by position in the draft",
        caption=(
            "Shares of rounds; position 1 is the first drafted token. kept: accepted over drafted there; kept if "
            f"reached: accepted over the rounds that kept every token before it. {origin}"
        ),
        cells=_frame(data, _POSITIONS),
        data=_numbers(data),
        num_labels=3,
        notes=tuple(
            f"{name}: no positions, since its drafts are trees or its rounds have no trace"
            for _, name, each in found
            if each is None
        ),
    )


# Columns: heading, key of a datum, and how it is written

Column: TypeAlias = tuple[str, str, Callable[[Any], str]]


def _three(value: float | None) -> str:
    return number(value, 3)


def _signed(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:+.1f} %"


_NAMES: tuple[Column, ...] = (("run", "run", str), ("model", "model", str), ("method", "method", str))
_PLACE: tuple[Column, ...] = (*_NAMES, ("task", "task", str), ("n", "n_questions", str))
_LADDER: tuple[Column, ...] = (
    *_PLACE,
    *((level, level, number) for level in LEVELS),
    ("pred/meas", "predicted_over_measured", _signed),
    ("host", "host_share", percent),
    ("product", "product_over_measured", _three),
    ("eff.", "efficiency", number),
)
_COSTS: tuple[Column, ...] = (
    *_PLACE,
    ("c", "c", _three),
    ("c_bytes", "c_bytes", _three),
    ("c/c_bytes", "c_over_c_bytes", number),
    ("v", "v", number),
    ("p", "p", number),
)
_DATUM_NAMES = ("run_id", "model", "method", "task", "n_questions")
_COST_KEYS = ("c", "c_bytes", "c_over_c_bytes", "v", "p")
_COUNTS: tuple[Column, ...] = (
    *_NAMES,
    ("n", "n_questions", str),
    ("rounds", "n_rounds", lambda n: "n/a" if n is None else str(n)),
    *(
        (f"{short} {level}", f"{quantity}_{level}", number)
        for short, quantity in (
            ("MAT", "mean_emitted_per_round"),
            ("tau", "mean_accepted_per_round"),
            ("rate", "acceptance_rate"),
        )
        for level in ("rounds", "questions", "tasks")
    ),
    ("memory", "peak_memory_bytes", lambda peak: "n/a" if peak is None else f"{peak / 1e9:.2f}"),
    ("energy", "energy_per_token_j", number),
)
_WIDTHS: tuple[Column, ...] = (
    *_NAMES,
    ("width", "width", str),
    ("n", "n_rounds", str),
    ("median", "verify_s", lambda seconds: number(1000 * seconds)),
    ("v", "v", number),
)
_POSITIONS: tuple[Column, ...] = (
    *_NAMES,
    ("position", "position", str),
    ("drafted", "n_drafted", str),
    ("reached", "n_reached", str),
    ("accepted", "n_accepted", str),
    ("kept", "rate", percent),
    ("kept if reached", "conditional_rate", percent),
)


def _frame(data: Sequence[Datum], columns: Sequence[Column]) -> pd.DataFrame:
    lines = [[write(datum[key]) for _, key, write in columns] for datum in data]
    return pd.DataFrame(lines, columns=[heading for heading, _, _ in columns])


def _numbers(data: Sequence[Datum], without: Sequence[str] = ()) -> pd.DataFrame:
    """The data as a frame, by `run_id` alone: its short form may read as a number, such as 271e4007."""
    return pd.DataFrame(data).drop(columns=["run", *without], errors="ignore")
