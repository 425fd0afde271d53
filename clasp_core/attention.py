"""Where rows sit, what they see (`Span`), and the attention over a preallocated cache (`attend`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from clasp_core.kv_cache import KVCache

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """T rows of one forward pass: their slots, their positions and their view of one another.

    Rows take cache slots `start .. start + T - 1` and all see slots `0 .. start - 1`. Among themselves they
    see what `visible` (`T T`, bool) says; None means the usual causal order. Rows that are `alone` see the
    prefix and themselves only. Rows that do not write leave the cache as it was.
    """

    start: int
    length: int
    depths: tuple[int, ...] | None = None
    """Row i sits at position `start + depths[i]`; None means `start + i`."""
    visible: Tensor | None = None
    write: bool = True
    alone: bool = False
    _made: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def causal(cls, start: int, length: int) -> Span:
        """Consecutive tokens."""
        return cls(start, length)

    @classmethod
    def tree(cls, start: int, parents: tuple[int, ...]) -> Span:
        """A root at row 0 and draft nodes behind it; `parents[i]` is the row of node i + 1's parent.

        Parents come before their children. A node sees the prefix, its ancestors and itself.
        """
        rows = len(parents) + 1
        visible = torch.eye(rows, dtype=torch.bool)
        depths = [0]
        for row, parent in enumerate(parents, start=1):
            if not 0 <= parent < row:
                raise ValueError(f"node {row} names parent {parent}; parents come first")
            visible[row] |= visible[parent]
            depths.append(depths[parent] + 1)
        return cls(start, rows, tuple(depths), visible)

    @classmethod
    def siblings(cls, position: int, length: int) -> Span:
        """Alternative states of one position: same position for all, prefix and self in view, nothing written."""
        return cls(position, length, (0,) * length, None, write=False, alone=True)

    @classmethod
    def trial(cls, start: int, length: int) -> Span:
        """Consecutive tokens that leave no trace in the cache."""
        return cls(start, length, write=False)

    @property
    def stop(self) -> int:
        """One past the last cache slot of the span."""
        return self.start + self.length

    @property
    def last_position(self) -> int:
        """The largest position of a row."""
        return self.start + (max(self.depths) if self.depths is not None else self.length - 1)

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the rows, `T`, on a device (made once)."""
        return self.once(("positions", device), lambda: self._positions(device))

    def mask(self, device: torch.device) -> Tensor:
        """`T stop` bool, true where a row may look, on a device (made once)."""
        return self.once(("mask", device), lambda: self._mask(device))

    def bias(self, like: Tensor, group: int) -> Tensor:
        """The mask as an addend `(G T) stop` for scores of G = `group` heads, in the dtype and on the device of `like`.

        Made once for a pass: a kernel that is given a bool mask turns it into this in every layer.
        """
        return self.once(("bias", like.device, like.dtype, group), lambda: self._bias(like, group))

    def _positions(self, device: torch.device) -> Tensor:
        if self.depths is None:
            return torch.arange(self.start, self.stop, device=device)
        return self.start + torch.tensor(self.depths, device=device)

    def _mask(self, device: torch.device) -> Tensor:
        everything = torch.ones(self.length, self.stop, dtype=torch.bool, device=device)
        if self.visible is None:
            return everything.tril(self.start)
        everything[:, self.start :] = self.visible.to(device)
        return everything

    def _bias(self, like: Tensor, group: int) -> Tensor:
        hidden = ~self.mask(like.device)
        return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat(group, 1)

    def once(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """What `make` gives, made at the first call with this key and kept as long as the span."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, span: Span, cache: KVCache, *, layer: int, scale: float
) -> Tensor:
    """Attention output `T Hq D` for queries `T Hq D` and the rows' own keys and values `T H D`.

    A writing span stores its rows in the cache first and then reads prefix and rows in one view; one that does not
    write puts the two together for the length of this call. Grouped
    heads: query heads `h*G .. h*G+G-1` read key-value head h.
    """
    if span.alone:
        return prefix_and_self(queries, keys, values, *cache.read(layer, span.start), scale)
    if span.write:
        cache.write(layer, span.start, keys, values)
        seen_keys, seen_values = cache.read(layer, span.stop)
    else:
        own = keys.transpose(0, 1), values.transpose(0, 1)
        seen_keys, seen_values = (torch.cat(x, dim=1) for x in zip(cache.read(layer, span.start), own, strict=True))
    if span.start == 0 and span.visible is None and span.length > 1:
        return _prefill(queries, seen_keys, seen_values, scale)
    bias = span.bias(queries, queries.shape[1] // keys.shape[1]) if span.length > 1 else None
    return over_cache(queries, seen_keys, seen_values, bias, scale)


def _prefill(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    grouped = queries.shape[1] != keys.shape[0]
    out = scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


def over_cache(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`T Hq D` from queries `T Hq D`, keys and values `H stop D` and a bias `(G T) stop`; without one, all is seen.

    The G query heads of a group become rows of their key-value head, so keys are never repeated.
    """
    rows, num_heads = queries.shape[:2]
    grouped = _by_key_head(queries, keys.shape[0])
    mask = bias[None, None] if bias is not None else None
    out = scaled_dot_product_attention(grouped[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
    return _by_query_head(out, rows, num_heads)


def prefix_and_self(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    prefix_keys: Tensor,
    prefix_values: Tensor,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """Each row attends to the prefix and to itself: scores `[q . K_prefix, q . k_self]`, one softmax.

    A bias `(G T) P` is added to the scores of the prefix `H P D`.
    """
    rows, num_heads = queries.shape[:2]
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    grouped = _by_key_head(queries, num_kv)
    own_keys = keys.transpose(0, 1).repeat(1, group, 1)
    own_values = values.transpose(0, 1).repeat(1, group, 1)
    to_prefix = grouped @ prefix_keys.transpose(1, 2)
    if bias is not None:
        to_prefix = to_prefix + bias
    to_self = (grouped * own_keys).sum(-1, keepdim=True)
    precise = torch.promote_types(queries.dtype, torch.float32)
    weights = softmax(torch.cat((to_prefix, to_self), dim=-1) * scale, dim=-1, dtype=precise)
    weights = weights.to(queries.dtype)
    out = weights[..., :-1] @ prefix_values + weights[..., -1:] * own_values
    return _by_query_head(out, rows, num_heads)


def _by_key_head(queries: Tensor, num_kv: int) -> Tensor:
    """`T Hq D` -> `H (G T) D`."""
    rows, num_heads, width = queries.shape
    return queries.transpose(0, 1).reshape(num_kv, num_heads // num_kv * rows, width)


def _by_query_head(out: Tensor, rows: int, num_heads: int) -> Tensor:
    """`H (G T) D` -> `T Hq D`, the inverse of `_by_key_head`."""
    return out.reshape(num_heads, rows, out.shape[-1]).transpose(0, 1)
