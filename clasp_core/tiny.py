"""A seeded random model of a few thousand weights, for tests and smoke runs; its text means nothing.

Imports transformers for a configuration, a model class and a tokenizer class; nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from clasp_core.checkpoint import Checkpoint, LoadedModel, assemble
from clasp_core.errors import UserError
from clasp_core.placement import device_map_of, dtype_of
from clasp_core.target import Engine

SPECIALS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
"""Ids 0 to 3: BOS, EOS and the two roles of the chat template."""

NUM_TOKENS = len(SPECIALS) + 256
"""Special tokens, then one token for every byte."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A random Llama. One seed gives the same weights in every dtype, and torch's own random state is left alone.

    `vocab_size` below 260 leaves no room for the byte tokens, so such a model has no tokenizer and no stop token
    (laws of distributions are tested on small vocabularies). `sharpness` is about the standard deviation of logits;
    `depth_gain` is how much a sub-layer adds to a state, in units of the embedding: the larger, the more a skipped
    layer matters.
    """

    name: str = "tiny"
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    prompt: str = "chat"
    num_layers: int = 6
    width: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = NUM_TOKENS
    max_position_embeddings: int = 2048
    sharpness: float = 1.8
    depth_gain: float = 0.3

    def config(self) -> LlamaConfig:
        """The Llama configuration."""
        for key in ("num_layers", "width", "num_heads", "num_kv_heads", "vocab_size", "max_position_embeddings"):
            if getattr(self, key) < 1:
                raise UserError(f"model.{key} is {getattr(self, key)}; it must be at least 1")
        if self.width % self.num_heads or self.num_heads % self.num_kv_heads or (self.width // self.num_heads) % 2:
            raise UserError(
                f"width {self.width} must be an even multiple of {self.num_heads} heads, and these a multiple of "
                f"{self.num_kv_heads} key-value heads"
            )
        has_text = self.vocab_size >= NUM_TOKENS
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.max_position_embeddings,
            bos_token_id=0 if has_text else None,
            eos_token_id=1 if has_text else None,
            tie_word_embeddings=False,
        )

    def checkpoint(self) -> Checkpoint:
        """Seeded weights, and a tokenizer where the vocabulary has room for one."""
        dtype, where = dtype_of(self.dtype), device_map_of(self.device)
        device = "cuda:0" if where is None else where[""]
        model = random_llama(self.config(), self.seed, self.sharpness, self.depth_gain)
        label = f"random Llama of {self.num_layers} layers (seed {self.seed}); not a trained model"
        tokenizer = byte_tokenizer() if self.vocab_size >= NUM_TOKENS else None
        _cast_weights(model, dtype)
        return Checkpoint(model.to(device), tokenizer, self.name, label, self.prompt, {"seed": self.seed})

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""
        return assemble(self.checkpoint(), engine)


def random_llama(config: LlamaConfig, seed: int, sharpness: float, depth_gain: float) -> PreTrainedModel:
    """A float32 Llama on the CPU whose weights depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = scale_of(name, parameter.shape[1], sharpness, depth_gain)
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * scale)
        discourage_repeats(model.lm_head.weight, model.model.embed_tokens.weight, sharpness)
    return model


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights, and not the rotary frequencies: `from_pretrained` keeps these in float32 too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def discourage_repeats(head: torch.Tensor, embedding: torch.Tensor, sharpness: float) -> None:
    """Give every token `V` about `-sharpness` as its own successor, in place, or greedy text ends in one token."""
    own = (head * embedding).sum(dim=1, keepdim=True) / embedding.square().sum(dim=1, keepdim=True)
    head -= (own + sharpness / head.shape[1]) * embedding


def scale_of(name: str, fan_in: int, sharpness: float, depth_gain: float) -> float:
    """Standard deviation of a matrix: unit rows for the embedding, 1 / sqrt(fan in) times a gain elsewhere."""
    gains = {"embed_tokens": fan_in**0.5, "q_proj": 2.0, "o_proj": depth_gain, "down_proj": 2 * depth_gain}
    gains["lm_head"] = sharpness
    part = name.split(".")[-2]
    return float(gains.get(part, 1.0) / fan_in**0.5)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every byte, so that any text is encoded and comes back; BOS by default, and a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *letters))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    core.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin|>", eos_token="<|end|>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
