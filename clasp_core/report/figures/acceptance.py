"""Acceptance by position in the draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from clasp_core.positions import acceptance_by_position
from clasp_core.records import TurnRecord
from clasp_core.report.figures._canvas import Plot, cycle, origin, page
from clasp_core.report.figures._choice import main_run
from clasp_core.report.runs import Run

NEEDS = "a run with drafts, such as one of experiment=table1 or method=clasp"
FEWEST = 5
"""A rate over fewer rounds is in the data but not drawn."""


def draw(runs: Sequence[Run]) -> Plot | None:
    """A line per method of one run."""
    run = main_run([run for run in runs if any(row.rounds and any(row.rounds.num_drafted) for row in run.rows)])
    if run is None:
        return None
    data = [{"method": name, **line} for name in run.methods for line in by_position(run.used(name))]
    names = list(dict.fromkeys(line["method"] for line in data))
    trees = [name for name in run.methods if name not in names]
    caption = (
        "Left: share of the tokens drafted at a position that were kept. Right: the same among rounds that kept all "
        f"tokens before it. Positions count from 1. Points from fewer than {FEWEST} rounds are left "
        f"out. {_left_out(trees)}n = {len(run.used(run.methods[0]))} turns a method. {origin([run])}"
    )
    figure, ((left, right),) = page("Acceptance by position in the draft", caption, 3.0, 1, 2, sharey=True)
    for axes, key, base in ((left, "kept", "num_drafted"), (right, "kept_if_reached", "num_reached")):
        styles = cycle(axes)
        for name in names:
            style = next(styles)
            some = [line for line in data if line["method"] == name and line[base] >= FEWEST]
            axes.plot([line["position"] for line in some], [line[key] for line in some], label=name, **style)
        axes.set(xlabel="position in the draft", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("share kept")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Plot(figure, data)


def by_position(rows: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Rounds that drafted, reached and kept each position, and both rates; nothing for trees."""
    return [
        {
            "position": found.position + 1,
            "num_drafted": found.num_drafted,
            "num_reached": found.num_reached,
            "num_kept": found.num_accepted,
            "kept": found.rate,
            "kept_if_reached": found.conditional_rate,
        }
        for found in acceptance_by_position(rows) or ()
    ]


def _left_out(names: Sequence[str]) -> str:
    return f"Not drawn, since they draft trees or nothing: {', '.join(names)}. " if names else ""
