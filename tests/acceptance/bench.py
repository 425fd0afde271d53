"""What the points share: models by name, real questions, and a run whose rows stay in memory."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from baselines.hf_generate import HFGenerate
from clasp_core.checkpoint import LoadedModel
from clasp_core.decoding import Generation
from clasp_core.device import DeviceClock
from clasp_core.drafting import NoDraft
from clasp_core.entry.keys import register
from clasp_core.plan import Method, Plan
from clasp_core.progress import Bar
from clasp_core.prompting import Prompter
from clasp_core.records import Question, TurnRecord
from clasp_core.runner import Runner
from clasp_core.target import Engine
from clasp_core.tasks import JsonlTask

ROOT = Path(__file__).resolve().parents[2]
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"


@dataclass(frozen=True)
class Point:
    """One point: whether it holds, and the figure that says so."""

    holds: bool
    figure: str


@dataclass
class Rows:
    """A store that keeps rows in memory."""

    run_id: str = "acceptance"
    rows: list[TurnRecord] = field(default_factory=list)

    def append(self, rows: Sequence[TurnRecord]) -> None:
        """Keep them."""
        self.rows += rows


def load(name: str, engine: Engine = "compiled", **changes: str) -> LoadedModel:
    """The model of `conf/model/<name>.yaml`, with some of its keys changed."""
    register()
    with initialize_config_dir(str(ROOT / "conf" / "model"), version_base="1.3"):
        node = compose(name, overrides=[f"{key}={value}" for key, value in changes.items()])
    model: LoadedModel = instantiate(node, _convert_="all").load(engine)
    return model


def spec_bench(limit: int) -> list[Question]:
    """The first questions of each Spec-Bench subtask, from `data/spec_bench` or the copy beside the repository."""
    places = (ROOT / "data/spec_bench/question.jsonl", ROOT.parent / "shared/spec_bench/question.jsonl")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        sys.exit(f"error: {places[0]} is not there; fetch it with `python -m clasp_core.fetch spec_bench`")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return JsonlTask("spec_bench", str(path)).questions(limit)


def sample(limit: int | None = None) -> list[Question]:
    """Our own questions."""
    return JsonlTask("sample", str(ROOT / "data/sample/questions.jsonl")).questions(limit)


def measure(
    model: LoadedModel, methods: Mapping[str, Method], questions: Sequence[Question], budget: int
) -> list[TurnRecord]:
    """Greedy rows of all methods, the first of which is the reference; a progress bar where there is a terminal."""
    plan = Plan(
        model=model.name,
        methods=methods,
        reference=next(iter(methods)),
        questions=questions,
        generation=Generation(budget, frozenset(model.stop_ids)),
        max_positions=model.max_positions,
    )
    clock = DeviceClock(model.target.devices, model.target.device)
    runner = Runner(model.target, Prompter(model.tokenizer, model.prompt), plan, clock)
    store = Rows()
    runner.check()
    runner.warm_up()
    with Bar(sum(len(stream) for stream in plan.slots()), 0, plan.reference) as bar:
        runner.run(store, bar)
    return store.rows


def over_generate(cache: Literal["dynamic", "static"] = "dynamic") -> list[float]:
    """Tokens/s of AR over those of Hugging Face's `generate`, turn by turn, on `smollm2-135m` and our questions."""
    rows = measure(load("smollm2-135m"), {"ar": NoDraft(), "hf_generate": HFGenerate(cache)}, sample(2), 64)
    hf = {row.pair: row for row in rows if row.method == "hf_generate"}
    return [
        (hf[row.pair].total_s or 0) / hf[row.pair].num_new_tokens * row.num_new_tokens / row.total_s
        for row in rows
        if row.method == "ar" and row.total_s and row.num_new_tokens and hf[row.pair].num_new_tokens
    ]
