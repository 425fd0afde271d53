"""Figure 4c: speed-up and accepted tokens against the draft's exit threshold."""

from __future__ import annotations

from collections.abc import Sequence

from clasp_core.report.figures._canvas import Plot
from clasp_core.report.figures._paper import points
from clasp_core.report.figures._sweep import METHOD, draw_sweep, lines
from clasp_core.report.runs import Run

NEEDS = "runs of experiment=fig4c or laptop/fig4c"


def draw(runs: Sequence[Run]) -> Plot | None:
    """A draft ends with the first token whose probability is below the threshold."""
    stated = [("paper (LLaMA-3-70B):\nhighest around", {"x": float(p["x"]), "speedup": None}) for p in points("4c")]
    title = "Figure 4c: speed-up against the draft's exit threshold"
    setting = "A draft ends with its first token below the threshold, or at its maximal length."
    return draw_sweep(lines(runs, "fig4c", threshold), title, "exit threshold (probability)", setting, stated)


def threshold(run: Run) -> float | None:
    """The configured threshold."""
    return float(run.manifest.config["method"][METHOD]["exit_threshold"])
