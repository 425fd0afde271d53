"""`make gpu-check [MODELS=...]`: what passes cost on this GPU, with random models of published shapes.

A few minutes on one GPU of 80 GB or more. Without a GPU it says so and ends well. Replayed passes are compared with the
same passes call by call; a difference ends it with exit code 1. The last line is one JSON document.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.checkpoint import LoadedModel
from clasp_core.clasp import clasp, select_layers
from clasp_core.device import free_memory
from clasp_core.drafting import NoDraft
from clasp_core.errors import NotEnoughMemory
from clasp_core.metrics.counting import shares
from clasp_core.metrics.grading import grades
from clasp_core.metrics.losses import ladder
from clasp_core.metrics.pairing import pairs
from clasp_core.plan import Method
from clasp_core.probe import Scene, every_other
from clasp_core.skip import LayerSkip
from clasp_core.target import Engine, forward
from clasp_core.timings import READ, STEP, Timing
from tests.acceptance.bench import load, measure, sample
from tests.acceptance.speed import probe, prompt_of, store

ENOUGH_S = 240.0
"""No model is begun after that, so that all of it ends within six minutes."""

MAY_DIFFER = 5e-2
"""Relative distance that rounding to 16 bit explains; a wrong pass is off by order one."""

MODELS = ("synthetic-llama3-8b", "synthetic-llama3-70b")
WIDTHS = (2, 3, 5, 9, 13)


def main(names: Sequence[str]) -> int:
    """Check every model that fits, and store what was timed; the number of faults found."""
    if not torch.accelerator.is_available():
        print("no GPU is visible to torch; nothing was checked. Run this on a machine with one.")
        return 0
    started, rows, faults = time.monotonic(), list[dict[str, Any]](), list[str]()
    found: dict[str, float] = {}
    for name, engine in product(names or MODELS, get_args(Engine)):
        if (spent := time.monotonic() - started) > ENOUGH_S:
            print(f"{name}, {engine} left out: {spent:.0f} s are spent")
            continue
        try:
            model = load(name, engine=engine)
        except NotEnoughMemory as error:
            print(f"{name}, {engine} left out: {error}")
            continue
        graphs = model.info.get("cuda_graphs", "not used")
        print(f"{model.label}, {engine}: {model.info['distance_to_hf']:.1e} from HF's logits, CUDA graphs {graphs}")
        wrong = faults_of(model)
        faults += [f"{name}, {engine}: {each}" for each in wrong]
        found |= {f"{name}/{engine}/{key}": value for key, value in check(model, rows, faults).items()}
        del model
        gc.collect()
        free_memory()
    store(rows, [], found)
    for fault in faults:
        print(f"FAULT {fault}")
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))
    return len(faults)


@torch.inference_mode()
def faults_of(model: LoadedModel, num_prompt: int = 60) -> list[str]:
    """Where replayed passes differ from the same passes call by call: verification, a draft, CLaSp's programme."""
    target = model.target
    if not target.records:
        why = model.info.get("cuda_graphs")
        return [f"CUDA graphs are {why}"] if why is not None else []
    skip = every_other(target.num_layers, target.num_layers // 2)
    cases: dict[str, Callable[[Scene], Tensor]] = {
        "a verification of 5 rows": lambda scene: _logits(scene, 5, None),
        "a draft step": lambda scene: _logits(scene, 1, skip),
        "the programme's state": lambda scene: (
            select_layers(target, scene.cache, scene.states, scene.context - 1, target.num_layers // 2).final_state
        ),
    }
    found = []
    for what, case in cases.items():
        scene = Scene.after(target, prompt_of(model, num_prompt), 8)
        replayed = case(scene).double()
        with target.call_by_call():
            plain = case(scene).double()
        distance = float((replayed - plain).norm() / plain.norm())
        print(f"  {what}: replayed and call by call differ by {distance:.1e}")
        if not distance <= MAY_DIFFER:
            found.append(f"{what} differs by {distance:.1e} when it is replayed")
    return found


def _logits(scene: Scene, rows: int, skip: LayerSkip | None) -> Tensor:
    span = Span.causal(scene.context, rows)
    return forward(scene.target, scene.tokens[:rows], span, scene.cache, skip=skip).logits


def check(model: LoadedModel, rows: list[dict[str, Any]], faults: list[str], num_turns: int = 9) -> dict[str, float]:
    """Single passes, then CLaSp beside AR on two questions; prints both and returns the figures."""
    timings, timed = probe(model, 256, num_turns, WIDTHS)
    rows += timed
    return of_passes(timings) | of_clasp(model, faults)


def of_passes(timings: dict[str, Timing]) -> dict[str, float]:
    """AR's milliseconds and share of reading speed; the other cases in steps."""
    step = timings[STEP]
    others = {name: timing.over(step) for name, timing in timings.items() if name not in (STEP, READ)}
    return {
        "ar_ms": 1e3 * median(step.seconds),
        "bandwidth_share": step.share_of(timings[READ]) or 0.0,
        **{name.replace("-", "_"): value for name, value in others.items()},
    }


def of_clasp(model: LoadedModel, faults: list[str]) -> dict[str, float]:
    """CLaSp with half of the layers skipped: its ladder, its host share, and whether it is lossless."""
    methods: dict[str, Method] = {"ar": NoDraft(), "clasp": clasp(None, 0.5, 128, 0.0, 6)}
    rows = measure(model, methods, sample(1)[:2], 64)
    of = {name: [row for row in rows if row.method == name] for name in methods}
    steps = ladder(pairs(of["ar"], of["clasp"]).pairs, greedy=True, c_bytes=None)
    graded = grades(of["ar"], of["clasp"], greedy=True).worst
    host = shares(of["clasp"]).host or 0.0
    if graded in ("mismatch", "missing"):
        faults.append(f"{model.name}, {model.target.engine}: CLaSp's answers are graded {graded}")
    if steps is None:
        print(f"  clasp: {graded}; no pair with equal ids, so no ladder")
        return {"host_share": host}
    print(f"  clasp: {graded}; measured {steps.measured:.3f}, efficiency {steps.efficiency:.3f}, host {host:.1%}")
    levels = {f"ladder_{name}": getattr(steps, name) for name in ("oracle", "draft", "verify", "search", "measured")}
    return {"clasp_efficiency": steps.efficiency, "host_share": host, **levels}


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
