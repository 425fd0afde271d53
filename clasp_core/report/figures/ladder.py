"""The loss ladder as a waterfall: what each cause takes from the speed-up that the draft's bytes allow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from matplotlib.axes import Axes

from clasp_core.metrics import losses
from clasp_core.report.figures._canvas import BLUE, GREEN, VERMILLION, Plot, origin, page
from clasp_core.report.figures._choice import main_run, pairs
from clasp_core.report.runs import Run

NEEDS = "a run with a reference and a method with rounds, such as one of experiment=table1"
STEPS = ("ceiling", "oracle", "draft", "verify", "search", "measured")


def draw(runs: Sequence[Run]) -> Plot | None:
    """A panel per method of one run."""
    run = main_run([run for run in runs if run.reference is not None])
    data = ladders(run) if run is not None else []
    if run is None or not data:
        return None
    caption = (
        "Decode speed-up over AR (each panel on a scale of its own) that is left after each loss: "
        "ceiling = 1 / bytes of a draft step "
        "over "
        "AR's; oracle: not every token can be drafted, and a step costs more than its bytes; draft: rejected drafts; "
        "verify: "
        "passes wider than a token; search: choosing layers; measured: the host. Where nothing of the target is read "
        "for a "
        f"draft there is no ceiling. n = {data[0]['num_turns']} turns a method. {origin([run])}"
    )
    columns = min(3, len(data))
    rows = ceil(len(data) / columns)
    figure, panels = page("Loss ladder: where the speed-up goes", caption, 0.6 + 1.9 * rows, rows, columns)
    flat = [axes for row in panels for axes in row]
    for axes, line in zip(flat, data, strict=False):
        _waterfall(axes, line)
    for axes in flat[len(data) :]:
        axes.set_axis_off()
    for row in panels:
        row[0].set_ylabel("decode speed-up (x)")
    return Plot(figure, data)


def ladders(run: Run) -> list[dict[str, Any]]:
    """The ladder of every method that has one, over all tasks."""
    lines = []
    for name in run.methods:
        used = pairs(run, name)
        found = losses.ladder(used, run.greedy, run.c_bytes(name))
        if found is not None:
            levels = {step: getattr(found, step) for step in STEPS}
            costs = {"c": found.c, "c_bytes": found.c_bytes, "v": found.v, "p": found.p}
            lines.append({"method": name, **levels, "efficiency": found.efficiency, **costs, "num_turns": len(used)})
    return lines


def _waterfall(axes: Axes, line: dict[str, Any]) -> None:
    """Full bars at both ends; between them what was lost on the way down (or, hatched, won)."""
    steps = [step for step in STEPS if line[step] is not None]
    levels = [line[step] for step in steps]
    axes.bar(0, levels[0], color=BLUE, width=0.65)
    for place, (before, after) in enumerate(pairwise(levels), start=1):
        gained = after > before
        color, hatch = (GREEN, "//") if gained else (VERMILLION, "")
        axes.bar(place, after - before, bottom=before, color=color, hatch=hatch, width=0.65, edgecolor="white", lw=0.4)
        axes.plot(
            [place - 0.325, place + 0.325], [after, after], color="black", linewidth=1.4, marker="", linestyle="-"
        )
    axes.bar(len(levels) - 1, levels[-1], color=BLUE, width=0.65, zorder=0.5, alpha=0.45)
    for place, level in enumerate(levels):
        fell = 0 < place < len(levels) - 1 and level < levels[place - 1]
        offset, side = ((0, -2), "top") if fell else ((0, 2), "bottom")
        axes.annotate(
            f"{level:.2f}", (place, level), offset, textcoords="offset points", ha="center", va=side, fontsize=7
        )
    axes.set_ylim(0, 1.15 * max(1.0, *levels))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(steps)), steps, rotation=40, ha="right", fontsize=7.5)
    axes.grid(visible=False, axis="x")
    axes.set_title(line["method"])
