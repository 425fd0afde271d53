"""The target model: Hugging Face's modules, called sub-layer by sub-layer over a cache of our own.

Batch is one, so tensors have no batch axis: `T` rows, `d` width, `V` vocabulary, `L` layers, `Hq` and `H`
query and key-value heads of width `D`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clasp_core.attention import PrefixCache, Span, attend
from clasp_core.errors import UserError
from clasp_core.families import Wiring
from clasp_core.kv_cache import KVCache
from clasp_core.sampling import check_finite
from clasp_core.skip import LayerSkip


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

    def __init__(self, model: Any, wiring: Wiring):
        self.model = model
        self.wiring = wiring
        self.config = model.config
        self._embedding: nn.Module = model.model.embed_tokens
        self._blocks: Sequence[Any] = list(model.model.layers)
        self._norm: nn.Module = model.model.norm
        self._lm_head: nn.Module = model.lm_head
        self._rotary: Any = model.model.rotary_emb
        self._angles: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.layer_devices = tuple(_device_of(block) for block in self._blocks)

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
        return _device_of(self._lm_head)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of the model, in order of first use."""
        return tuple(dict.fromkeys((_device_of(self._embedding), *self.layer_devices, self.device)))

    @property
    def head_width(self) -> int:
        """D."""
        return int(self._blocks[0].self_attn.head_dim)

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
            "attn": [_bytes(b.self_attn) + _bytes(b.input_layernorm) for b in self._blocks],
            "mlp": [_mlp_bytes(b.mlp, self.config) + _bytes(b.post_attention_layernorm) for b in self._blocks],
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

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `T` -> states `T d`."""
        return self._embedding(tokens.to(_device_of(self._embedding)))  # type: ignore[no-any-return]

    def layer(
        self,
        index: int,
        hidden: Tensor,
        span: Span,
        cache: PrefixCache,
        *,
        skip_attn: bool = False,
        skip_mlp: bool = False,
    ) -> Tensor:
        """States `T d` after layer `index`, on that layer's device. A skipped sub-layer writes nothing."""
        block = self._blocks[index]
        hidden = hidden.to(self.layer_devices[index])
        if not skip_attn:
            hidden = hidden + self._attention(index, block.input_layernorm(hidden), span, cache)
        if not skip_mlp:
            hidden = hidden + _mlp(block.mlp, block.post_attention_layernorm(hidden))
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """States `T d` -> logits `T V`; the final norm is inside."""
        normed = self._norm(hidden.to(_device_of(self._norm)))
        return self._lm_head(normed.to(self.device))  # type: ignore[no-any-return]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The final norm alone, `T d` -> `T d` (for the post-norm variant of CLaSp's last comparison)."""
        return self._norm(hidden.to(_device_of(self._norm)))  # type: ignore[no-any-return]

    def _attention(self, index: int, normed: Tensor, span: Span, cache: PrefixCache) -> Tensor:
        attn = self._blocks[index].self_attn
        queries, keys, values = self._project(attn, normed)
        if getattr(attn, "use_rope", True):
            cos, sin = self._rope_rows(span, normed.device)
            queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
        out = attend(queries, keys, values, span, cache, layer=index, scale=attn.scaling)
        return attn.o_proj(out.reshape(span.length, -1))  # type: ignore[no-any-return]

    def _project(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `T Hq D`, keys and values `T H D`, normalised and clipped as the family does."""
        queries, keys, values = attn.q_proj(normed), attn.k_proj(normed), attn.v_proj(normed)
        if self.wiring.qk_norm == "projection":
            queries, keys = attn.q_norm(queries), attn.k_norm(keys)
        if self.wiring.clip_qkv is not None:
            bound = self.wiring.clip_qkv
            queries, keys, values = (x.clamp(-bound, bound) for x in (queries, keys, values))
        queries, keys, values = (x.view(x.shape[0], -1, attn.head_dim) for x in (queries, keys, values))
        if self.wiring.qk_norm == "head":
            queries, keys = attn.q_norm(queries), attn.k_norm(keys)
        return queries, keys, values

    def _rope_rows(self, span: Span, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `T 1 D` (or `1 1 D` where all rows share a position)."""
        cos, sin = self._rope_table(span.last_position + 1, device)
        if span.depths is None:
            return cos[span.start : span.stop], sin[span.start : span.stop]
        if not span.write:
            return cos[span.start : span.start + 1], sin[span.start : span.start + 1]
        positions = span.positions(device)
        return cos[positions], sin[positions]

    def _rope_table(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Angles for positions `0 .. size - 1`, kept per device and doubled when they run out."""
        known = self._angles.get(device)
        if known is None or known[0].shape[0] < size:
            room = 1 << max(size - 1, 255).bit_length()
            positions = torch.arange(room, device=_device_of(self._rotary))[None]
            like = torch.empty(0, dtype=self.dtype, device=positions.device)
            cos, sin = (x[0, :, None].to(device) for x in self._rotary(like, positions))
            half = sin.shape[-1] // 2
            known = cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            self._angles[device] = known
        return known

    def check_against_hf(self, tolerance: float | None = None) -> float:
        """Relative distance of our logits from Hugging Face's on a short forward; too large is a `UserError`.

        The tokens are spread over the vocabulary. 16-bit kernels differ by rounding alone, so their tolerance
        is wider; a wrong wiring is off by order one.
        """
        tokens = torch.arange(1, 12, device=self.devices[0]) * 7919 % self.vocab_size
        with torch.inference_mode():
            theirs = self.model(tokens[None], use_cache=False).logits[0]
            cache = self.new_cache(len(tokens))
            check_finite(theirs, "target")
            theirs = theirs.float()
            ours = forward(self, tokens, Span.causal(0, len(tokens)), cache).logits.float()
        distance = float((ours - theirs).norm() / theirs.norm())
        bound = tolerance if tolerance is not None else _tolerance(self.dtype)
        if not distance <= bound:
            raise UserError(
                f"the wiring of {self.wiring.model_type!r} does not reproduce Hugging Face's logits: relative "
                f"distance {distance:.2g}, allowed {bound:.2g}; this checkpoint cannot be measured"
            )
        return distance


def forward(
    target: TargetModel,
    tokens: Tensor,
    span: Span,
    cache: PrefixCache,
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
    states = [hidden[rows]] if keep_hidden else []
    for index in range(target.num_layers):
        skip_attn, skip_mlp = (skip.attn[index], skip.mlp[index]) if skip is not None else (False, False)
        if not (skip_attn and skip_mlp):
            hidden = target.layer(index, hidden, span, cache, skip_attn=skip_attn, skip_mlp=skip_mlp)
        if keep_hidden:
            states.append(hidden[rows])
    return Forward(target.head(hidden[rows]), tuple(states) if keep_hidden else None)


def _with_head_start(
    target: TargetModel, tokens: Tensor, span: Span, cache: PrefixCache, head_start: HeadStart
) -> Tensor:
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


def _mlp(module: Any, normed: Tensor) -> Tensor:
    """A dense MLP or a mixture of experts; the latter wants a batch axis and may add router logits."""
    out = module(normed[None])
    return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]


def _rotate(states: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding of `T heads D`: the halves swap places, the first one's sine is negative."""
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * signed_sin


def _device_of(module: Any) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return torch.device(tensor.device)
    raise ValueError(f"{type(module).__name__} holds no tensor")


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
