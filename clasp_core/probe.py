"""What single passes cost on this machine, each beside an autoregressive step and the bytes that it must read.

Cases are timed in turns, so that a slow spell of the machine meets all of them; what counts are ratios within one
turn, and of those the median.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from clasp_core import native
from clasp_core.attention import Span
from clasp_core.clasp import select_layers
from clasp_core.device import Clock, free_memory
from clasp_core.kv_cache import KVCache
from clasp_core.metrics.losses import token_bytes
from clasp_core.sampling import greedy_tokens
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from clasp_core.timings import READ, STEP, Timing

BUFFER_BYTES = 512 * 2**20
"""Far more than a processor's cache that one guest of a shared machine can hold on to."""

READ_WIDTH = 512
"""Numbers in a row of it."""

CACHED_BYTES = 64 * 2**20
"""A model of fewer bytes may stay in the processor's cache, and what memory gives says nothing about it."""

NUM_READS = 5
"""Readings of the buffer whose median is a run's bandwidth; about half a second on two cores."""

Case = tuple[Callable[[], object], int | None]


@torch.inference_mode()
def time_cases(
    cases: Mapping[str, Case], clock: Clock, *, context: int, num_turns: int, num_warm_up: int = 2
) -> dict[str, Timing]:
    """Every case once in each turn, in rotating order; warm-up turns are left out."""
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_warm_up + num_turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = clock.now()
            cases[name][0]()
            ended = clock.now()
            if turn >= num_warm_up:
                seconds[name].append(ended - started)
    return {name: Timing(name, context, tuple(seconds[name]), cases[name][1]) for name in names}


def reading(target: TargetModel) -> dict[str, Case]:
    """Reading a buffer once where the logits appear: what memory gives to the fastest reader known here.

    On a CPU that is a product of the compiled kernels, which read in many places at once. There torch's product of a
    matrix and a vector comes close where rows are long, and a plain sum is a fifth slower: a step could seem faster
    than memory.
    """
    buffer = torch.ones(BUFFER_BYTES // 4 // READ_WIDTH, READ_WIDTH, device=target.device)
    if target.engine == "eager" or target.device.type != "cpu":
        return {READ: (buffer.sum, BUFFER_BYTES)}
    kernels = native.Kernels(native.build(), buffer.dtype)
    return {READ: (lambda: kernels.linear(buffer[:1], buffer, None), BUFFER_BYTES)}


def bandwidth_bytes_per_s(target: TargetModel, clock: Clock) -> float | None:
    """Bytes per second that the memory of the target's device gives now; a run's regime is named by it.

    Unknown for a model that fits into a processor's cache, and where there is no room for the buffer. Draws nothing.
    """
    if token_bytes(target.read_bytes()) < CACHED_BYTES:
        return None
    try:
        read = time_cases(reading(target), clock, context=0, num_turns=NUM_READS)[READ]
    except RuntimeError:  # torch's errors of a full memory, on a CPU too; a probe must not cost the run
        return None
    finally:
        free_memory()
    return BUFFER_BYTES / median(read.seconds)


@dataclass(frozen=True, slots=True)
class Scene:
    """A prefilled target: the prompt's ids `T`, room behind them, and the last token's states."""

    target: TargetModel
    cache: KVCache
    tokens: Tensor
    states: list[Tensor]

    @classmethod
    @torch.inference_mode()
    def after(cls, target: TargetModel, prompt: Sequence[int], room: int) -> Scene:
        """The full model over a prompt, with room for `room` more rows. The target's next scene ends this one."""
        tokens = torch.tensor(prompt, device=target.devices[0])
        cache = target.turn_cache(len(prompt) + room)
        span = Span.causal(0, len(prompt))
        out = forward(target, tokens, span, cache, rows=slice(-1, None), keep_hidden=True)
        assert out.hidden is not None
        return cls(target, cache, tokens, list(out.hidden))

    @property
    def context(self) -> int:
        """Tokens that a pass sees before its own."""
        return len(self.tokens)

    def verification(self, width: int) -> Case:
        """A pass over `width` rows behind the prompt, and the most probable token of each."""
        tokens, span = self.tokens[:1].repeat(width), Span.causal(self.context, width)
        return (
            lambda: greedy_tokens(forward(self.target, tokens, span, self.cache).logits),
            pass_bytes(self.target, self.cache, self.context, None),
        )

    def draft_step(self, skip: LayerSkip) -> Case:
        """One row with sub-layers left out, and its most probable token."""
        span = Span.causal(self.context, 1)
        return (
            lambda: greedy_tokens(forward(self.target, self.tokens[:1], span, self.cache, skip=skip).logits),
            pass_bytes(self.target, self.cache, self.context, skip),
        )

    def programme(self, num_skipped: int) -> Case:
        """CLaSp's dynamic programme on the prompt's last token."""
        return (lambda: select_layers(self.target, self.cache, self.states, self.context - 1, num_skipped)), None

    def prefill(self) -> Case:
        """The prompt once more, as a prefill."""
        span = Span.causal(0, self.context)
        return (lambda: forward(self.target, self.tokens, span, self.cache, rows=slice(-1, None)).logits), None


def pass_bytes(target: TargetModel, cache: KVCache, context: int, skip: LayerSkip | None) -> int:
    """Weights that one pass reads, and the keys and values before it, of the sub-layers that are not skipped."""
    read = target.read_bytes()
    kept = skip or LayerSkip.none(target.num_layers)
    per_layer = cache.num_bytes // cache.num_layers * context // cache.capacity
    attn = sum(size + per_layer for size, left_out in zip(read["attn"], kept.attn, strict=True) if not left_out)
    mlp = sum(size for size, left_out in zip(read["mlp"], kept.mlp, strict=True) if not left_out)
    return int(read["head"] + attn + mlp)


def every_other(num_layers: int, num_skipped: int) -> LayerSkip:
    """`num_skipped` layers spread evenly, the first and the last kept."""
    places = [round((index + 1) * num_layers / (num_skipped + 1)) for index in range(num_skipped)]
    return LayerSkip.layers(num_layers, sorted({min(max(place, 1), num_layers - 2) for place in places}))


def cases_of(scene: Scene, widths: Sequence[int], skip_shares: Sequence[float]) -> dict[str, Case]:
    """Cases by name: `width-5`, `draft-50`, `dp-30`, `prefill`, beside a step and plain reading."""
    num_layers = scene.target.num_layers
    cases = {STEP: scene.verification(1)} | reading(scene.target)
    cases |= {f"width-{width}": scene.verification(width) for width in widths}
    cases |= {
        f"draft-{round(100 * share)}": scene.draft_step(every_other(num_layers, round(share * num_layers)))
        for share in skip_shares
    }
    cases |= {f"dp-{num}": scene.programme(num) for num in (num_layers // 4, num_layers // 2)}
    return cases | {"prefill": scene.prefill()}
