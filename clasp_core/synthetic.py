"""Random models of a published shape, made on the device: what passes cost does not depend on what weights say.

Some layers are planted nearly idle, so that drafts without them are accepted and a method's whole loop is exercised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from clasp_core.checkpoint import Checkpoint, LoadedModel, assemble
from clasp_core.errors import UserError
from clasp_core.placement import CHECKED_POSITIONS, check_memory, device_map_of, dtype_of, memory_shares
from clasp_core.placement import needed_by_device as by_device
from clasp_core.target import Engine
from clasp_core.tiny import NUM_TOKENS, byte_tokenizer, discourage_repeats, scale_of


@dataclass(frozen=True, kw_only=True)
class SyntheticModel:
    """A seeded random Llama on one device. `planted_share` of its layers, evenly spread, add only `epsilon` of what
    the others add: the smaller `epsilon`, the more drafts that skip them are accepted. Its text means nothing."""

    name: str
    dtype: str
    device: str
    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rope_theta: float
    planted_share: float
    epsilon: float
    prompt: str = "chat"
    seed: int = 0
    max_position_embeddings: int = 8192
    sharpness: float = 1.8
    depth_gain: float = 0.3

    def config(self) -> LlamaConfig:
        """The Llama configuration."""
        if self.vocab_size < NUM_TOKENS:
            raise UserError(f"model.vocab_size={self.vocab_size} is below {NUM_TOKENS}, the byte tokens' number")
        if not 0 <= self.planted_share < 1:
            raise UserError(f"model.planted_share={self.planted_share} must be at least 0 and below 1")
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )

    def planted_layers(self) -> list[int]:
        """The nearly idle layers, evenly spread."""
        num = round(self.planted_share * self.num_layers)
        return sorted({(2 * place + 1) * self.num_layers // (2 * num) for place in range(num)})

    def checkpoint(self) -> Checkpoint:
        """Weights made on the device in their dtype, after the check that they fit."""
        config, dtype, where = self.config(), dtype_of(self.dtype), device_map_of(self.device) or {"": "cuda:0"}
        positions = min(CHECKED_POSITIONS, self.max_position_embeddings)
        check_memory(self.name, by_device(memory_shares(config, dtype, positions, None), where))
        model = self._weights(config, dtype, torch.device(where[""]))
        planted = self.planted_layers()
        label = (
            f"random Llama of {self.num_layers} layers and width {self.width} (seed {self.seed}, {len(planted)} layers "
            f"scaled by {self.epsilon:g}); not a trained model"
        )
        origin: dict[str, Any] = {"seed": self.seed, "epsilon": self.epsilon, "planted_layers": planted}
        return Checkpoint(model, byte_tokenizer(), self.name, label, self.prompt, origin)

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""
        return assemble(self.checkpoint(), engine)

    def _weights(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
        rotary = type(model.model.rotary_emb)(config=config).to(device)
        model = model.to_empty(device=device)
        model.model.rotary_emb = rotary
        rng = torch.Generator(device).manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    scale = scale_of(name, parameter.shape[1], self.sharpness, self.depth_gain)
                    parameter.normal_(0, scale, generator=rng)
                else:
                    parameter.fill_(1)
            discourage_repeats(model.lm_head.weight, model.model.embed_tokens.weight, self.sharpness)
            for layer in self.planted_layers():
                block = model.model.layers[layer]
                block.self_attn.o_proj.weight.mul_(self.epsilon)
                block.mlp.down_proj.weight.mul_(self.epsilon)
        return model
