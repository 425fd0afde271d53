"""Every file of conf/model/ composes, builds its source, and takes the overrides that users type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from clasp_core.deep import DeepModel
from clasp_core.fetch import SMOLLM2_135M
from clasp_core.loading import EmbeddedModel, HubModel
from clasp_core.placement import CHECKED_POSITIONS
from clasp_core.synthetic import SyntheticModel
from clasp_core.tiny import TinyModel

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "conf/model").glob("[!_]*.yaml"))
SYNTHETIC = {"synthetic-llama3-8b", "synthetic-llama3-70b"}
HUB = sorted(set(NAMES) - {"smollm2-135m", "smollm2-135m-deep", "tiny"} - SYNTHETIC)
every_model = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What run.py registers, and only for the length of a test."""
    was_there = OmegaConf.has_resolver("repository")
    OmegaConf.register_new_resolver("repository", lambda: os.path.relpath(ROOT), replace=True)
    yield
    if not was_there:
        OmegaConf.clear_resolver("repository")


def built(name: str, *overrides: str) -> Any:
    """The source that `model=name` and some overrides of `model.*` build."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose(overrides=[f"+model={name}", *(f"model.{override}" for override in overrides)])
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return instantiate(config.model, _convert_="all")


def test_there_are_fifteen_models():
    assert len(NAMES) == 15
    assert len(HUB) == 10


@every_model
def test_every_model_is_built_under_its_own_name(name):
    wanted = {"smollm2-135m": EmbeddedModel, "smollm2-135m-deep": DeepModel, "tiny": TinyModel}.get(name, HubModel)
    wanted = SyntheticModel if name in SYNTHETIC else wanted
    model = built(name)
    assert type(model) is wanted
    assert model.name == name


@every_model
def test_dtype_device_and_prompt_of_every_model_can_be_overridden(name):
    model = built(name, "dtype=float64", "device=cpu", "prompt=vicuna")
    for part in (model, getattr(model, "base", model)):
        assert (part.dtype, part.device, part.prompt) == ("float64", "cpu", "vicuna")


@pytest.mark.parametrize("name", HUB)
def test_every_setting_of_a_hub_model_can_be_overridden_without_a_plus(name):
    settings = ("repo=/somewhere", "revision=v1", "quantization=int8", "allow_offload=true", "positions=9")
    model = built(name, *settings, "device_map={model: cuda:0, lm_head: 1}", "max_memory={0: 20GiB, cpu: 3}")
    assert (model.repo, model.revision, model.quantization) == ("/somewhere", "v1", "int8")
    assert (model.allow_offload, model.positions) == (True, 9)
    assert model.device_map == {"model": "cuda:0", "lm_head": 1}
    assert model.max_memory == {0: "20GiB", "cpu": 3}


@pytest.mark.parametrize("name", HUB)
def test_defaults_of_the_hub_models_are_those_of_the_class(name):
    found = built(name)
    own = {"name": name, "repo": "r", "dtype": "float16", "device": "cpu", "prompt": "plain"}
    default = HubModel(**own)
    shared = {entry.name for entry in fields(HubModel)} - set(own) - {"quantization"}
    assert {key: getattr(found, key) for key in shared} == {key: getattr(default, key) for key in shared}
    assert found.quantization == ("int8" if name.endswith("int8") else None)
    assert found.positions == CHECKED_POSITIONS


def test_tiny_file_says_what_the_class_says():
    assert built("tiny") == TinyModel()


@pytest.mark.parametrize("entry", fields(TinyModel), ids=lambda entry: entry.name)
def test_every_setting_of_the_tiny_model_can_be_overridden_without_a_plus(entry):
    value = {"str": "x", "int": 7, "float": 0.5}[entry.type]
    assert getattr(built("tiny", f"{entry.name}={value}"), entry.name) == value


def test_scale_of_the_expanded_model_can_be_overridden():
    assert built("smollm2-135m-deep", "epsilon=0.1").epsilon == 0.1
    assert built("smollm2-135m-deep", "base.gguf=x").base.gguf == "x"


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"smollm2-135m-deep"} - SYNTHETIC))
def test_settings_that_a_model_has_not_are_refused(name):
    with pytest.raises(HydraException, match="epsilon"):
        built(name, "epsilon=0.1")


@pytest.mark.parametrize("start", ["repository", "elsewhere"])
def test_files_of_the_embedded_model_are_found_from_any_folder(tmp_path, monkeypatch, start):
    monkeypatch.chdir(ROOT if start == "repository" else tmp_path)
    model = built("smollm2-135m")
    assert Path(model.gguf).resolve() == (ROOT / SMOLLM2_135M.path).resolve()
    assert Path(model.cache_dir).resolve() == (ROOT / "data/models/smollm2-135m").resolve()
    assert model.sha256 == SMOLLM2_135M.sha256


def test_checkpoint_without_a_file_of_its_own_is_named_on_the_command_line():
    with pytest.raises(MissingMandatoryValue, match="name"):
        built("_hub")
    settings = ("name=mine", "repo=/a/folder", "dtype=float32", "device=cpu", "prompt=plain")
    assert built("_hub", *settings).repo == "/a/folder"
