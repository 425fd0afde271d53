"""The summary of a run as it is printed: tables, what their columns mean, notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clasp_core.report.summary import OVERALL, Cell

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
