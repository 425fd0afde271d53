"""The fast engine's layers: fused projections everywhere, and the kernels of `native` on a CPU.

Fused weights replace Hugging Face's own, which become views of them, so both engines compute with the same numbers and
no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from clasp_core import native
from clasp_core.blocks import Angles, Block, EagerMlp, EagerProjection, Layer, Projection, Rotary, rotate
from clasp_core.families import Wiring
from clasp_core.graphs import GraphedBlock, Graphs


class Fuser:
    """Builds the layers of one model: with compiled kernels where it has a part that they serve, recorded where it has
    `graphs`."""

    def __init__(self, model: Any, graphs: Graphs | None = None):
        self._graphs = graphs
        served = any(_is_served(module) for module in model.modules())
        self._kernels = native.Kernels(native.build(), model.lm_head.weight.dtype) if served else None

    def block(self, index: int, layer: Any, wiring: Wiring, rotary: Rotary) -> Layer:
        """A layer whose plain linear modules are fused; what is not plain (experts, int8) stays as it is."""
        attn = layer.self_attn
        block = Block(
            index=index,
            attn_norm=fast_norm(layer.input_layernorm),
            project=self._projection(attn, wiring),
            out_proj=self.product_of(attn.o_proj),
            mlp_norm=fast_norm(layer.post_attention_layernorm),
            mlp=self._mlp(layer.mlp),
            scale=attn.scaling,
            rotary=rotary if getattr(attn, "use_rope", True) else None,
        )
        return self._native(block, layer) or self._graphed(block, layer) or block

    def product_of(self, module: Any) -> Callable[[Tensor], Tensor]:
        """A linear module's product, by the kernel where its weights are plain."""
        return self.fuse([module]) if is_plain(module) else module

    def fuse(self, modules: Sequence[nn.Linear]) -> Linear:
        """Linear modules of one input as one product; the modules' weights become views of the fused ones."""
        return Linear(*fuse(modules), self._kernels if all(map(_is_served, modules)) else None)

    def _projection(self, attn: Any, wiring: Wiring) -> Projection:
        modules = [attn.q_proj, attn.k_proj, attn.v_proj]
        fusable = all(is_plain(module) for module in modules) and _fit(modules)
        plain = wiring.qk_norm is None and wiring.clip_qkv is None
        return FusedProjection(attn, self.fuse(modules)) if fusable and plain else EagerProjection(attn, wiring)

    def _mlp(self, mlp: Any) -> Callable[[Tensor], Tensor]:
        parts = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if not (all(is_plain(part) for part in parts) and _fit(parts[:2])):
            return EagerMlp(mlp)
        return FusedMlp(self.fuse([mlp.gate_proj, mlp.up_proj]), self.fuse([mlp.down_proj]), mlp.act_fn)

    def _native(self, block: Block, layer: Any) -> native.NativeBlock | None:
        """The layer by the kernels alone; None where a part of it is not what they compute."""
        project, mlp, out = block.project, block.mlp, block.out_proj
        if not (isinstance(project, FusedProjection) and isinstance(mlp, FusedMlp) and isinstance(out, Linear)):
            return None
        if any(product.kernels is None for product in (project.product, out, mlp.gate_up, mlp.down)):
            return None
        if self._kernels is None or not _is_silu(mlp.activation):
            return None
        return native.NativeBlock(self._kernels, block, layer, project.product.weights, mlp.gate_up.weights)

    def _graphed(self, block: Block, layer: Any) -> GraphedBlock | None:
        """The layer recorded; None where its attention is not the same operations for all rows."""
        attn = layer.self_attn
        modules = (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
        if self._graphs is None or not all(map(is_plain, modules)):
            return None
        return GraphedBlock(self._graphs, block, plain_mlp=isinstance(block.mlp, FusedMlp))


class Linear:
    """`x W^T + b` for rows `T d_in`, by the kernel where there is one and rows are few."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: native.Kernels | None):
        self.weights = weight.detach(), bias.detach() if bias is not None else None
        self.kernels = kernels
        bfloat16 = kernels is not None and weight.dtype == torch.bfloat16
        self._long_in_float32 = bfloat16 and not native.multiplies_bfloat16()

    def __call__(self, rows: Tensor) -> Tensor:
        """`T d_in` -> `T d_out`."""
        weight, bias = self.weights
        if self.kernels is not None and rows.shape[0] <= native.MAX_ROWS:
            return self.kernels.linear(rows, weight, bias)
        if self._long_in_float32:
            wide_bias = bias.float() if bias is not None else None
            return linear(rows.float(), weight.float(), wide_bias).to(rows.dtype)
        return linear(rows, weight, bias)


def fuse(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of linear modules of one input as one; the modules' own become views of them."""
    if len(modules) == 1:
        return modules[0].weight, modules[0].bias
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = torch.cat([module.bias.detach() for module in modules]) if modules[0].bias is not None else None
    start = 0
    for module in modules:
        stop = start + module.out_features
        module.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return weight, bias


def fast_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMS norm in one call; Hugging Face's module, which computes in float32, where the states are wider."""
    weight, eps = norm.weight, norm.variance_epsilon
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return norm  # type: ignore[no-any-return]
    return partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)


def is_plain(module: Any) -> bool:
    """Whether a module is a linear layer of ordinary weights, without hooks that move or change them."""
    return type(module) is nn.Linear and not hasattr(module, "_hf_hook") and module.weight.is_floating_point()


def _is_served(module: Any) -> bool:
    """Whether the kernels can compute a module's product."""
    return is_plain(module) and module.weight.device.type == "cpu" and module.weight.dtype in native.DTYPES


def _is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """By what it gives: the classes differ between models and versions."""
    x = torch.linspace(-4, 4, 9)
    return torch.equal(activation(x), silu(x))


def _fit(modules: Sequence[Any]) -> bool:
    """Whether modules can be one product: all of them with a bias or none, of one dtype, on one device."""
    return len({(module.bias is None, module.weight.dtype, module.weight.device) for module in modules}) == 1


class FusedProjection:
    """Queries, keys and values of one product; queries and keys are rotated together."""

    def __init__(self, attn: Any, product: Linear):
        self.product = product
        self._width = attn.head_dim
        self._num_values = attn.v_proj.out_features // attn.head_dim
        self._num_queries = attn.q_proj.out_features // attn.head_dim

    def __call__(self, normed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """See `Projection`."""
        heads = self.product(normed).view(normed.shape[0], -1, self._width)
        rotated = heads[:, : -self._num_values]
        if angles is not None:
            rotated = rotate(rotated, angles)
        return rotated[:, : self._num_queries], rotated[:, self._num_queries :], heads[:, -self._num_values :]


class FusedMlp:
    """A gated MLP with gate and up of one product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]):
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, normed: Tensor) -> Tensor:
        """`T d` -> `T d`."""
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
