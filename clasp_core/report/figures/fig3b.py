"""Figure 3b: how near the programme's set comes to the full model's last state, against the best and random sets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from clasp_core.report.figures._canvas import Plot, origin, page
from clasp_core.report.figures._choice import analysis_rows
from clasp_core.report.runs import Run

NEEDS = "runs of experiment=fig3b or laptop/fig3b"
SERIES = (("brute_force", "best of all sets"), ("programme", "programme"), ("random_mean", "random sets"))


def draw(runs: Sequence[Run]) -> Plot | None:
    """A panel per model: cosine against the number of skipped layers, mean over tokens."""
    used, rows = analysis_rows(runs, "selection_quality")
    if not rows:
        return None
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    data = [{"model": model, **line} for model in models for line in by_count(rows, model)]
    tokens = len({(row["model"], row["task"], row["question_id"], row["position"]) for row in rows})
    free = " or ".join(sorted({str(row["num_free"]) for row in rows}))
    caption = (
        f"Cosine of the state after the last layer (before the final norm) with the full model's, mean over {tokens} "
        f"answer tokens. {free} layers in the middle may be skipped, the others stay, and every set is tried: 'best' "
        f"and 'random' are exact, the band holds 90 % of all sets (mean of its ends). {origin(used)}"
    )
    figure, (panels,) = page("Figure 3b: quality of the chosen sets", caption, 3.0, 1, len(models), sharey=True)
    for axes, model in zip(panels, models, strict=True):
        some = [line for line in data if line["model"] == model]
        counts = [line["num_skipped"] for line in some]
        axes.fill_between(
            counts, [line["random_p05"] for line in some], [line["random_p95"] for line in some],
            color="#7F7F7F", alpha=0.2, lw=0,
        )  # fmt: skip
        for key, label in SERIES:
            axes.plot(counts, [line[key] for line in some], label=label)
        axes.set(title=model, xlabel="layers skipped", xticks=counts)
    panels[0].set_ylabel("cosine with the full model's last state")
    panels[-1].legend(loc="lower left")
    return Plot(figure, data)


def by_count(rows: Sequence[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Means over tokens for each number of skipped layers."""
    of_model = [row for row in rows if row["model"] == model]
    keys = (*(key for key, _ in SERIES), "random_p05", "random_p95", "share_better")
    lines = []
    for count in sorted({row["num_skipped"] for row in of_model}):
        some = [row for row in of_model if row["num_skipped"] == count]
        means = {key: fmean(row[key] for row in some) for key in keys}
        lines.append({"num_skipped": count, **means, "num_tokens": len(some)})
    return lines
