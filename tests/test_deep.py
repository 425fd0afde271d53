"""An expanded model is its base where the copies do nothing, near it otherwise, and says what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved_tiny, small, source
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from clasp_core.deep import DeepModel, expand
from clasp_core.errors import UserError
from clasp_core.tiny import TinyModel


def deep(**settings: Any) -> DeepModel:
    defaults = {"name": "d", "epsilon": 0.05, "dtype": "float32", "device": "cpu", "prompt": "chat"}
    return DeepModel(base=TinyModel(num_layers=3), **defaults | settings)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(5, 25)[None]).logits


def test_expansion_with_vanishing_scale_is_the_base():
    base, expanded = TinyModel(num_layers=3).load(), deep(epsilon=1e-30).load()
    assert expanded.target.num_layers == 6
    assert torch.equal(logits_of(base.hf_model), logits_of(expanded.hf_model))


def test_expansion_is_near_its_base_but_not_the_same():
    sources = (TinyModel(num_layers=3), deep(), deep(epsilon=1.0))
    base, near, far = (logits_of(source.load().hf_model) for source in sources)
    assert 0 < float((near - base).norm()) < 0.3 * float((far - base).norm())


def test_odd_layers_are_scaled_copies_with_storage_of_their_own():
    base, expanded = TinyModel(num_layers=3).load(), deep().load()
    for index, layer in enumerate(expanded.hf_model.model.layers):
        original = dict(base.hf_model.model.layers[index // 2].named_parameters())
        for name, weight in layer.named_parameters():
            is_scaled = index % 2 == 1 and ("o_proj" in name or "down_proj" in name)
            assert torch.equal(weight, original[name] * 0.05 if is_scaled else original[name])
    storages = [parameter.untyped_storage().data_ptr() for parameter in expanded.hf_model.parameters()]
    assert len(set(storages)) == len(storages)


def test_expansion_is_declared():
    loaded = deep().load()
    assert loaded.info["planted_layers"] == [1, 3, 5]
    assert loaded.info["num_layers"] == 6
    assert loaded.name == "d"
    assert "expanded to 6 layers (odd layers are copies scaled by 0.05); not a released model" in loaded.label
    assert loaded.info["label"] == loaded.label
    assert deep().config().num_hidden_layers == 6


def test_hugging_faces_cached_generation_works_on_an_expansion():
    model = deep().load().hf_model
    ids = torch.arange(5, 25)[None]
    out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    again = ids
    for _ in range(8):
        with torch.inference_mode():
            again = torch.cat((again, model(again, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, again)


def test_settings_of_an_expansion_replace_the_bases():
    loaded = deep(dtype="bfloat16", prompt="plain").load()
    assert loaded.info["dtype"] == "bfloat16"
    assert loaded.prompt == "plain"


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, SmolLM3Config])
def test_lists_with_an_entry_for_each_layer_are_doubled(kind):
    config = small(kind)
    model = AutoModelForCausalLM.from_config(config)
    before = logits_of(model.eval())
    rope = list(getattr(config, "no_rope_layers", []))
    expand(model, 1e-30)
    assert torch.equal(before, logits_of(model))
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(8))
    assert all(layer.self_attn.config is model.config for layer in model.model.layers)
    assert list(getattr(config, "no_rope_layers", [])) == [value for value in rope for _ in range(2)]
    assert len(getattr(config, "layer_types", None) or [None] * 8) == 8


@pytest.mark.parametrize("epsilon", [0.0, -0.1, float("inf"), float("nan")])
def test_useless_scales_are_refused(epsilon):
    with pytest.raises(UserError, match="epsilon"):
        deep(epsilon=epsilon).load()


def test_mixtures_of_experts_are_not_expanded():
    model = AutoModelForCausalLM.from_config(small(MixtralConfig))
    with pytest.raises(UserError, match=r"mixtral.*down_proj"):
        expand(model, 0.05)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": small(MixtralConfig, num_local_experts=4),
    "qwen3_moe": small(Qwen3MoeConfig, **EXPERTS, moe_intermediate_size=24),
    "some layers": small(Qwen3MoeConfig, **EXPERTS, moe_intermediate_size=24, mlp_only_layers=[0, 1]),
    "olmoe": small(OlmoeConfig, **EXPERTS),
}


def of_folder(folder: Path, **settings: Any) -> DeepModel:
    return replace(deep(), base=source(folder, **settings))


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize("config", MIXTURES.values(), ids=MIXTURES)
def test_mixture_is_refused_before_its_weights_are_read(tmp_path, config):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"cannot expand a {config.model_type} model.*mixture"):
        of_folder(tmp_path).load()


@pytest.mark.usefixtures("without_weights")
def test_quantised_base_is_refused_before_its_weights_are_read(tmp_path):
    folder = saved_tiny(tmp_path)
    with pytest.raises(UserError, match="d needs a dense base, but m is quantised"):
        of_folder(folder, quantization="int8").load()
    config = TinyModel().config()
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(folder)
    with pytest.raises(UserError, match="d needs a dense base, but m is quantised"):
        of_folder(folder).load()


def test_dense_base_from_a_folder_is_expanded(tmp_path):
    assert of_folder(saved_tiny(tmp_path)).load().target.num_layers == 12
