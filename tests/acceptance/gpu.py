"""`make gpu-check [MODELS=...]`: what passes cost on this GPU, with random models of published shapes.

A few minutes on one GPU of 80 GB or more. Without a GPU it says so and ends well. The last line is one JSON document.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from typing import Any

import torch

from clasp_core.checkpoint import LoadedModel
from clasp_core.clasp import clasp
from clasp_core.device import free_memory
from clasp_core.drafting import NoDraft
from clasp_core.errors import UserError
from clasp_core.metrics.counting import shares
from clasp_core.metrics.grading import grades
from clasp_core.metrics.losses import ladder
from clasp_core.metrics.pairing import pairs
from clasp_core.plan import Method
from clasp_core.timings import READ, STEP, Timing
from tests.acceptance.bench import load, measure, sample
from tests.acceptance.speed import probe, store

MODELS = ("synthetic-llama3-8b", "synthetic-llama3-70b")
WIDTHS = (2, 3, 5, 9, 13)


def main(names: list[str]) -> None:
    """Check every model that fits, and store what was timed."""
    if not torch.accelerator.is_available():
        print("no GPU is visible to torch; nothing was checked. Run this on a machine with one.")
        return
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    for name in names or MODELS:
        for engine in ("eager", "compiled"):
            try:
                model = load(name, engine=engine)  # type: ignore[arg-type]
            except UserError as error:
                print(f"{name} left out: {error}")
                break
            found |= {f"{name}/{engine}/{key}": value for key, value in check(model, rows).items()}
            del model
            free_memory()
    store(rows, found)
    print(json.dumps({key: round(value, 4) for key, value in found.items()}))


def check(model: LoadedModel, rows: list[dict[str, Any]], num_turns: int = 9) -> dict[str, float]:
    """Single passes, then CLaSp beside AR on two questions; prints both and returns the figures."""
    timings, timed = probe(model, 256, num_turns, WIDTHS)
    rows += timed
    return of_passes(timings) | of_clasp(model)


def of_passes(timings: dict[str, Timing]) -> dict[str, float]:
    """AR's milliseconds and share of reading speed; the other cases in steps."""
    step = timings[STEP]
    others = {name: timing.over(step) for name, timing in timings.items() if name not in (STEP, READ)}
    return {
        "ar_ms": 1e3 * median(step.seconds),
        "bandwidth_share": step.share_of(timings[READ]) or 0.0,
        **{name.replace("-", "_"): value for name, value in others.items()},
    }


def of_clasp(model: LoadedModel) -> dict[str, float]:
    """CLaSp with half of the layers skipped: its ladder, its host share, and whether it is lossless."""
    methods: dict[str, Method] = {"ar": NoDraft(), "clasp": clasp(None, 0.5, 128, 0.0, 6)}
    rows = measure(model, methods, sample(1)[:2], 64)
    of = {name: [row for row in rows if row.method == name] for name in methods}
    steps = ladder(pairs(of["ar"], of["clasp"]).pairs, greedy=True, c_bytes=None)
    graded = grades(of["ar"], of["clasp"], greedy=True).worst
    host = shares(of["clasp"]).host or 0.0
    if steps is None:
        print(f"  clasp: {graded}; no pair with equal ids, so no ladder")
        return {"host_share": host}
    print(f"  clasp: {graded}; measured {steps.measured:.3f}, efficiency {steps.efficiency:.3f}, host {host:.1%}")
    levels = {f"ladder_{name}": getattr(steps, name) for name in ("oracle", "draft", "verify", "search", "measured")}
    return {"clasp_efficiency": steps.efficiency, "host_share": host, **levels}


if __name__ == "__main__":
    main(sys.argv[1:])
