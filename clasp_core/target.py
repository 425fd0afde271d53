"""The target model: Hugging Face's modules, called sub-layer by sub-layer over a cache of our own.

Batch is one, so tensors have no batch axis: `T` rows, `d` width, `V` vocabulary, `L` layers, `Hq` and `H`
query and key-value heads of width `D`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from clasp_core import fused
from clasp_core.attention import Span
from clasp_core.blocks import Layer, Rotary, device_of, eager_block
from clasp_core.errors import UserError
from clasp_core.families import Wiring
from clasp_core.graphs import PREPARED_ROWS, GraphedBlock, Graphs, Recorder, recorder_for
from clasp_core.kv_cache import KVCache
from clasp_core.sampling import check_finite
from clasp_core.skip import LayerSkip

Engine = Literal["eager", "compiled"]
"""Hugging Face's modules one by one, or fused and (on a CPU) by compiled kernels: the same up to rounding, faster."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Logits `R V` of the requested rows and, if asked for, their states after every layer.

    `hidden` has L + 1 tensors `R d`: the embedding, then the output of each layer. The last one is BEFORE
    the final norm (what Hugging Face returns as its last hidden state is after it).
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class HeadStart:
    """Work that a draft did for the verification pass: states `K d` of the first K rows after `num_layers` layers,
    whose keys and values are in the cache and are the full model's."""

    num_layers: int
    hidden: Tensor


