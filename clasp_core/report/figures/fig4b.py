"""Figure 4b: speed-up and accepted tokens against the interval between two programmes."""

from __future__ import annotations

from collections.abc import Sequence

from clasp_core.report.figures._canvas import Plot
from clasp_core.report.figures._paper import points
from clasp_core.report.figures._sweep import METHOD, draw_sweep, lines
from clasp_core.report.runs import Run

NEEDS = "runs of experiment=fig4b or laptop/fig4b"


def draw(runs: Sequence[Run]) -> Plot | None:
    """On a logarithmic axis; a run with interval=null (one programme per prefill) has no place on it."""
    stated = [("paper (LLaMA-3-70B):\ndeclines beyond", {"x": float(p["x"]), "speedup": None}) for p in points("4b")]
    title = "Figure 4b: speed-up against the interval between programmes"
    label = "verification rounds between two programmes"
    plot = draw_sweep(lines(runs, "fig4b", interval), title, label, "One programme follows every prefill.", stated)
    if plot is not None:
        plot.figure.axes[1].set_xscale("log", base=2)
        plot.figure.axes[1].xaxis.set_major_formatter("{x:g}")
    return plot


def interval(run: Run) -> float | None:
    """The configured interval."""
    value = run.manifest.config["method"][METHOD]["interval"]
    return None if value is None else float(value)
