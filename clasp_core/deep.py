"""A deeper model than there is: every layer of another one, each followed by a near-idle copy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from clasp_core.checkpoint import Checkpoint, LoadedModel, Source, assemble
from clasp_core.errors import UserError
from clasp_core.placement import (
    CHECKED_POSITIONS,
    check_memory,
    device_map_of,
    dtype_of,
    memory_shares,
    needed_by_device,
)
from clasp_core.target import Engine

NO_DOWN_PROJ = "cannot expand a {kind} model: its MLP has no down_proj to scale (a mixture of experts?)"


@dataclass(frozen=True, kw_only=True)
class DeepModel:
    """Function-near expansion of another model to twice its layers, for studies of layer skipping.

    Layer 2i is the base's layer i; layer 2i + 1 is a copy with storage of its own (a shared one would flatter the
    CPU's cache) whose two output projections are scaled by `epsilon`, so that it changes the states a little. Which
    layers can be skipped is thereby known: `info["planted_layers"]`. `dtype`, `device` and `prompt` replace the
    base's.
    """

    name: str
    base: Any
    epsilon: float
    dtype: str
    device: str
    prompt: str

    def config(self) -> Any:
        """The base's configuration with twice the layers."""
        config = copy.deepcopy(self._base().config())
        widen(config)
        return config

    def checkpoint(self) -> Checkpoint:
        """The expanded model with the base's tokenizer."""
        if not 0 < self.epsilon < float("inf"):
            raise UserError(f"model.epsilon={self.epsilon} must be positive and finite; 0 would plant dead layers")
        self._check()
        opened = self._base().checkpoint()
        expand(opened.hf_model, self.epsilon)
        planted = list(range(1, opened.hf_model.config.num_hidden_layers, 2))
        origin = opened.origin | {"base": opened.label, "epsilon": self.epsilon, "planted_layers": planted}
        label = (
            f"{opened.label} expanded to {2 * len(planted)} layers (odd layers are copies scaled by {self.epsilon:g}); "
            "not a released model"
        )
        return dataclasses.replace(opened, name=self.name, label=label, origin=origin)

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""
        return assemble(self.checkpoint(), engine)

    def _base(self) -> Source:
        replaced: Source = dataclasses.replace(self.base, dtype=self.dtype, device=self.device, prompt=self.prompt)
        return replaced

    def _check(self) -> None:
        """Refuse a base that cannot be expanded, and an expansion that does not fit; no weights are read."""
        config, device_map = self.config(), device_map_of(self.device)
        if getattr(self.base, "quantization", None) or getattr(config, "quantization_config", None):
            raise UserError(
                f"{self.name} needs a dense base, but {self.base.name} is quantised; choose another base, or "
                "model.base.quantization=null if it was asked for there"
            )
        positions = min(CHECKED_POSITIONS, config.max_position_embeddings)
        shares = memory_shares(config, dtype_of(self.dtype), positions, None)
        refuse_experts(config, shares)
        check_memory(self.name, needed_by_device(shares, device_map))


def refuse_experts(config: Any, weights: Collection[str]) -> None:
    """Refuse a model with a layer whose MLP is not one gated product; `weights` are the names of all parameters."""
    scaled = {f"model.layers.{i}.mlp.down_proj.weight" for i in range(config.num_hidden_layers)}
    if not scaled.issubset(weights):
        raise UserError(NO_DOWN_PROJ.format(kind=config.model_type))


def widen(config: Any) -> None:
    """Double a configuration's layers in place, and every list that has one entry for each layer."""
    old = config.num_hidden_layers
    lists = {k: v for k, v in config.to_dict().items() if isinstance(v, list) and len(v) == old}
    config.num_hidden_layers = 2 * old
    for key, values in lists.items():
        setattr(config, key, [value for value in values for _ in range(2)])


def expand(model: Any, epsilon: float) -> None:
    """Insert after every layer a copy whose output projections are scaled by `epsilon`; in place."""
    if getattr(model, "is_quantized", False) or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise UserError("an expanded model needs a dense base on one device; choose model.device and no quantization")
    widen(model.config)
    blocks = model.model.layers
    pairs = [block for old in blocks for block in (old, scaled_copy(old, model.config, epsilon))]
    for index, block in enumerate(pairs):
        block.self_attn.layer_idx = index
    model.model.layers = torch.nn.ModuleList(pairs)


def scaled_copy(block: Any, config: Any, epsilon: float) -> Any:
    """A decoder block with storage of its own and both output projections (weight and bias) times `epsilon`."""
    twin = copy.deepcopy(block, {id(config): config})
    if not hasattr(twin.mlp, "down_proj"):
        raise UserError(NO_DOWN_PROJ.format(kind=config.model_type))
    with torch.no_grad():
        for projection in (twin.self_attn.o_proj, twin.mlp.down_proj):
            for parameter in projection.parameters():
                parameter.mul_(epsilon)
    return twin
