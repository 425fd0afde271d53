"""The points of the baselines: one table for all methods, exact grades, little time outside the model."""

from __future__ import annotations

from functools import partial

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from clasp_core.drafting import NoDraft
from clasp_core.entry.keys import register
from clasp_core.entry.manifests import offline_search_s
from clasp_core.kv_cache import KVCache
from clasp_core.metrics.counting import count, shares
from clasp_core.metrics.grading import grades
from clasp_core.metrics.losses import ladder
from clasp_core.metrics.pairing import pairs
from clasp_core.metrics.speedups import paired_total
from clasp_core.plan import Method
from clasp_core.target import TargetModel
from tests.acceptance.bench import ROOT, Point, load, measure, sample

CHAINS = ("pld", "sps", "self_sd", "clasp", "layerskip", "oracle")
TREES = ("swift",)


EQUAL_COUNTS = (
    "method.swift.skip_ratio=null",
    "method.swift.num_skipped_sublayers=60",
    "method.self_sd.skip_set=${repository:}/data/skip_sets/smollm2-135m-deep-self_sd-60.json",
)
"""60 of the 120 sub-layers of `smollm2-135m-deep`, as CLaSp skips by its 30 layers: then the choice alone differs."""


def build(names: tuple[str, ...], model: str, overrides: tuple[str, ...] = ()) -> dict[str, Method]:
    """The methods of `conf/method`, as `python run.py method=[...] model=...` builds them; AR first."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[f"method=[{','.join(names)}]", f"model={model}", *overrides])
    return {"ar": NoDraft()} | {name: instantiate(cfg.method[name], _convert_="all") for name in names}


def every_method_is_exact(model_name: str, overrides: tuple[str, ...] = ()) -> Point:
    """All grades exact on our own questions; speed-up and efficiency of each method are the figure."""
    methods = build((*CHAINS, *TREES), model_name, overrides)
    rows = measure(load(model_name), methods, sample(1), 48)
    of = {name: [row for row in rows if row.method == name] for name in methods}
    figures, worst = [], set()
    for name in (*CHAINS, *TREES):
        found = pairs(of["ar"], of[name]).pairs
        worst.add(grades(of["ar"], of[name], greedy=True).worst)
        speedup, steps = paired_total(found, greedy=True), ladder(found, greedy=True, c_bytes=None)
        if speedup is not None and steps is not None:
            figures.append(f"{name} {speedup.value:.2f} (efficiency {steps.efficiency:.2f})")
    return Point(worst == {"exact"}, f"grades {sorted(worst, key=str)}; {', '.join(figures)}")


def little_time_outside_the_model() -> Point:
    """Host share of decode time: under 5 % for chains, under 8 % for trees, on `smollm2-135m`."""
    methods = build((*CHAINS, *TREES), "smollm2-135m")
    rows = measure(load("smollm2-135m"), methods, sample(1), 48)
    host = {name: shares(row for row in rows if row.method == name).host or 0.0 for name in methods}
    limits = {name: 0.08 if name in TREES else 0.05 for name in methods}
    figure = ", ".join(f"{name} {share:.1%}" for name, share in host.items())
    return Point(all(host[name] < limits[name] for name in methods), figure)


def searches_show_in_the_select_share() -> Point:
    """SWIFT's search and CLaSp's programme show in `select` in long answers; Self-SD's offline search is known."""
    methods = build(("self_sd", "swift", "clasp"), "smollm2-135m")
    rows = measure(load("smollm2-135m"), methods, sample(1)[:2], 160)
    select = {name: shares(row for row in rows if row.method == name).select or 0.0 for name in methods}
    offline_s = offline_search_s(methods).get("self_sd", 0.0)
    searches = {name: count(row for row in rows if row.method == name).num_searches for name in ("swift", "clasp")}
    holds = min(searches.values()) > 0 and select["swift"] > 0 and select["clasp"] > 0 and offline_s > 0
    figure = ", ".join(f"{name} {select[name]:.1%} in {number} searches" for name, number in searches.items())
    return Point(holds, f"select share: {figure}; self_sd {select['self_sd']:.1%} and {offline_s:.0f} s before the run")


def one_cache_sized_by_prompt_and_budget() -> Point:
    """Each method makes one cache of the target in an answer, of the same size at a limit of 2048 and of a million."""
    names = ("pld", "swift", "clasp", "layerskip", "oracle", "random_skip")
    found = {name: [caches_made(name, limit) for limit in (2048, 1 << 20)] for name in names}
    alone = len(caches_made("ar", 2048))
    holds = all(first == second and len(first) == 2 * alone for first, second in found.values())
    largest = ", ".join(f"{name} {max(first)}" for name, (first, _) in found.items())
    return Point(holds, f"one cache an answer; the largest, in tokens, at either limit: {largest}")


def caches_made(name: str, limit: int) -> list[int]:
    """The capacity of every cache that `tiny` made for AR and one method, on one question, warm-up included."""
    model = load("tiny", max_position_embeddings=str(limit))
    made: list[int] = []

    def new_cache(capacity: int) -> KVCache:
        made.append(capacity)
        return TargetModel.new_cache(model.target, capacity)

    model.target.new_cache = new_cache  # type: ignore[method-assign]
    methods = build((name,), "tiny") if name != "ar" else {"ar": NoDraft()}
    measure(model, methods, sample(1)[1:2], 24)
    return made


POINTS = {
    "methods-smollm2-135m": partial(every_method_is_exact, "smollm2-135m"),
    "methods-smollm2-135m-deep": partial(every_method_is_exact, "smollm2-135m-deep", EQUAL_COUNTS),
    "host-share": little_time_outside_the_model,
    "select-share": searches_show_in_the_select_share,
    "memory": one_cache_sized_by_prompt_and_budget,
}
