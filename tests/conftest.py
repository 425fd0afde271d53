"""Small seeded models, a clock that only moves when told, and short cuts that several test files share."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from clasp_core.attention import Span
from clasp_core.decoding import Answer, Drafter, Generation, Turn, Verified, decode
from clasp_core.families import wiring_of
from clasp_core.graphs import Recorder
from clasp_core.kv_cache import KVCache
from clasp_core.sampling import Randomness, Sampling
from clasp_core.skip import LayerSkip
from clasp_core.store import read_run
from clasp_core.target import Engine, TargetModel, forward
from clasp_core.verify import Draft
from tests import committed

ROOT = Path(__file__).resolve().parents[1]


def committed_run() -> Path:
    """The folder of the committed run of `make demo`: AR and CLaSp on our own questions; none of the user's own."""
    folders = committed.runs("smollm2-135m-deep")
    manifests = {folder: read_run(folder)[0] for folder in folders}
    return [
        folder
        for folder, manifest in manifests.items()
        if manifest.methods == ["ar", "clasp"] and manifest.config.get("experiment") is None
    ][-1]


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and the runs that they stop with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- models


def random_model(
    config: Any, *, seed: int = 0, sharpness: float = 2.5, depth_gain: float = 0.2, dtype: torch.dtype = torch.float32
) -> Any:
    """Hugging Face's class for a configuration, every weight seeded and of a size that matters.

    Norm weights and biases are away from one and zero, so that leaving one out shows. A token seldom follows
    itself, so that greedy texts do not end in one token.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rng = torch.Generator().manual_seed(seed)
    gains = {"q_proj": 2.0, "k_proj": 1.5, "o_proj": depth_gain, "down_proj": 2 * depth_gain}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=rng)
            if "norm" in name:
                weight.copy_(1 + 0.1 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                weight.copy_(noise)
            else:
                part = name.removesuffix(".weight").split(".")[-1]
                weight.copy_(noise * gains.get(part, sharpness if part == "lm_head" else 1.0) / weight.shape[-1] ** 0.5)
        head, table = model.lm_head.weight, model.model.embed_tokens.weight
        if head is not table:
            own = (head * table).sum(1, keepdim=True) / table.square().sum(1, keepdim=True)
            head -= (own + sharpness / head.shape[1]) * table
    if dtype == torch.float64 and hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    return model.eval().to(dtype).requires_grad_(False)


def llama_config(*, layers: int = 8, width: int = 32, vocab: int = 64, heads: int = 4, **more: Any) -> LlamaConfig:
    """A small Llama with grouped heads (two query heads for one key-value head)."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    return LlamaConfig(**{**sizes, **heads_of, **ends, "max_position_embeddings": 2048, **more})


def make_target(
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    sharpness: float = 2.5,
    depth_gain: float = 0.2,
    engine: Engine = "eager",
    recorder: Recorder | None = None,
    **sizes: Any,
) -> TargetModel:
    """A wired small Llama."""
    config = llama_config(**sizes)
    model = random_model(config, seed=seed, sharpness=sharpness, depth_gain=depth_gain, dtype=dtype)
    return TargetModel(model, wiring_of(config), engine, recorder)


@pytest.fixture(scope="session")
def tiny_target() -> TargetModel:
    """8 layers, width 32, 64 tokens, 4 query and 2 key-value heads, float32."""
    return make_target()


@pytest.fixture(scope="session")
def tiny_target64() -> TargetModel:
    """The same weights in float64, where rounding cannot turn an argmax."""
    return make_target(torch.float64)


