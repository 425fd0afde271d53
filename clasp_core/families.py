"""Which decoder families are wired, how their blocks differ, and who is refused before weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from clasp_core.errors import UserError


@dataclass(frozen=True, slots=True)
class Wiring:
    """What distinguishes the blocks of one family; the rest is the pre-norm block that all of them share.

    `qk_norm`: queries and keys are normalised per head, over the whole projection, or not at all.
    `clip_qkv`: bound on projected queries, keys and values, or None.
    """

    model_type: str
    qk_norm: Literal["head", "projection"] | None = None
    clip_qkv: float | None = None


QK_NORM: Mapping[str, Literal["head", "projection"] | None] = MappingProxyType(
    {
        "llama": None,
        "mistral": None,
        "qwen2": None,
        "smollm3": None,
        "mixtral": None,
        "qwen3": "head",
        "qwen3_moe": "head",
        "olmoe": "projection",
    }
)
"""The families whose wiring is proven against Hugging Face's logits, by `config.model_type`."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose angles do not depend on the length of the sequence."""


def wiring_of(config: Any) -> Wiring:
    """The wiring for a Hugging Face configuration; a `UserError` names what is not supported."""
    kind = config.model_type
    if kind not in QK_NORM:
        raise UserError(
            f"model type {kind!r} is not supported: its decoder block (norms, windows or recurrence) is not wired; "
            f"supported are {', '.join(sorted(QK_NORM))}; add an entry to clasp_core/families.py"
        )
    _refuse_windows(config)
    _refuse_moving_rope(config)
    return Wiring(kind, QK_NORM[kind], getattr(config, "clip_qkv", None))


def _refuse_windows(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    switched_on = getattr(config, "use_sliding_window", True)
    longest = config.max_position_embeddings
    if layers != {"full_attention"} and (layers - {"full_attention", "sliding_attention"} or window):
        raise UserError(
            f"layer types {sorted(layers)} of this {config.model_type} model are not supported; only full attention is"
        )
    if window is not None and switched_on and window < longest:
        raise UserError(
            f"a sliding window of {window} tokens (context {longest}) is not supported; "
            "use a checkpoint with full attention, or one whose sliding_window is null"
        )


def _refuse_moving_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise UserError(
            f"rotary embedding {kind!r} depends on the sequence's length and is not supported; "
            f"supported are {', '.join(STATIC_ROPE)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"a partial rotary embedding ({rope['partial_rotary_factor']}) is not supported")
