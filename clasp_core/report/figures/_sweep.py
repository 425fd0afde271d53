"""Figures 4a to 4c: speed-up and accepted tokens against one setting of CLaSp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clasp_core.metrics import counting, speedups
from clasp_core.report.figures._canvas import Plot, cycle, origin, page
from clasp_core.report.figures._choice import experiment, pairs
from clasp_core.report.runs import Run

METHOD = "clasp"
Line = dict[str, Any]


def lines(runs: Sequence[Run], name: str, x: Callable[[Run], float | None]) -> list[tuple[Run, Line]]:
    """One line per run of the experiment, by model, machine and x; a later run replaces an equal earlier one."""
    found: dict[tuple[str, str, float], tuple[Run, Line]] = {}
    for run in sorted(runs, key=lambda run: run.manifest.start):
        if experiment(run) != name or METHOD not in run.methods or (at := x(run)) is None:
            continue
        used = pairs(run, METHOD)
        speedup = speedups.paired_total(used, run.greedy)
        if speedup is not None:
            tau = counting.mean_accepted_per_round((pair.method for pair in used), "rounds")
            line = {"model": run.model, "machine": run.machine, "x": at, "speedup": speedup.value}
            line |= {"low": speedup.low, "high": speedup.high, "num_questions": speedup.n, "mean_accepted": tau}
            found[run.model, run.machine, at] = run, line
    return [found[key] for key in sorted(found)]


def draw_sweep(
    found: Sequence[tuple[Run, Line]], title: str, label: str, setting: str, paper: Sequence[tuple[str, Line]] = ()
) -> Plot | None:
    """Speed-up above, accepted tokens below. `paper`: what to call a stated point, its x and its speed-up if known."""
    if not found:
        return None
    data = [line for _, line in found]
    tasks = list(dict.fromkeys(task for run, _ in found for task in run.tasks))
    numbers = sorted({line["num_questions"] for line in data})
    caption = (
        "Speed-up: paired_total, AR's time over the method's, prefill inside, over turns with equal ids, with its 95 % "
        f"bootstrap interval over questions (n = {' or '.join(map(str, numbers))} a point). Accepted tokens: mean "
        "draft tokens kept per verification round, the target's own token not counted. "
        f"{setting} Tasks: {', '.join(tasks)}. {origin([run for run, _ in found])}"
    )
    figure, ((above,), (below,)) = page(title, caption, 4.2, 2, 1, sharex=True)
    above.set_ylabel("speed-up over AR (x)")
    below.set_ylabel("accepted per round")
    below.set_xlabel(label)
    styles = cycle(above)
    for series in dict.fromkeys((line["model"], line["machine"]) for line in data):
        some = [line for line in data if (line["model"], line["machine"]) == series]
        style, xs = next(styles), [line["x"] for line in some]
        above.errorbar(xs, [line["speedup"] for line in some], yerr=_bars(some), label=", ".join(series), **style)
        below.plot(xs, [line["mean_accepted"] for line in some], **style)
    above.axhline(1, color="black", linewidth=0.8)
    for name, point in paper:
        for axes in (above, below):
            axes.axvline(point["x"], color="#7F7F7F", linestyle=":", linewidth=1)
        where = [point["speedup"]] if point["speedup"] else []
        marker: dict[str, Any] = {"marker": "*" if where else "", "linestyle": "" if where else ":", "color": "#7F7F7F"}
        above.plot([point["x"]] * len(where), where, markersize=9, label=name, **marker)
        data.append({"model": name, "machine": None, **point})
    above.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Plot(figure, data)


def _bars(some: Sequence[Line]) -> list[list[float]]:
    """Distances down and up to the ends of the intervals; none where there is one question only."""
    low = [line["speedup"] - (line["low"] if line["low"] is not None else line["speedup"]) for line in some]
    high = [(line["high"] if line["high"] is not None else line["speedup"]) - line["speedup"] for line in some]
    return [[max(0.0, value) for value in low], [max(0.0, value) for value in high]]
