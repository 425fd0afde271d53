"""Which dtype, which devices, and whether a model fits there, before any weight is read."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from transformers import AutoModelForCausalLM, PretrainedConfig

from clasp_core.errors import NotEnoughMemory, UserError

DTYPES = MappingProxyType(
    {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float64": torch.float64,
    }
)
"""What `model.dtype` may be; there is no "as saved", so that a result always names its dtype."""

HEAD_ROOM_BYTES = 256 * 2**20
"""Kept free beside weights and cache, for activations and kernels' workspace; 5 % of the weights are added."""

CHECKED_POSITIONS = 4096
"""For how many tokens keys and values must fit besides the weights, before these are read."""

DeviceMap = Mapping[str, str]
"""Module name (or "" for everything) -> device name."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of that name."""
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)} (model.dtype=...)")
    return DTYPES[name]


def device_map_of(device: str) -> DeviceMap | None:
    """The device map of `cpu`, `cuda` or `cuda:N`; None for `auto` with GPUs, which accelerate decides."""
    match = re.fullmatch(r"(cpu|auto|cuda)(?::(\d+))?", device)
    if match is None or (match[2] and match[1] != "cuda"):
        raise UserError(f"unknown device {device!r}; known are cpu, cuda, cuda:N and auto (model.device=...)")
    kind, index, present = match[1], int(match[2] or 0), num_gpus()
    if kind == "cuda" and index >= present:
        have = f"only {present} GPU(s), numbered from 0, are" if present else "no GPU is"
        raise UserError(f"device {device!r} asked for, but {have} visible to torch; use model.device=cpu or auto")
    if kind == "auto" and present:
        return None
    return {"": f"cuda:{index}" if kind == "cuda" else "cpu"}


def num_gpus() -> int:
    """How many GPUs torch can use."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the weights, and of keys and values for the positions asked about."""

    weights_bytes: int
    cache_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Weights and cache with head-room."""
        return int(1.05 * self.weights_bytes) + self.cache_bytes + HEAD_ROOM_BYTES

    def __add__(self, other: MemoryEstimate) -> MemoryEstimate:
        return MemoryEstimate(self.weights_bytes + other.weights_bytes, self.cache_bytes + other.cache_bytes)


def estimate(
    config: PretrainedConfig, dtype: torch.dtype, positions: int, quantization: str | None = None
) -> MemoryEstimate:
    """Memory for a model of this configuration; nothing is allocated. Tied weights count once."""
    shares = memory_shares(config, dtype, positions, quantization)
    return sum(shares.values(), MemoryEstimate(0, 0))


def memory_shares(
    config: PretrainedConfig, dtype: torch.dtype, positions: int, quantization: str | None
) -> dict[str, MemoryEstimate]:
    """Memory by parameter name, and of each layer's keys and values by the layer's name."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # it writes into its config
    int8 = _int8_weights(skeleton) if quantization == "int8" else set()
    sizes = {
        name: MemoryEstimate(p.numel() * (1 if name in int8 else p.element_size()), 0)
        for name, p in skeleton.named_parameters()
    }
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = MemoryEstimate(0, 2 * heads * width * positions * dtype.itemsize)
    return sizes | {f"model.layers.{i}": cache for i in range(config.num_hidden_layers)}


def _int8_weights(skeleton: Any) -> set[str]:
    """Weights that bitsandbytes turns into int8: those of linear layers, except the head's."""
    head = skeleton.get_output_embeddings()
    modules = skeleton.named_modules()
    return {f"{name}.weight" for name, m in modules if isinstance(m, torch.nn.Linear) and m is not head}


def needed_by_device(shares: Mapping[str, MemoryEstimate], device_map: DeviceMap | None) -> dict[str, MemoryEstimate]:
    """Memory of each device of a map (longest matching module name wins), or of `all GPUs` together."""
    needed: dict[str, MemoryEstimate] = {}
    for name, share in shares.items():
        device = "all GPUs" if device_map is None else _device_in(device_map, name)
        needed[device] = needed.get(device, MemoryEstimate(0, 0)) + share
    return needed


def _device_in(device_map: DeviceMap, name: str) -> str:
    matches = [key for key in device_map if key == "" or name == key or name.startswith(f"{key}.")]
    if not matches:
        raise UserError(f"device_map places {', '.join(device_map)}, but not {name}; add a line for it")
    return device_map[max(matches, key=len)]


def free_bytes(device: str, max_memory: Mapping[int | str, int | str] | None = None) -> int:
    """Bytes that may be used on `cpu`, `cuda:N` or `all GPUs`: what is free now, at most what `max_memory` says."""
    if device == "all GPUs":
        return sum(free_bytes(f"cuda:{index}", max_memory) for index in range(num_gpus()))
    if device == "cpu":
        free = int(psutil.virtual_memory().available)
    else:
        free = int(torch.get_device_module(device).mem_get_info(torch.device(device))[0])
    limits = max_memory or {}
    index = int(device.partition(":")[2]) if ":" in device else device
    limit = limits.get(index, limits.get(device))
    return free if limit is None else min(free, int(convert_file_size_to_int(limit)))


def check_memory(
    name: str, needed: Mapping[str, MemoryEstimate], max_memory: Mapping[int | str, int | str] | None = None
) -> None:
    """Refuse a model that does not fit; what is needed and free, in GiB, and the way out. Disk is not checked."""
    for device, share in needed.items():
        free = free_bytes(device, max_memory) if device != "disk" else share.needed_bytes
        if share.needed_bytes > free:
            raise NotEnoughMemory(
                f"{name} needs about {_gib(share.needed_bytes)} on {device} (weights {_gib(share.weights_bytes)}, keys "
                f"and values {_gib(share.cache_bytes)}, the rest head-room), but {_gib(free)} are available; use a "
                "smaller model.dtype, more GPUs (model.device=auto), or 8-bit weights (model.quantization=int8)"
            )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def named_devices(device_map: Mapping[str, int | str]) -> dict[str, str]:
    """A device map as Hugging Face and YAML write it, every GPU by its name instead of its number."""
    return {key: f"cuda:{value}" if isinstance(value, int) else str(value) for key, value in device_map.items()}


def check_quantization(quantization: str | None) -> None:
    """Refuse an unknown quantisation, and int8 without bitsandbytes or a GPU."""
    if quantization not in (None, "int8"):
        raise UserError(f"unknown quantization {quantization!r}; known are null and int8 (model.quantization=...)")
    if quantization == "int8" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("model.quantization=int8 needs bitsandbytes: pip install 'clasp-bench[int8]'")
    if quantization == "int8" and num_gpus() == 0:
        raise UserError("model.quantization=int8 needs a GPU, and torch sees none; use model.quantization=null")


def refuse_offload(name: str, device_map: Mapping[str, Any]) -> None:
    """Refuse modules on disk, or on the CPU beside GPUs: skipping such a layer would look like a huge gain."""
    places = {str(place) for place in device_map.values()}
    away = places & {"disk"} if places <= {"cpu", "disk"} else places & {"cpu", "disk"}
    if away:
        moved = sorted(module for module, place in device_map.items() if str(place) in away)
        raise UserError(
            f"{len(moved)} module(s) of {name} landed on {' and '.join(sorted(away))} (first {moved[0]}), where they "
            "are slow and spoil every comparison; free GPU memory, use more GPUs or int8, or accept it with "
            "model.allow_offload=true"
        )
