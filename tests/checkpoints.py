"""Small checkpoints and their sources, for the test files of loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from clasp_core.loading import HubModel
from clasp_core.tiny import TinyModel


def saved_tiny(place: Path) -> Path:
    """The folder below `place` of a tiny model, saved in float16 as an ordinary checkpoint."""
    opened = TinyModel(dtype="float16").checkpoint()
    opened.hf_model.save_pretrained(place / "tiny")
    opened.tokenizer.save_pretrained(place / "tiny")
    return place / "tiny"


def source(folder: Path | str, **settings: Any) -> HubModel:
    defaults = {"name": "m", "repo": str(folder), "dtype": "float32", "device": "cpu", "prompt": "chat"}
    return HubModel(**defaults | settings)


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def small(kind: type[PretrainedConfig], **settings: Any) -> PretrainedConfig:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": None,
    }  # fmt: skip
    return kind(**sizes | settings)
