"""Memory is foreseen to the byte, devices are named, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import small
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from clasp_core import placement
from clasp_core.errors import UserError
from clasp_core.placement import MemoryEstimate, device_map_of, estimate
from clasp_core.tiny import TinyModel


def test_auto_with_gpus_leaves_the_map_to_accelerate(monkeypatch):
    monkeypatch.setattr(placement, "num_gpus", lambda: 2)
    assert device_map_of("auto") is None
    assert device_map_of("cuda") == {"": "cuda:0"}
    assert device_map_of("cuda:1") == {"": "cuda:1"}


@pytest.mark.parametrize(
    ("places", "moved"),
    [
        ({"model": 0, "lm_head": "cpu"}, "lm_head"),
        ({"model": 0, "lm_head": "disk"}, "lm_head"),
        ({"model": "cpu", "lm_head": "disk"}, "lm_head"),
    ],
)
def test_modules_beside_the_gpus_are_refused(places, moved):
    with pytest.raises(UserError, match=rf"1 module.*{moved}.*allow_offload=true"):
        placement.refuse_offload("m", places)


@pytest.mark.parametrize("places", [{"": "cpu"}, {"model": 0, "lm_head": 1}, {"model": "cpu", "lm_head": "cpu"}, {}])
def test_whole_models_on_cpu_or_on_several_gpus_are_no_offload(places):
    placement.refuse_offload("m", places)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, MixtralConfig])
@pytest.mark.parametrize("tied", [False, True])
def test_estimate_equals_the_true_size_of_the_weights(kind, tied):
    config = small(kind, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert estimate(config, torch.float32, 10).weights_bytes == 4 * count
    assert estimate(config, torch.float16, 10).weights_bytes == 2 * count


def test_estimate_equals_the_true_size_of_the_cache():
    config = TinyModel().config()
    cache = TinyModel(dtype="bfloat16").load().target.new_cache(100)
    true = sum(t.numel() * t.element_size() for t in tensors_in(cache))
    assert estimate(config, torch.bfloat16, 100).cache_bytes == true == 2 * 6 * 2 * 8 * 100 * 2


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that an object holds, one level of sequences deep."""
    fields = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name) for name in value.__slots__}
    flat = [item for entry in fields.values() for item in (entry if isinstance(entry, list | tuple) else [entry])]
    return [item for item in flat if isinstance(item, torch.Tensor)]


def test_int8_counts_one_byte_for_linear_weights_except_the_head():
    config = small(LlamaConfig, tie_word_embeddings=False)
    linear = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    rest = 2 * 64 * 32 + 9 * 32
    assert estimate(config, torch.float16, 0, "int8") == MemoryEstimate(linear + 2 * rest, 0)


def test_estimate_leaves_the_configuration_alone():
    config = small(Qwen3Config)
    before = config.to_dict()
    estimate(config, torch.float16, 10)
    assert config.to_dict() == before


def test_estimate_allocates_nothing_and_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    huge = small(LlamaConfig, hidden_size=8192, intermediate_size=28672, num_hidden_layers=12)
    assert estimate(huge, torch.float16, 1).weights_bytes > 15 * 2**30
    assert torch.equal(before, torch.random.get_rng_state())


def test_needs_are_split_by_the_longest_matching_name():
    one = MemoryEstimate(1, 0)
    names = ("model.embed_tokens.weight", "model.layers.1.x", "model.layers.10.x", "lm_head.weight")
    shares = dict.fromkeys(names, one)
    places = {"": "cuda:0", "model.layers.1": "cuda:1", "lm_head": "cpu"}
    needed = placement.needed_by_device(shares, places)
    assert {device: need.weights_bytes for device, need in needed.items()} == {"cuda:0": 2, "cuda:1": 1, "cpu": 1}


def test_max_memory_bounds_what_is_free():
    assert placement.free_bytes("cpu", {"cpu": "2MiB"}) == 2 * 2**20
    assert placement.free_bytes("cpu", {"cpu": 10**18}) < 10**18
    assert placement.free_bytes("cpu", {0: 1}) > 2**20


def test_memory_of_all_gpus_is_added_up(monkeypatch):
    monkeypatch.setattr(placement, "num_gpus", lambda: 2)
    free = {0: 3 * 2**30, 1: 5 * 2**30}
    module = type("Gpu", (), {"mem_get_info": staticmethod(lambda device: (free[device.index], 0))})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert placement.free_bytes("all GPUs") == 8 * 2**30
    assert placement.free_bytes("all GPUs", {0: "1GiB"}) == 6 * 2**30
    need = {"all GPUs": MemoryEstimate(9 * 2**30, 0)}
    with pytest.raises(UserError, match=r"needs about 9\.70 GiB on all GPUs.*8\.00 GiB are available.*int8"):
        placement.check_memory("m", need)