def ids(num: int, *, seed: int = 0, vocab: int = 64) -> list[int]:
    """A random prompt."""
    return torch.randint(vocab, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefilled(target: TargetModel, tokens: Sequence[int], capacity: int | None = None) -> KVCache:
    """A cache that a fresh full forward over the tokens has filled."""
    cache = target.new_cache(capacity or len(tokens))
    forward(target, torch.tensor(list(tokens)), Span.causal(0, len(tokens)), cache)
    return cache


def hf_greedy(target: TargetModel, prompt: Sequence[int], budget: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """Hugging Face's own greedy answer, without the prompt."""
    ends = {"eos_token_id": list(stop_ids) or None, "pad_token_id": 0}
    with torch.inference_mode():
        rows = target.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=budget,
            **ends,
        )
    return rows[0, len(prompt) :].tolist()


# ---- time


@dataclass(frozen=True)
class Moment:
    """A reading of the fake clock."""

    at: float

    def seconds_until(self, later: Moment) -> float:
        return later.at - self.at


class FakeClock:
    """Time passes only when somebody says how much."""

    def __init__(self) -> None:
        self.time = 0.0
        self.num_readings = 0

    def now(self) -> float:
        self.num_readings += 1
        return self.time

    def mark(self) -> Moment:
        return Moment(self.time)

    def pass_(self, seconds: float) -> None:
        self.time += seconds


# ---- decoding


def answer(
    target: TargetModel,
    drafter: Drafter,
    prompt: Sequence[int],
    budget: int = 48,
    *,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    seed: object = 0,
    fresh: bool = True,
) -> Answer:
    """One turn; a fresh stream unless told otherwise."""
    if fresh:
        drafter.start_stream(target)
    generation = Generation(budget, frozenset(stop_ids), sampling or Sampling())
    return decode(target, drafter, prompt, generation, Randomness.seeded(seed), FakeClock())


class FixedPolicy:
    """A skip set that never changes."""

    def __init__(self, skip: LayerSkip | None = None, **which: Sequence[int]):
        self._skip = skip
        self._which = which

    def needs_hidden(self, *, prefill: bool) -> bool:
        return False

    def start_stream(self, target: TargetModel) -> None:
        if self._which:
            self._skip = LayerSkip.sublayers(target.num_layers, **self._which)
        elif self._skip is None:
            self._skip = LayerSkip.none(target.num_layers)

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        return 0

    def current(self) -> LayerSkip:
        assert self._skip is not None
        return self._skip

    def observe(self, verified: Verified) -> int:
        return 0


class Around:
    """A drafter that hands everything on to another one; tests override what they watch."""

    def __init__(self, inner: Drafter):
        self.inner = inner

    def extra_slots(self, budget: int) -> int:
        return self.inner.extra_slots(budget)

    def needs_hidden(self, *, prefill: bool) -> bool:
        return self.inner.needs_hidden(prefill=prefill)

    def start_stream(self, target: TargetModel) -> None:
        self.inner.start_stream(target)

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        return self.inner.start(turn, prompt, prefill)

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        return self.inner.propose(last_token, position, limit)

    def observe(self, verified: Verified) -> int:
        return self.inner.observe(verified)


# ---- numbers


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference."""
    return float((ours - theirs).abs().max())


def chi_square_p(counts: Tensor, expected_probs: Tensor, at_least: float = 5.0) -> float:
    """The p-value of observed counts under a law, bins merged until each expects at least so many draws.

    A draw that the law calls impossible gives zero.
    """
    from scipy.stats import chi2

    counts, probs = counts.double().flatten(), expected_probs.double().flatten()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = probs * counts.sum()
    order = expected.argsort()
    bins: list[tuple[float, float]] = []
    seen, due = 0.0, 0.0
    for index in order.tolist():
        seen, due = seen + float(counts[index]), due + float(expected[index])
        if due >= at_least:
            bins.append((seen, due))
            seen, due = 0.0, 0.0
    if bins and due:
        bins[-1] = (bins[-1][0] + seen, bins[-1][1] + due)
    assert len(bins) > 1, "too few draws for a test"
    statistic = sum((got - want) ** 2 / want for got, want in bins)
    return float(chi2.sf(statistic, len(bins) - 1))


@contextlib.contextmanager
def watched(where: Any, name: str, before: Callable[..., None]) -> Iterator[None]:
    """Call `before` with the arguments of every call of an attribute, for the length of a block."""
    real = getattr(where, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(where, name, call)
    try:
        yield
    finally:
        setattr(where, name, real)