class TargetModel:
    """A causal language model that can be run whole, in part, or one layer at a time."""

    def __init__(self, model: Any, wiring: Wiring, engine: Engine = "eager", recorder: Recorder | None = None):
        """`recorder` records the compiled engine's sub-layers; on NVIDIA GPUs, CUDA graphs do where none is given."""
        if engine not in get_args(Engine):
            raise UserError(f"engine is {engine!r}; it must be one of {', '.join(get_args(Engine))}")
        self.model = model
        self.wiring = wiring
        self.config = model.config
        self.engine = engine
        self._embedding: nn.Module = model.model.embed_tokens
        self._layers: Sequence[Any] = list(model.model.layers)
        self._norm: nn.Module = model.model.norm
        self._lm_head: nn.Module = model.lm_head
        self.layer_devices = tuple(device_of(layer) for layer in self._layers)
        self.rotary = Rotary(model.model.rotary_emb, self.dtype)
        self._graphs = self._new_graphs(recorder) if engine == "compiled" else None
        fuser = fused.Fuser(model, self._graphs) if engine == "compiled" else None
        build = fuser.block if fuser is not None else eager_block
        self._blocks = [build(index, layer, wiring, self.rotary) for index, layer in enumerate(self._layers)]
        self._to_logits = fuser.product_of(self._lm_head) if fuser is not None else self._lm_head
        if not any(isinstance(block, GraphedBlock) for block in self._blocks):
            self._graphs = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self._blocks)

    @property
    def vocab_size(self) -> int:
        """V, as the head emits it."""
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, read back from the final norm's weight."""
        return next(self._norm.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where logits appear, and where tokens are drawn."""
        return device_of(self._lm_head)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of the model, in order of first use."""
        return tuple(dict.fromkeys((device_of(self._embedding), *self.layer_devices, self.device)))

    @property
    def head_width(self) -> int:
        """D."""
        return int(self._layers[0].self_attn.head_dim)

    @property
    def num_kv_heads(self) -> int:
        """H."""
        return int(self.config.num_key_value_heads)

    def read_bytes(self) -> dict[str, Any]:
        """Weight bytes that one token's pass reads: `attn` and `mlp` per layer, and `head` (final norm inside).

        Of a mixture of experts only the share of experts that a token is routed to counts. The embedding
        row and the cache are left out, as in the published byte ratios.
        """
        return {
            "attn": [_bytes(b.self_attn) + _bytes(b.input_layernorm) for b in self._layers],
            "mlp": [_mlp_bytes(b.mlp, self.config) + _bytes(b.post_attention_layernorm) for b in self._layers],
            "head": _bytes(self._norm) + _bytes(self._lm_head),
        }

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` tokens, each layer's share on that layer's device."""
        return KVCache.allocate(
            self.layer_devices,
            num_heads=self.num_kv_heads,
            width=self.head_width,
            capacity=capacity,
            dtype=self.dtype,
        )

    def turn_cache(self, capacity: int) -> KVCache:
        """An empty cache for a turn of up to `capacity` tokens. Those given before may not be used any more."""
        return self._graphs.cache(capacity) if self._graphs is not None else self.new_cache(capacity)

    @property
    def records(self) -> bool:
        """Whether sub-layers are recorded and replayed (CUDA graphs)."""
        return self._graphs is not None

    @contextmanager
    def call_by_call(self) -> Iterator[None]:
        """Every sub-layer call by call for a while: what recordings are compared with."""
        recorded, self._blocks = self._blocks, self._plain_blocks()
        try:
            yield
        finally:
            self._blocks = recorded

    def forgo_recordings(self) -> None:
        """Run every sub-layer call by call from now on."""
        self._graphs = None
        self._blocks = self._plain_blocks()

    def _plain_blocks(self) -> list[Layer]:
        """What is recorded, and the other layers as they are."""
        return [block.block if isinstance(block, GraphedBlock) else block for block in self._blocks]

    @contextmanager
    def without_recording(self) -> Iterator[None]:
        """Replay what is recorded, and record no more: as long as a clock runs."""
        if self._graphs is None:
            yield
            return
        self._graphs.is_open = False
        try:
            yield
        finally:
            self._graphs.is_open = True

    @torch.inference_mode()
    def prepare(self, capacity: int) -> None:
        """Record what passes of few rows over turns of up to `capacity` tokens replay, before a clock runs."""
        if self._graphs is None:
            return
        self._graphs.resize(max(capacity, PREPARED_ROWS))
        cache = self.turn_cache(max(capacity, PREPARED_ROWS))
        tokens = torch.zeros(PREPARED_ROWS, dtype=torch.int64, device=self.devices[0])
        for rows in range(1, PREPARED_ROWS + 1):
            forward(self, tokens[:rows], Span.causal(0, rows), cache)

    def _new_graphs(self, recorder: Recorder | None) -> Graphs | None:
        record = recorder or recorder_for(self.layer_devices)
        if record is None:
            return None
        num_groups = int(self.config.num_attention_heads) // self.num_kv_heads
        return Graphs(record, self.new_cache, self.rotary, num_groups, self.head_width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `T` -> states `T d`."""
        return self._embedding(tokens.to(device_of(self._embedding)))  # type: ignore[no-any-return]

    def layer(
        self,
        index: int,
        hidden: Tensor,
        span: Span,
        cache: KVCache,
        *,
        skip_attn: bool = False,
        skip_mlp: bool = False,
    ) -> Tensor:
        """States `T d` after layer `index`, on that layer's device. A skipped sub-layer writes nothing."""
        hidden = hidden.to(self.layer_devices[index])
        return self._blocks[index].run(hidden, span, cache, skip_attn=skip_attn, skip_mlp=skip_mlp)

    def head(self, hidden: Tensor) -> Tensor:
        """States `T d` -> logits `T V`; the final norm is inside."""
        normed = self._norm(hidden.to(device_of(self._norm)))
        return self._to_logits(normed.to(self.device))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The final norm alone, `T d` -> `T d` (for the post-norm variant of CLaSp's last comparison)."""
        return self._norm(hidden.to(device_of(self._norm)))  # type: ignore[no-any-return]

    def check_against_hf(self, tolerance: float | None = None) -> float:
        """Relative distance of our logits from Hugging Face's on a short forward; too large is a `UserError`.

        The tokens are spread over the vocabulary. 16-bit kernels differ by rounding alone, so their tolerance
        is wider; a wrong wiring is off by order one.
        """
        tokens = torch.arange(1, 12, device=self.devices[0]) * 7919 % self.vocab_size
        with torch.inference_mode():
            theirs = self.model(tokens[None], use_cache=False).logits[0]
            check_finite(theirs, "target")
            distance = max(self._distance(theirs.float(), tokens, widths) for widths in ((11,), (1, 2, 3, 5)))
        bound = tolerance if tolerance is not None else _tolerance(self.dtype)
        if not distance <= bound:
            raise UserError(
                f"the wiring of {self.wiring.model_type!r} does not reproduce Hugging Face's logits: relative "
                f"distance {distance:.2g}, allowed {bound:.2g}; this checkpoint cannot be measured"
            )
        return distance

    def _distance(self, theirs: Tensor, tokens: Tensor, widths: Sequence[int]) -> float:
        """Relative distance from Hugging Face's logits `T V` of ours, computed in passes of these widths."""
        cache = self.turn_cache(len(tokens))
        starts = [sum(widths[:index]) for index in range(len(widths))]
        ours = torch.cat([
            forward(self, tokens[start : start + width], Span.causal(start, width), cache).logits.float()
            for start, width in zip(starts, widths, strict=True)
        ])  # fmt: skip
        return float((ours - theirs).norm() / theirs.norm())


def forward(
    target: TargetModel,
    tokens: Tensor,
    span: Span,
    cache: KVCache,
    *,
    skip: LayerSkip | None = None,
    rows: slice = slice(None),
    keep_hidden: bool = False,
    head_start: HeadStart | None = None,
) -> Forward:
    """One pass over tokens `T`; logits (and states, if kept) of the rows asked for.

    A head start leaves out its layers for the rows that it covers; states are not kept then, since they are
    not all there.
    """
    if head_start is not None:
        return Forward(target.head(_with_head_start(target, tokens, span, cache, head_start)[rows]), None)
    hidden = target.embed(tokens)
    states = [hidden[rows].clone()] if keep_hidden else []
    for index in range(target.num_layers):
        skip_attn, skip_mlp = (skip.attn[index], skip.mlp[index]) if skip is not None else (False, False)
        if not (skip_attn and skip_mlp):
            hidden = target.layer(index, hidden, span, cache, skip_attn=skip_attn, skip_mlp=skip_mlp)
        if keep_hidden:
            states.append(hidden[rows].clone())  # not a view: a prompt's other rows would stay in memory
    return Forward(target.head(hidden[rows]), tuple(states) if keep_hidden else None)


def _with_head_start(target: TargetModel, tokens: Tensor, span: Span, cache: KVCache, head_start: HeadStart) -> Tensor:
    """States `T d` after the last layer; only the uncovered last rows pass the first layers."""
    num_known = len(head_start.hidden)
    hidden = target.embed(tokens[num_known:])
    late = Span.causal(span.start + num_known, len(tokens) - num_known)
    for index in range(head_start.num_layers):
        hidden = target.layer(index, hidden, late, cache)
    hidden = torch.cat((head_start.hidden, hidden.to(head_start.hidden.device)))
    for index in range(head_start.num_layers, target.num_layers):
        hidden = target.layer(index, hidden, span, cache)
    return hidden


def _bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _mlp_bytes(mlp: Any, config: Any) -> int:
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return _bytes(mlp)
    num_experts = getattr(config, "num_local_experts", None) or config.num_experts
    return _bytes(mlp) - _bytes(experts) + _bytes(experts) * int(config.num_experts_per_tok) // int(num_experts)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
