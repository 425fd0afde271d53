"""What a checkpoint says about itself: stop ids, settings that would change the draw, and a fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import edit, saved_tiny, source

from clasp_core import checkpoint
from clasp_core.tiny import TinyModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_tiny(tmp_path)


def test_mixed_dtypes_are_counted():
    model = TinyModel(width=32).checkpoint().hf_model
    model.model.norm.double()
    info = checkpoint.describe(model)
    assert info["dtype"] == "float32"
    assert info["num_parameters_by_dtype"] == {"float32": info["num_parameters"] - 32, "float64": 32}


def test_stop_ids_are_the_union_of_all_that_the_checkpoint_names(folder):
    edit(folder / "generation_config.json", eos_token_id=[2, 7])
    edit(folder / "config.json", eos_token_id=5)
    loaded = source(folder).load()
    assert loaded.tokenizer.eos_token_id == 1
    assert loaded.stop_ids == (1, 2, 5, 7)
    assert loaded.info["stop_ids"] == [1, 2, 5, 7]
    assert loaded.hf_model.generation_config.eos_token_id == [1, 2, 5, 7]


def test_generation_settings_of_the_checkpoint_are_noticed_and_neutralised(folder):
    edit(folder / "generation_config.json", repetition_penalty=1.3, do_sample=True, temperature=0.6, top_p=1.0)
    loaded = source(folder).load()
    found = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.6}
    assert loaded.info["generation_config_neutralised"] == found
    ids = torch.tensor([loaded.tokenizer.encode("Hello")])
    out = loaded.hf_model.generate(ids, max_new_tokens=24, pad_token_id=1)
    again = ids
    while again.shape[1] < out.shape[1]:
        with torch.inference_mode():
            again = torch.cat((again, loaded.hf_model(again).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(out, again)


def test_plain_generation_settings_are_no_news(folder):
    assert source(folder).load().info["generation_config_neutralised"] == {}


def test_fingerprint_does_not_depend_on_where_the_checkpoint_lies(folder, tmp_path):
    first = source(folder).load().info["fingerprint"]
    edit(folder / "config.json", _model_name_or_path="another")
    assert first == source(folder.rename(tmp_path / "elsewhere")).load().info["fingerprint"]


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"dtype": "float64"}, {"num_layers": 5}, {"max_position_embeddings": 99}], ids=str
)
def test_fingerprint_tells_models_apart(change):
    assert TinyModel().load().info["fingerprint"] != TinyModel(**change).load().info["fingerprint"]


def test_fingerprint_notices_one_changed_weight():
    model = TinyModel().checkpoint().hf_model
    before = checkpoint.fingerprint(model)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    assert checkpoint.fingerprint(model) != before
