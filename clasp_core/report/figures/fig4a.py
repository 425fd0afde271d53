"""Figure 4a: speed-up and accepted tokens against the share of skipped layers."""

from __future__ import annotations

from collections.abc import Sequence

from clasp_core.report.figures._canvas import Plot
from clasp_core.report.figures._paper import points
from clasp_core.report.figures._sweep import METHOD, draw_sweep, lines
from clasp_core.report.runs import Run
from clasp_core.skip import LayerSkip

NEEDS = "runs of experiment=fig4a or laptop/fig4a"
PAPER_LAYERS = 80
"""Layers of LLaMA-3-70B, to which the paper's 44 belong."""


def draw(runs: Sequence[Run]) -> Plot | None:
    """Shares, so that models of different depth fit one axis."""
    stated = [
        ("paper (LLaMA-3-70B,\nA800): 44 of 80", {"x": float(p["x"]) / PAPER_LAYERS, "speedup": float(p["value"])})
        for p in points("4a")
    ]
    title = "Figure 4a: speed-up against skipped layers"
    setting = "Skipped layers are those of the sets in use, M of L."
    return draw_sweep(lines(runs, "fig4a", skipped), title, "share of layers skipped, M / L", setting, stated)


def skipped(run: Run) -> float | None:
    """M / L as the rounds' traces have it."""
    traces = (row.rounds for row in run.of(METHOD) if row.rounds is not None)
    code = next((code for trace in traces for code in trace.skip if code is not None), None)
    if code is None:
        return None
    skip = LayerSkip.decode(code)
    return skip.num_skipped_sublayers / (2 * skip.num_layers)
