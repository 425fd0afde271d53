"""Figure 5: speed-up against model size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clasp_core.metrics import speedups
from clasp_core.report.figures._canvas import Plot, cycle, origin, page
from clasp_core.report.figures._choice import experiment, pairs
from clasp_core.report.figures._paper import points
from clasp_core.report.runs import Run

NEEDS = "a run of method=clasp with a reference, such as those of experiment=fig5"
METHOD = "clasp"


def draw(runs: Sequence[Run]) -> Plot | None:
    """A line per task, ours and the paper's, over billions of parameters."""
    found = lines(runs)
    if not found:
        return None
    stated = [
        {
            "task": p["task"],
            "model": p["model"],
            "billions": float(p["x"]),
            "speedup": float(p["value"]),
            "source": "paper",
        }
        for p in points("5")
    ]
    tasks = list(dict.fromkeys(line["task"] for line in stated))
    ours = [line for _, line in found if line["task"] in tasks]
    caption = (
        "Speed-up: paired_total, AR's time over CLaSp's, prefill inside, with its 95 % bootstrap interval over "
        "questions "
        f"(n = {', '.join(sorted({str(line['num_questions']) for line in ours}))}). Open marks: points that the "
        f"paper states "
        f"(A800; 405B in int8 on eight). Ours are moved apart sideways. Lines join marks and claim nothing between "
        f"them. "
        f"{origin([r for r, _ in found])}"
    )
    figure, ((axes,),) = page("Figure 5: speed-up against model size", caption, 3.2)
    styles = cycle(axes)
    for place, task in enumerate(tasks):
        style, shift = next(styles), 1.07 ** (place - 1)
        _series(axes, [line for line in stated if line["task"] == task], f"{task}, paper", {**style, "mfc": "white"}, 1)
        _series(axes, sorted((x for x in ours if x["task"] == task), key=_size), f"{task}, ours", style, shift)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="billions of parameters", ylabel="speed-up over AR (x)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Plot(figure, ours + stated)


def lines(runs: Sequence[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """CLaSp's speed-up per task and model, of the latest run that is not part of another sweep."""
    found: dict[tuple[str, str, str], tuple[Run, dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run.manifest.start):
        if METHOD not in run.methods or experiment(run) not in (None, "fig5", "table1"):
            continue
        for task in run.tasks:
            speedup = speedups.paired_total(pairs(run, METHOD, task), run.greedy)
            if speedup is not None:
                line = {"task": task, "model": run.model, "billions": run.manifest.model["num_parameters"] / 1e9}
                line |= {"speedup": speedup.value, "source": run.machine, "low": speedup.low, "high": speedup.high}
                found[run.model, run.machine, task] = run, {**line, "num_questions": speedup.n}
    return list(found.values())


def _series(axes: Any, some: Sequence[dict[str, Any]], label: str, style: dict[str, Any], shift: float) -> None:
    if not some:
        return
    values = [line["speedup"] for line in some]
    ends = [[abs((line.get(key) or line["speedup"]) - line["speedup"]) for line in some] for key in ("low", "high")]
    axes.errorbar([line["billions"] * shift for line in some], values, yerr=ends, label=label, **style)


def _size(line: dict[str, Any]) -> float:
    return float(line["billions"])
