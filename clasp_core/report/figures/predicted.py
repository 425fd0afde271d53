"""Predicted against measured speed-up: whether counters and phase times explain what the clock says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clasp_core.metrics import losses
from clasp_core.report.figures._canvas import Plot, cycle, origin, page
from clasp_core.report.figures._choice import pairs
from clasp_core.report.runs import Run

NEEDS = "a run with a reference and a method with rounds"
BAND = 0.10
"""Beyond it the difference is named as host loss (P63)."""


def draw(runs: Sequence[Run]) -> Plot | None:
    """A mark per run, method and task."""
    used = [run for run in runs if run.reference is not None]
    data = [line for run in used for line in lines(run)]
    if not data:
        return None
    inside = sum(abs(line["measured"] / line["predicted"] - 1) <= BAND for line in data)
    caption = (
        f"Decode speed-up over AR, one mark per run, method and task: predicted is the ladder's search step T / (R v "
        f"+ D c "
        f"+ P p), measured is paired_decode. Band: {BAND:.0%} about equality; {inside} of {len(data)} marks are "
        f"inside. "
        f"What lies below is time outside draft, verification and search. {origin(used)}"
    )
    figure, ((axes,),) = page("Predicted against measured speed-up", caption, 3.8)
    ends = [min(min(line["predicted"], line["measured"]) for line in data) * 0.92]
    ends.append(max(max(line["predicted"], line["measured"]) for line in data) * 1.06)
    axes.fill_between(
        ends, [(1 - BAND) * x for x in ends], [(1 + BAND) * x for x in ends], color="#7F7F7F", alpha=0.18, lw=0
    )
    axes.plot(ends, ends, color="black", linewidth=1, marker="", linestyle="-")
    if ends[1] > 4 * ends[0]:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    styles = cycle(axes)
    for name in dict.fromkeys(line["method"] for line in data):
        some = [line for line in data if line["method"] == name]
        style = {**next(styles), "linestyle": ""}
        axes.plot([line["predicted"] for line in some], [line["measured"] for line in some], label=name, **style)
    axes.set(xlabel="predicted (x)", ylabel="measured (x)", xlim=ends, ylim=ends, aspect="equal")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Plot(figure, data)


def lines(run: Run) -> list[dict[str, Any]]:
    """Both speed-ups of each method and task of a run that has them."""
    found = []
    for name in run.methods:
        for task in run.tasks:
            ladder = losses.ladder(pairs(run, name, task), run.greedy, None)
            if ladder is not None:
                where = {"run_id": run.manifest.run_id, "model": run.model, "method": name, "task": task}
                found.append({**where, "predicted": ladder.predicted, "measured": ladder.measured})
    return found
