"""Figure 3a: Jaccard similarity of two tokens' skip sets against their distance in the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import comb
from statistics import fmean, quantiles
from typing import Any

from clasp_core.report.figures._canvas import Plot, cycle, origin, page
from clasp_core.report.figures._choice import analysis_rows
from clasp_core.report.runs import Run
from clasp_core.skip import LayerSkip

NEEDS = "runs of experiment=fig3a or laptop/fig3a"


def draw(runs: Sequence[Run]) -> Plot | None:
    """Mean over all pairs of tokens of one answer, the middle half as a band, and what random sets would share."""
    used, rows = analysis_rows(runs, "token_skip_set")
    if not rows:
        return None
    answers = len({(row["model"], row["task"], row["question_id"]) for row in rows})
    caption = (
        f"Jaccard similarity |A & B| / |A | B| of the sets of layers that the programme skips at two tokens of one "
        f"answer; "
        f"mean over pairs, band from the first to the third quartile. {answers} answers, {len(rows)} tokens. Dotted: "
        f"expected of two random sets of that size. {origin(used)}"
    )
    figure, ((axes,),) = page("Figure 3a: skip sets of neighbouring tokens", caption, 3.0)
    styles, data = cycle(axes), []
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        some = [row for row in rows if row["model"] == model]
        style, lines = next(styles), by_distance(some)
        data += [{"model": model, **line} for line in lines]
        xs = [line["distance"] for line in lines]
        axes.plot(xs, [line["mean"] for line in lines], label=model, **{**style, "marker": ""})
        axes.fill_between(
            xs, [line["q1"] for line in lines], [line["q3"] for line in lines], color=style["color"], alpha=0.18, lw=0
        )
        random = {"color": style["color"], "linestyle": ":", "linewidth": 1.2}
        axes.axhline(lines[0]["random"], label=f"{model}, random sets", **random)
    axes.set(xlabel="distance in tokens", ylabel="Jaccard similarity", ylim=(0, 1.2), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.legend(loc="upper right", ncols=2)
    return Plot(figure, data)


def by_distance(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean, quartiles and number of the pairs' similarities at each distance, within answers."""
    answers: dict[tuple[object, ...], list[tuple[int, LayerSkip]]] = defaultdict(list)
    for row in rows:
        answer = (row["task"], row["question_id"], row["turn"])
        answers[answer].append((int(row["position"]), LayerSkip.decode(row["skip"])))
    found: dict[int, list[float]] = defaultdict(list)
    for tokens in answers.values():
        for (one, a), (other, b) in combinations(tokens, 2):
            found[abs(other - one)].append(jaccard(a, b))
    skip = LayerSkip.decode(rows[0]["skip"])
    random = expected_of_random(skip.num_layers, sum(skip.attn))
    return [_line(distance, found[distance], random) for distance in sorted(found)]


def jaccard(a: LayerSkip, b: LayerSkip) -> float:
    """Of two sets of whole layers; 1 where both are empty."""
    one, other = set(a.skipped_attn), set(b.skipped_attn)
    return len(one & other) / len(one | other) if one | other else 1.0


def expected_of_random(num_layers: int, size: int) -> float:
    """Mean similarity of two independent uniform sets of `size` layers."""
    ways = comb(num_layers, size)
    shared = range(max(1, 2 * size - num_layers), size + 1)
    return sum(comb(size, k) * comb(num_layers - size, size - k) / ways * k / (2 * size - k) for k in shared)


def _line(distance: int, values: list[float], random: float) -> dict[str, Any]:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "distance": distance, "mean": fmean(values), "q1": low, "q3": high, "num_pairs": len(values), "random": random,
    }  # fmt: skip
