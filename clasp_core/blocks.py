"""One decoder layer as two residual sub-layers over our cache, wired from Hugging Face's own modules.

Shapes: `T` rows, `d` width, `Hq` and `H` query and key-value heads of width `D`. What an engine may do its own way
(projections, norms, the MLP) are callables of a `Block`; the wiring is the same for all engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from clasp_core.attention import Span, attend
from clasp_core.families import Wiring
from clasp_core.kv_cache import KVCache

Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines of some rows, `T 1 D`, or `1 1 D` where all rows share a position."""


class Rotary:
    """Rotary angles by position, kept per device and doubled when they run out."""

    def __init__(self, module: Any, dtype: torch.dtype):
        self._module = module
        self._dtype = dtype
        self._tables: dict[torch.device, Angles] = {}

    def of(self, span: Span, device: torch.device) -> Angles:
        """The angles of a span's rows."""
        cos, sin = self.table(span.last_position + 1, device)
        if span.depths is None:
            return cos[span.start : span.stop], sin[span.start : span.stop]
        if span.alone:
            return cos[span.start : span.start + 1], sin[span.start : span.start + 1]
        positions = span.positions(device)
        return cos[positions], sin[positions]

    def table(self, size: int, device: torch.device) -> Angles:
        """Angles for positions `0 .. size - 1` at least."""
        known = self._tables.get(device)
        if known is None or known[0].shape[0] < size:
            room = 1 << max(size - 1, 255).bit_length()
            positions = torch.arange(room, device=device_of(self._module))[None]
            like = torch.empty(0, dtype=self._dtype, device=positions.device)
            cos, sin = (x[0, :, None].to(device) for x in self._module(like, positions))
            half = sin.shape[-1] // 2
            known = cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
            self._tables[device] = known
        return known


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """Rotary embedding of `T heads D`: the halves swap places, the first one's sine is negative."""
    cos, signed_sin = angles
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * signed_sin


class Projection(Protocol):
    """Normalised states to attention's inputs."""

    def __call__(self, normed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `T Hq D`, keys and values `T H D`; queries and keys rotated where there are angles."""


class Layer(Protocol):
    """One layer, or one of its two residual sub-layers, as an engine computes it."""

    def run(
        self, hidden: Tensor, span: Span, cache: KVCache, *, skip_attn: bool = False, skip_mlp: bool = False
    ) -> Tensor:
        """States `T d` with the updates of the sub-layers that are not skipped added."""


class InSteps(Layer, Protocol):
    """A layer that computes one sub-layer after the other."""

    def attention(self, hidden: Tensor, span: Span, cache: KVCache) -> Tensor:
        """States `T d` with the attention's update added; a writing span leaves its keys and values in the cache."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """States `T d` with the MLP's update added."""

    def run(
        self, hidden: Tensor, span: Span, cache: KVCache, *, skip_attn: bool = False, skip_mlp: bool = False
    ) -> Tensor:
        """See `Layer`."""
        if not skip_attn:
            hidden = self.attention(hidden, span, cache)
        return hidden if skip_mlp else self.feed_forward(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Block(InSteps):
    """A layer call by call. `rotary` is None where its queries and keys carry no position."""

    index: int
    attn_norm: Callable[[Tensor], Tensor]
    project: Projection
    out_proj: Callable[[Tensor], Tensor]
    mlp_norm: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor], Tensor]
    scale: float
    rotary: Rotary | None

    def attention(self, hidden: Tensor, span: Span, cache: KVCache) -> Tensor:
        """See `InSteps`."""
        angles = self.rotary.of(span, hidden.device) if self.rotary is not None else None
        queries, keys, values = self.project(self.attn_norm(hidden), angles)
        out = attend(queries, keys, values, span, cache, layer=self.index, scale=self.scale)
        return hidden + self.out_proj(out.reshape(span.length, -1))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """See `InSteps`."""
        return hidden + self.mlp(self.mlp_norm(hidden))


def eager_block(index: int, layer: Any, wiring: Wiring, rotary: Rotary) -> Block:
    """A layer of Hugging Face's modules as they are: the reference for every faster engine."""
    attn = layer.self_attn
    return Block(
        index=index,
        attn_norm=layer.input_layernorm,
        project=EagerProjection(attn, wiring),
        out_proj=attn.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        mlp=EagerMlp(layer.mlp),
        scale=attn.scaling,
        rotary=rotary if getattr(attn, "use_rope", True) else None,
    )


class EagerProjection:
    """Three linear modules, one after the other."""

    def __init__(self, attn: Any, wiring: Wiring):
        self._attn = attn
        self._wiring = wiring

    def __call__(self, normed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Projection`; normalised and clipped as the family does."""
        attn = self._attn
        queries, keys, values = attn.q_proj(normed), attn.k_proj(normed), attn.v_proj(normed)
        if self._wiring.qk_norm == "projection":
            queries, keys = attn.q_norm(queries), attn.k_norm(keys)
        if self._wiring.clip_qkv is not None:
            bound = self._wiring.clip_qkv
            queries, keys, values = (x.clamp(-bound, bound) for x in (queries, keys, values))
        queries, keys, values = (x.view(x.shape[0], -1, attn.head_dim) for x in (queries, keys, values))
        if self._wiring.qk_norm == "head":
            queries, keys = attn.q_norm(queries), attn.k_norm(keys)
        if angles is not None:
            queries, keys = rotate(queries, angles), rotate(keys, angles)
        return queries, keys, values


class EagerMlp:
    """A dense MLP or a mixture of experts; the latter wants a batch axis and may add router logits."""

    def __init__(self, module: Any):
        self._module = module

    def __call__(self, normed: Tensor) -> Tensor:
        """`T d` -> `T d`."""
        out = self._module(normed[None])
        return (out[0] if isinstance(out, tuple) else out)[0]  # type: ignore[no-any-return]


def device_of(module: Any) -> torch.device:
    """Where a module's first parameter or buffer lies."""
    for tensor in (*module.parameters(), *module.buffers()):
        return torch.device(tensor.device)
    raise ValueError(f"{type(module).__name__} holds no tensor")
