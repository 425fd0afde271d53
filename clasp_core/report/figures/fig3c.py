"""Figure 3c: where the time of an answer goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from clasp_core.metrics import counting
from clasp_core.records import TurnRecord
from clasp_core.report.figures._canvas import BLUE, GREEN, GREY, ORANGE, VERMILLION, Plot, legend_below, origin, page
from clasp_core.report.figures._choice import main_run
from clasp_core.report.figures._paper import points
from clasp_core.report.runs import Run

NEEDS = "a run with rounds, such as one of experiment=table1 or method=clasp"
PARTS = (
    ("select", ORANGE, "//"), ("draft", BLUE, ""), ("verify", GREEN, "\\\\"), ("host", GREY, ".."),
    ("prefill", VERMILLION, "xx"),
)  # fmt: skip


def draw(runs: Sequence[Run]) -> Plot | None:
    """Left by method over all tasks, right by task for CLaSp (or the run's first method)."""
    run = main_run([run for run in runs if any(row.rounds for row in run.rows)])
    if run is None:
        return None
    by_method = [line for name in run.methods if (line := shares_of(run.used(name), method=name, task="all"))]
    name = "clasp" if "clasp" in run.methods else run.methods[0]
    by_task = [line for task in run.tasks if (line := shares_of(run.used(name, task), method=name, task=task))]
    if not by_method:
        return None
    stated = points("3c")[0]
    marked = [index for index, line in enumerate(by_task) if name == "clasp" and line["task"] == stated["task"]]
    mark = (
        f"Mark: {100 * float(stated['value']):.1f} % for choosing layers, which the paper states for {stated['model']} "
        "on MT-bench (two A800). "
    )
    caption = (
        "Shares of the time of the turns that every method finished, prefill inside. select: choosing layers; draft, "
        "verify: passes of the drafter and of the target; host: the rest of decoding. "
        f"n = {by_method[0]['num_turns']} turns a method. {mark if marked else ''}{origin([run])}"
    )
    tall = 1.3 + 0.24 * max(len(by_method), len(by_task))
    figure, ((left, right),) = page("Figure 3c: where the time goes", caption, tall, 1, 2, legend=True)
    _bars(left, by_method, "method", "by method")
    _bars(right, by_task, "task", f"{name} by task")
    for index in marked:
        ends = [index - 0.45, index + 0.45]
        right.plot([float(stated["value"])] * 2, ends, color="black", marker="", linestyle="-")
    for axes in (left, right):
        axes.set_ylim(max(len(by_method), len(by_task)) - 0.4, -0.6)
    legend_below(figure, *left.get_legend_handles_labels())
    return Plot(figure, by_method + by_task)


def shares_of(rows: Sequence[TurnRecord], **where: str) -> dict[str, Any] | None:
    """Shares of the whole time, which sum to 1; none where a part is unknown."""
    done = [row for row in counting.finished(rows) if row.rounds is not None and row.total_s]
    found = counting.shares(done)
    if found.prefill is None or found.draft is None:
        return None
    decode = {part: (getattr(found, part) or 0.0) * (1 - found.prefill) for part, *_ in PARTS if part != "prefill"}
    return {**where, **decode, "prefill": found.prefill, "num_turns": len(done)}


def _bars(axes: Axes, lines: Sequence[dict[str, Any]], key: str, title: str) -> None:
    left = [0.0] * len(lines)
    for part, color, hatch in PARTS:
        widths = [line[part] for line in lines]
        axes.barh(range(len(lines)), widths, left=left, color=color, hatch=hatch, label=part, edgecolor="white", lw=0.4)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(lines)), [line[key] for line in lines])
    axes.grid(visible=False, axis="y")
    axes.set(title=title, xlabel="share of time", xlim=(0, 1))
