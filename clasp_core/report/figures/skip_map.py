"""Which layers are skipped as an answer grows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from clasp_core.metrics import counting
from clasp_core.records import TurnRecord
from clasp_core.report.figures._canvas import BLUE, ORANGE, SKY, Plot, legend_below, origin, page
from clasp_core.report.figures._choice import analysis_rows, main_run
from clasp_core.report.runs import Run
from clasp_core.skip import LayerSkip

NEEDS = "a run of a layer-skipping method, or one of experiment=fig3a"
KINDS = ("kept", "attention skipped", "MLP skipped", "both skipped")
COLOURS = ("#F2F2F2", SKY, ORANGE, BLUE)


def draw(runs: Sequence[Run]) -> Plot | None:
    """A panel per method, on the question where the sets change most; and the programme at every token, if stored."""
    panels, used = [], []
    run = main_run([run for run in runs if any(_codes(row) for row in run.rows)])
    if run is not None:
        used.append(run)
        panels += [(f"{name}, {where(row)}", "round", _codes(row)) for name, row in chosen_rows(run)]
    analysed, rows = analysis_rows(runs, "token_skip_set")
    if analysed:
        used.append(analysed[-1])
        panels.append(of_tokens([row for row in rows if row["model"] == analysed[-1].model]))
    if not panels:
        return None
    caption = (
        "Each column is the skip set in use in one round (of the answer in which the method's sets change most "
        "often), or "
        f"that the programme chooses at one token of an answer. {origin(used)}"
    )
    height = 0.4 + sum(0.7 + max(0.4, 0.024 * LayerSkip.decode(codes[0]).num_layers) for _, _, codes in panels)
    figure, axes = page("Skip sets as the answer grows", caption, height, len(panels), 1, legend=True)
    for (line,), (title, label, codes) in zip(axes, panels, strict=True):
        _map(line, title, label, codes)
    patches = [Patch(facecolor=colour, edgecolor="#999999") for colour in COLOURS]
    legend_below(figure, patches, KINDS)
    return Plot(figure, [line for panel in panels for line in lines(*panel)])


def chosen_rows(run: Run) -> list[tuple[str, TurnRecord]]:
    """For each layer-skipping method the finished turn with the most changes of its set, then the most rounds."""
    found = []
    for name in run.methods:
        rows = [row for row in counting.finished(run.of(name)) if _codes(row)]
        if rows:
            found.append((name, max(rows, key=lambda row: (num_changes(_codes(row)), len(_codes(row))))))
    return found


def num_changes(codes: Sequence[str]) -> int:
    """How often the set differs from the one before."""
    return sum(a != b for a, b in pairwise(codes))


def of_tokens(rows: Sequence[dict[str, Any]]) -> tuple[str, str, list[str]]:
    """The panel of the answer with the most tokens."""
    answers: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rows:
        answers.setdefault((row["task"], row["question_id"]), []).append(row)
    (task, question), longest = max(answers.items(), key=lambda item: len(item[1]))
    codes = [str(row["skip"]) for row in sorted(longest, key=lambda row: int(row["position"]))]
    return f"the programme at every token looked at, {task} {question}", "token", codes


def lines(title: str, label: str, codes: Sequence[str]) -> list[dict[str, Any]]:
    """The drawn cells by column: the skipped layers as lists."""
    skips = [LayerSkip.decode(code) for code in codes]
    return [
        {
            "panel": title,
            label: index,
            "skipped_attn": " ".join(map(str, skip.skipped_attn)),
            "skipped_mlp": " ".join(map(str, skip.skipped_mlp)),
        }
        for index, skip in enumerate(skips)
    ]


def where(row: TurnRecord) -> str:
    """Task, question and turn, as a title names them."""
    return f"{row.task} {row.question_id}, turn {row.turn + 1}"


def _codes(row: TurnRecord) -> list[str]:
    """The sets of the rounds that drafted with one."""
    return [code for code in row.rounds.skip if code is not None] if row.rounds is not None else []


def _map(axes: Axes, title: str, label: str, codes: Sequence[str]) -> None:
    skips = [LayerSkip.decode(code) for code in codes]
    cells = [[skip.attn[layer] + 2 * skip.mlp[layer] for skip in skips] for layer in range(skips[0].num_layers)]
    norm = BoundaryNorm([-0.5, 0.5, 1.5, 2.5, 3.5], 4)
    axes.imshow(cells, aspect="auto", origin="lower", cmap=ListedColormap(COLOURS), norm=norm, interpolation="nearest")
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set(title=title, xlabel=label, ylabel="layer")
