"""The fast engine's layers: fused projections everywhere, prepacked weights on a CPU.

A decoder reads its weights once for each pass, so a pass over 1 to some 16 rows should cost little more than one row.
The plain CPU product does not: it repacks its weights for each call with 3 to 16 rows. MKL and oneDNN keep them packed.
Fused weights replace Hugging Face's own, which become views of them, so both engines compute with the same numbers;
the packed form is a second copy in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from clasp_core.blocks import Angles, Block, EagerMlp, EagerProjection, Projection, Rotary, rotate
from clasp_core.errors import UserError
from clasp_core.families import Wiring
from clasp_core.placement import free_bytes

PACKED_DTYPES = (torch.float32, torch.bfloat16)
"""What can be packed on a CPU; other dtypes are fused only."""

PACKED_FOR = 64
"""Rows that MKL is told to expect. Its packed form serves any number; told fewer, it is slower for more (measured)."""


class Linear:
    """`x W^T + b` for rows `T d_in`, from weights that are packed where that is faster.

    One or two float32 rows read the plain weights as fast as memory allows. Which product is used depends on dtype,
    device and number of rows alone, so that a run can be repeated to the bit.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight = weight.detach()
        self._bias = bias
        self._many_rows = self._packed()
        self._plain_rows = 2 if weight.dtype == torch.float32 else 0

    def __call__(self, rows: Tensor) -> Tensor:
        """`T d_in` -> `T d_out`."""
        if rows.shape[0] <= self._plain_rows:
            return linear(rows, self._weight, self._bias)
        return self._many_rows(rows)

    def _packed(self) -> Callable[[Tensor], Tensor]:
        """The product for more rows: MKL's in float32, else oneDNN's, whose calls cost some ten times more."""
        weight, bias = self._weight, self._bias
        if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
            return partial(linear, weight=weight, bias=bias)
        if weight.dtype == torch.float32 and torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR)
            return lambda rows: torch.ops.mkl._mkl_linear(rows, packed, weight, bias, rows.shape[0])
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def fuse(modules: Sequence[nn.Linear]) -> Linear:
    """Linear modules of one input as one product; the modules' weights become views of the fused ones."""
    if len(modules) == 1:
        return Linear(modules[0].weight, modules[0].bias)
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = torch.cat([module.bias.detach() for module in modules]) if modules[0].bias is not None else None
    start = 0
    for module in modules:
        stop = start + module.out_features
        module.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return Linear(weight, bias)


def product_of(module: Any) -> Callable[[Tensor], Tensor]:
    """A linear module's product, packed where its weights are plain."""
    return fuse([module]) if is_plain(module) else module


def fused_block(index: int, layer: Any, wiring: Wiring, rotary: Rotary) -> Block:
    """A layer whose plain linear modules are fused; what is not plain (experts, int8) stays as it is."""
    attn = layer.self_attn
    return Block(
        index=index,
        attn_norm=fast_norm(layer.input_layernorm),
        project=_projection(attn, wiring),
        out_proj=product_of(attn.o_proj),
        mlp_norm=fast_norm(layer.post_attention_layernorm),
        mlp=_mlp(layer.mlp),
        scale=attn.scaling,
        rotary=rotary if getattr(attn, "use_rope", True) else None,
    )


def fast_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMS norm in few calls; Hugging Face's module, which computes in float32, where the states are wider."""
    weight, eps = norm.weight, norm.variance_epsilon
    if weight.dtype == torch.float32 and weight.device.type == "cpu":
        return FewCallsNorm(weight, eps)
    if weight.dtype not in PACKED_DTYPES:
        return norm  # type: ignore[no-any-return]
    return partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)


class FewCallsNorm:
    """w x / sqrt(mean(x^2) + eps) as (w sqrt d) x / hypot(|x|, sqrt(d eps)): on a CPU each call costs more than its
    arithmetic, and torch's own norm makes twice as many."""

    def __init__(self, weight: Tensor, eps: float):
        self._weight = weight * weight.numel() ** 0.5
        self._floor = torch.tensor((eps * weight.numel()) ** 0.5, dtype=weight.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`T d` -> `T d`."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        out: Tensor = hidden / torch.hypot(length, self._floor) * self._weight
        return out


def is_plain(module: Any) -> bool:
    """Whether a module is a linear layer of ordinary weights, without hooks that move or change them."""
    return type(module) is nn.Linear and not hasattr(module, "_hf_hook") and module.weight.is_floating_point()


def packed_bytes(model: Any) -> int:
    """Bytes of the second copy that packing makes of a model's linear weights."""
    return sum(
        module.weight.numel() * module.weight.element_size()
        for module in model.modules()
        if is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in PACKED_DTYPES
    )


def check_room(model: Any) -> None:
    """Refuse to pack what does not fit beside the plain weights."""
    needed, free = packed_bytes(model), free_bytes("cpu")
    if needed > free:
        raise UserError(
            f"engine=compiled packs a second copy of the weights, {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB "
            "are available on cpu; use engine=eager or a smaller model.dtype"
        )


def _projection(attn: Any, wiring: Wiring) -> Projection:
    modules = [attn.q_proj, attn.k_proj, attn.v_proj]
    fusable = all(is_plain(module) for module in modules) and _fit(modules)
    plain = wiring.qk_norm is None and wiring.clip_qkv is None
    return FusedProjection(attn) if fusable and plain else EagerProjection(attn, wiring)


def _fit(modules: Sequence[Any]) -> bool:
    """Whether modules can be one product: all of them with a bias or none, on one device."""
    return len({(module.bias is None, module.weight.device) for module in modules}) == 1


class FusedProjection:
    """Queries, keys and values of one product; queries and keys are rotated together."""

    def __init__(self, attn: Any):
        self._width = attn.head_dim
        self._num_values = attn.v_proj.out_features // attn.head_dim
        self._num_queries = attn.q_proj.out_features // attn.head_dim
        self._product = fuse([attn.q_proj, attn.k_proj, attn.v_proj])

    def __call__(self, normed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Projection`."""
        heads = self._product(normed).view(normed.shape[0], -1, self._width)
        rotated = heads[:, : -self._num_values]
        if angles is not None:
            rotated = rotate(rotated, angles)
        return rotated[:, : self._num_queries], rotated[:, self._num_queries :], heads[:, -self._num_values :]


def _mlp(mlp: Any) -> Callable[[Tensor], Tensor]:
    parts = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    fusable = all(is_plain(part) for part in parts) and _fit(parts[:2])
    return FusedMlp(mlp) if fusable else EagerMlp(mlp)


class FusedMlp:
    """A gated MLP with gate and up of one product."""

    def __init__(self, mlp: Any):
        self._gate_up = fuse([mlp.gate_proj, mlp.up_proj])
        self._down = fuse([mlp.down_proj])
        self._activation = mlp.act_fn

    def __call__(self, normed: Tensor) -> Tensor:
        """`T d` -> `T d`."""
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return self._down(self._activation(gate) * up)
