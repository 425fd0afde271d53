"""Acceptance by position in the draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clasp_core import metrics
from clasp_core.records import RoundTrace, TurnRecord
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
    data = [{"method": name, **line} for name in run.methods for line in by_position(run.of(name))]
    caption = (
        "Left: share of the tokens drafted at a position that were kept. Right: the same among rounds that kept all "
        f"tokens before it. Positions count from 1; of a tree, levels. Points from fewer than {FEWEST} rounds are left "
        f"out. n = {len(metrics.common_turns(run.rows, run.methods))} turns a method. {origin([run])}"
    )
    figure, ((left, right),) = page("Acceptance by position in the draft", caption, 3.0, 1, 2, sharey=True)
    for axes, key, base in ((left, "kept", "num_drafted"), (right, "kept_if_reached", "num_reached")):
        styles = cycle(axes)
        for name in run.methods:
            style = next(styles)
            some = [line for line in data if line["method"] == name and line[base] >= FEWEST]
            axes.plot([line["position"] for line in some], [line[key] for line in some], label=name, **style)
        axes.set(xlabel="position in the draft", ylim=(0, 1.03))
        axes.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylabel("share kept")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Plot(figure, data)


def by_position(rows: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Rounds that drafted, reached and kept each position, and both rates."""
    rounds = [each for row in metrics.finished(rows) if row.rounds is not None for each in depths(row.rounds)]
    lines = []
    for position in range(1, max((depth for depth, _ in rounds), default=0) + 1):
        drafted = sum(depth >= position for depth, _ in rounds)
        reached = sum(depth >= position and kept >= position - 1 for depth, kept in rounds)
        kept = sum(kept >= position for _, kept in rounds)
        rates = {"kept": kept / drafted, "kept_if_reached": kept / reached if reached else None}
        lines.append({"position": position, "num_drafted": drafted, "num_reached": reached, "num_kept": kept, **rates})
    return lines


def depths(trace: RoundTrace) -> list[tuple[int, int]]:
    """Length of each round's draft and how much of it was kept; a tree is as long as it took steps."""
    counts = zip(trace.num_drafted, trace.num_draft_steps, trace.num_accepted, strict=True)
    return [(min(drafted, steps) if steps else drafted, kept) for drafted, steps, kept in counts]
