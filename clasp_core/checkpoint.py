"""From opened weights to a model that can be measured: wired, checked, its settings neutral, and described."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from clasp_core.families import wiring_of
from clasp_core.graphs import RecordingFailed
from clasp_core.placement import named_devices
from clasp_core.target import Engine, TargetModel


class Source(Protocol):
    """A model that can be opened; what a YAML of `conf/model/` builds."""

    name: str

    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration; no weights are read."""

    def checkpoint(self) -> Checkpoint:
        """Weights and tokenizer as they come from Hugging Face."""

    def load(self, engine: Engine = "eager") -> LoadedModel:
        """The checkpoint, wired, checked and described."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model and its tokenizer before wiring. `origin` goes into the manifest as it is."""

    hf_model: PreTrainedModel
    tokenizer: Any | None
    name: str
    label: str
    prompt: str
    origin: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can be measured. `stop_ids` is the union of all EOS ids that the checkpoint names."""

    target: TargetModel
    hf_model: PreTrainedModel
    tokenizer: Any | None
    name: str
    label: str
    prompt: str
    stop_ids: tuple[int, ...]
    max_positions: int
    info: dict[str, Any]


def assemble(checkpoint: Checkpoint, engine: Engine = "eager") -> LoadedModel:
    """Wire a checkpoint, compare it with Hugging Face's forward, and neutralise its generation settings."""
    model = checkpoint.hf_model.eval().requires_grad_(False)
    target = TargetModel(model, wiring_of(model.config), engine)
    distance, recordings = _checked(target)
    stops = stop_ids(model, checkpoint.tokenizer)
    neutralised = neutralise_generation(model, stops)
    info = {
        "name": checkpoint.name,
        "label": checkpoint.label,
        **checkpoint.origin,
        **describe(model),
        "stop_ids": list(stops),
        "generation_config_neutralised": neutralised,
        "engine": engine,
        "distance_to_hf": distance,
        **recordings,
    }
    return LoadedModel(
        target=target,
        hf_model=model,
        tokenizer=checkpoint.tokenizer,
        name=checkpoint.name,
        label=checkpoint.label,
        prompt=checkpoint.prompt,
        stop_ids=stops,
        max_positions=int(model.config.max_position_embeddings),
        info=info,
    )


def _checked(target: TargetModel) -> tuple[float, dict[str, str]]:
    """The distance to Hugging Face, and whether sub-layers are recorded; what cannot be recorded runs call by call."""
    try:
        return target.check_against_hf(), {"cuda_graphs": "on"} if target.records else {}
    except RecordingFailed as error:
        target.forgo_recordings()
        return target.check_against_hf(), {"cuda_graphs": f"off: {error}"}


def stop_ids(model: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """All EOS ids named by the generation config, the config and the tokenizer, ascending."""
    named = (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    lists = (ids if isinstance(ids, Sequence) else [ids] for ids in named if ids is not None)
    return tuple(sorted({int(i) for ids in lists for i in ids}))


NOT_SAMPLING = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "max_length",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
})  # fmt: skip
"""Fields of a generation config that do not change which token is drawn."""

NEUTRAL = MappingProxyType({
    "do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "num_beams": 1,
    "length_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
})  # fmt: skip
"""Values at which a field changes nothing."""


def neutralise_generation(model: PreTrainedModel, stops: Sequence[int]) -> dict[str, Any]:
    """Replace the generation config by a neutral one with these stops; the fields that were not, as found.

    Every method then samples by the run's own settings. (`generate` itself still assumes `top_k=50` when it
    samples; who calls it says `top_k=0`.)
    """
    found = model.generation_config
    stated = found.to_diff_dict()
    model.generation_config = GenerationConfig(
        bos_token_id=found.bos_token_id, eos_token_id=list(stops) or None, pad_token_id=found.pad_token_id
    )
    return {
        key: value
        for key, value in stated.items()
        if key not in NOT_SAMPLING and not key.startswith("_") and value is not None and NEUTRAL.get(key) != value
    }


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """What the loaded parameters are, read back from them: sizes, dtypes, devices and a fingerprint."""
    parameters = list(model.parameters())
    dtypes: Counter[str] = Counter()
    for parameter in parameters:
        dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    devices = sorted({str(parameter.device) for parameter in parameters})
    return {
        "model_type": model.config.model_type,
        "num_layers": int(model.config.num_hidden_layers),
        "vocab_size": int(model.config.vocab_size),
        "max_positions": int(model.config.max_position_embeddings),
        "num_parameters": sum(dtypes.values()),
        "weights_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtype": dtypes.most_common(1)[0][0],
        "num_parameters_by_dtype": dict(dtypes),
        "device_map": named_devices(getattr(model, "hf_device_map", {"": ",".join(devices)})),
        "attention": str(model.config._attn_implementation),
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: PreTrainedModel) -> str:
    """sha256 of the configuration and of 64 values of every parameter; the same on every device.

    The dtype is part of it. Paths, versions and the names of classes are not.
    """
    digest = hashlib.sha256(_config_text(model.config).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta":
            digest.update(_sample_of(parameter))
    return digest.hexdigest()


def _config_text(config: PretrainedConfig) -> str:
    passing = {"transformers_version", "architectures", "dtype", "quantization_config"}
    kept = {k: v for k, v in config.to_diff_dict().items() if k not in passing and not k.startswith("_")}
    return json.dumps(kept, sort_keys=True, default=str)


def _sample_of(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 64)][:64].contiguous().cpu()
    return bytes(sample.view(torch.uint8).numpy().tobytes())
