"""Verification by width: what a pass over several rows costs, from timed passes of the machine that the runs are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from math import ceil
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from clasp_core.report.benches import Cases, Setting, beside, by_width
from clasp_core.report.figures._canvas import Plot, cycle, legend_below, page
from clasp_core.report.runs import Run

NEEDS = "timed passes beside the runs of a machine; `make bench` stores some"


def draw(runs: Sequence[Run]) -> Plot | None:
    """A panel per model, precision and engine, a line per context; none without a `bench` folder beside the runs."""
    bench = beside(run.folder for run in runs)
    if bench is None:
        return None
    lines_of = {setting: _lines(setting, cases) for setting, cases in bench.cases.items()}
    data = [line for lines in lines_of.values() for line in lines]
    caption = (
        "v: a pass of the target over so many rows (the drafted tokens and the one before them) in AR steps, median "
        "over turns, each pass beside the step of its own turn. Dotted: a pass that costs as much as its rows one by "
        f"one. {bench.origin}"
    )
    panels = [
        (title, [line for setting in settings for line in lines_of[setting]])
        for title, settings in groupby(lines_of, lambda setting: setting.series)
    ]
    columns = min(2, len(panels))
    rows = ceil(len(panels) / columns)
    figure, grid = page(
        "Verification by width", caption, 0.9 + 1.9 * rows, rows, columns, legend=True, sharex=True, sharey=True
    )
    flat = [axes for row in grid for axes in row]
    for axes, (title, lines) in zip(flat, panels, strict=False):
        _panel(axes, title, lines)
    for axes in flat[len(panels) :]:
        axes.set_axis_off()
    for row in grid:
        row[0].set(ylabel="v (AR steps)", ylim=(0, 1.06 * max(line["v"] for line in data)))
    shown = {label: handle for axes in flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_below(figure, list(shown.values()), list(shown))
    return Plot(figure, data)


def _lines(setting: Setting, cases: Cases) -> list[dict[str, Any]]:
    return [asdict(setting) | {"width": width, "v": v} for width, v in by_width(cases).items()]


def _panel(axes: Axes, title: str, lines: Sequence[dict[str, Any]]) -> None:
    styles = cycle(axes)
    for context, some in groupby(lines, lambda line: line["context"]):
        points = [(line["width"], line["v"]) for line in some]
        axes.plot(*zip(*points, strict=True), label=f"behind {context} tokens", **next(styles))
    most = max(line["v"] for line in lines)
    axes.plot([1, most], [1, most], color="#7F7F7F", linestyle=":", marker="", linewidth=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title(title, fontsize=8)
    axes.set(xlabel="rows of a pass")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
