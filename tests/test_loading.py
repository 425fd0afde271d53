"""Checkpoints come back as they were saved, say where they are from, and are refused in one line where they must be."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import saved_tiny, source
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from clasp_core import loading, placement
from clasp_core.checkpoint import LoadedModel
from clasp_core.deep import DeepModel
from clasp_core.errors import UserError
from clasp_core.loading import EmbeddedModel
from clasp_core.prompting import Prompter
from clasp_core.tiny import TinyModel

ROOT = Path(__file__).parent.parent
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_tiny(tmp_path)


# ---- what is loaded


def test_saved_checkpoint_comes_back_with_its_logits_and_tokenizer(folder):
    loaded = source(folder).load()
    original = TinyModel(dtype="float16").checkpoint()
    ids = torch.tensor([original.tokenizer.encode("Hello there")])
    for ours, theirs in zip(loaded.hf_model.parameters(), original.hf_model.parameters(), strict=True):
        assert torch.equal(ours, theirs.float())
    half = source(folder, dtype="float16").load()
    with torch.inference_mode():
        assert torch.equal(half.hf_model(ids).logits, original.hf_model(ids).logits)
    assert loaded.tokenizer.encode("Hello there") == ids[0].tolist()
    assert not any(parameter.requires_grad for parameter in loaded.hf_model.parameters())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_is_what_was_asked_for_and_read_back(folder, dtype):
    loaded = source(folder, dtype=dtype).load()
    assert loaded.info["dtype"] == dtype
    assert loaded.info["num_parameters_by_dtype"] == {dtype: loaded.info["num_parameters"]}
    assert loaded.info["weights_bytes"] == loaded.info["num_parameters"] * getattr(torch, dtype).itemsize


def test_manifest_says_where_the_model_comes_from(folder):
    info = source(folder, prompt="plain").load().info
    assert info["repo"] == str(folder)
    assert info["commit"] is None
    assert info["attention"] == "sdpa"
    assert info["device_map"] == {"": "cpu"}
    assert info["num_layers"] == 6
    assert info["distance_to_hf"] < 1e-4
    json.dumps(info)


def test_explicit_device_map_is_handed_on_and_recorded(folder, monkeypatch):
    real, places = AutoModelForCausalLM.from_pretrained, {"model": 0, "lm_head": "cuda:1"}

    def on_two_gpus(*args: Any, device_map: dict[str, str], **kwargs: Any) -> Any:
        model, report = real(*args, **kwargs)
        model.hf_device_map = {"model": 0, "lm_head": device_map["lm_head"]}
        return model, report

    monkeypatch.setattr(placement, "free_bytes", lambda device, limits: 2**40)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", on_two_gpus)
    info = source(folder, device_map=places).load().info
    assert info["device_map"] == {"model": "cuda:0", "lm_head": "cuda:1"}


def test_auto_without_a_gpu_is_the_cpu(folder, monkeypatch):
    monkeypatch.setattr(placement, "num_gpus", lambda: 0)
    assert source(folder, device="auto").load().info["device_map"] == {"": "cpu"}


def test_configuration_is_read_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert source(folder).config().num_hidden_layers == 6
    with pytest.raises(UserError, match="cannot be loaded"):
        source(folder).load()


# ---- refusals before weights are read


@pytest.fixture
def without_weights(monkeypatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)


@pytest.mark.usefixtures("without_weights")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "unknown dtype 'float8'; known are float16, bfloat16"),
        ({"device": "gpu"}, "unknown device 'gpu'; known are cpu, cuda"),
        ({"device": "cpu:1"}, "unknown device"),
        ({"device": "cuda"}, "no GPU is visible"),
        ({"device": "cuda:7"}, "no GPU is visible"),
        ({"quantization": "int4"}, "unknown quantization 'int4'"),
        ({"prompt": "vicunia"}, "unknown prompt format 'vicunia'"),
        ({"repo": "/nowhere/tiny"}, "/nowhere/tiny does not exist"),
        ({"max_memory": {"cpu": "1KiB"}}, r"needs .* on cpu .*0\.00 GiB are available; use a smaller"),
        ({"device_map": {"model": "cpu"}}, "not lm_head.weight"),
    ],
)
def test_impossible_settings_are_refused_before_weights_are_read(folder, monkeypatch, settings, message):
    monkeypatch.setattr(placement, "num_gpus", lambda: 0)
    with pytest.raises(UserError, match=message) as caught:
        source(folder, **settings).load()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("without_weights")
def test_gpu_number_beyond_those_there_is_refused(folder, monkeypatch):
    monkeypatch.setattr(placement, "num_gpus", lambda: 1)
    with pytest.raises(UserError, match=r"'cuda:7' asked for, but only 1 GPU\(s\), numbered from 0"):
        source(folder, device="cuda:7").load()


@pytest.mark.usefixtures("without_weights")
def test_int8_needs_bitsandbytes_and_then_a_gpu(folder, monkeypatch):
    monkeypatch.setattr(placement, "num_gpus", lambda: 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'clasp-bench\[int8\]'"):
        source(folder, quantization="int8").load()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="needs a GPU"):
        source(folder, quantization="int8").load()


@pytest.mark.usefixtures("without_weights")
def test_chat_format_without_a_template_is_refused_before_weights_are_read(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="chat template"):
        source(folder).load()


@pytest.mark.usefixtures("without_weights")
def test_unsupported_family_is_refused_before_weights_are_read(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'gpt2' is not supported.*llama"):
        source(tmp_path).load()


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "martian"}', "not json"])
def test_folder_without_a_usable_configuration_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=str(tmp_path)) as caught:
        source(tmp_path).config()
    assert "\n" not in str(caught.value)


# ---- broken checkpoints


def test_checkpoint_without_a_tokenizer_is_refused(folder):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        source(folder).load()


def test_weights_that_the_checkpoint_lacks_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights.*model\.layers\.2\.mlp\.up_proj\.weight"):
        source(folder).load()


def test_damaged_weights_are_refused_in_one_line(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="damaged"):
        source(folder).load()


def test_quiet_offload_after_loading_is_refused_unless_allowed(folder, monkeypatch):
    real = AutoModelForCausalLM.from_pretrained

    def half_on_disk(*args: Any, **kwargs: Any) -> Any:
        model, report = real(*args, **kwargs)
        model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
        return model, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", half_on_disk)
    with pytest.raises(UserError, match="landed on disk"):
        source(folder).load()
    allowed = source(folder, allow_offload=True).load()
    assert allowed.info["device_map"] == {"model": "cpu", "lm_head": "disk"}


# ---- models that come as GGUF


@pytest.fixture
def embedded(tmp_path, monkeypatch) -> EmbeddedModel:
    """A stand-in whose "GGUF" is a text file and whose conversion saves a tiny model."""
    gguf = tmp_path / "files/Toy-1M.Q4_1.gguf"
    gguf.parent.mkdir()
    gguf.write_text("weights")

    def convert(gguf: Path, folder: Path) -> None:
        opened = TinyModel(seed=len(gguf.read_text())).checkpoint()
        opened.hf_model.save_pretrained(folder)
        opened.tokenizer.save_pretrained(folder)

    monkeypatch.setattr(loading, "save_dense", convert)
    return EmbeddedModel(
        name="toy", gguf=str(gguf), cache_dir=str(tmp_path / "models/toy"), sha256=sha256("weights"), dtype="float32",
        device="cpu", prompt="chat",
    )  # fmt: skip


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def forbid_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "save_dense", lambda *args: pytest.fail("converted again"))


def test_converted_model_is_read_from_the_cache_even_without_its_gguf(embedded, monkeypatch):
    first = embedded.load()
    forbid_conversion(monkeypatch)
    Path(embedded.gguf).unlink()
    second = embedded.load()
    assert first.info == second.info
    assert embedded.config().num_hidden_layers == 6
    assert [path.name for path in Path(embedded.cache_dir).parent.iterdir()] == ["toy"]


def test_label_says_that_the_weights_are_dense(embedded):
    loaded = embedded.load()
    assert loaded.label == "Toy-1M (GGUF Q4_1 de-quantised to dense weights)"
    assert loaded.info["gguf_sha256"] == embedded.sha256
    assert loaded.info["dtype"] == "float32"


def test_another_gguf_is_converted_anew(embedded):
    first = embedded.load()
    Path(embedded.gguf).write_text("other weights")
    second = dataclasses.replace(embedded, sha256=sha256("other weights")).load()
    assert first.info["fingerprint"] != second.info["fingerprint"]


def test_another_release_of_transformers_converts_anew(embedded, monkeypatch):
    embedded.load()
    forbid_conversion(monkeypatch)
    monkeypatch.setattr(loading.transformers, "__version__", "5.99.0")
    with pytest.raises(pytest.fail.Exception, match="converted again"):
        embedded.load()


def test_missing_gguf_names_the_command_that_fetches_it(embedded):
    Path(embedded.gguf).unlink()
    for attempt in (embedded.load, embedded.config):
        with pytest.raises(UserError, match=r"is not there; fetch it with `python -m clasp_core\.fetch toy`"):
            attempt()


def test_damaged_gguf_is_refused(embedded):
    Path(embedded.gguf).write_text("weight")
    with pytest.raises(UserError, match=f"sha256 {sha256('weight')}, expected {sha256('weights')}"):
        embedded.load()


def test_interrupted_conversion_leaves_nothing_behind(embedded, monkeypatch):
    def stop_half_way(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loading, "save_dense", stop_half_way)
        with pytest.raises(KeyboardInterrupt):
            embedded.load()
    assert list(Path(embedded.cache_dir).parent.iterdir()) == []
    assert embedded.load().target.num_layers == 6


def test_conversion_that_another_process_finished_first_is_kept(embedded, monkeypatch):
    convert = loading.save_dense

    def slow(gguf: Path, folder: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(loading, "save_dense", convert)
            embedded.load()
        convert(gguf, folder)
        monkeypatch.setattr(Path, "exists", lambda self, **kwargs: False)

    monkeypatch.setattr(loading, "save_dense", slow)
    assert embedded.load().target.num_layers == 6


# ---- the model that is embedded


@pytest.fixture(scope="module")
def smollm2() -> EmbeddedModel:
    model = EmbeddedModel(
        name="smollm2-135m", gguf=str(ROOT / "data/models/smollm2-135m-gguf/SmolLM2-135M-Instruct.Q4_1.gguf"),
        cache_dir=str(ROOT / "data/models/smollm2-135m"), sha256=GGUF_SHA256, dtype="float32", device="cpu",
        prompt="chat",
    )  # fmt: skip
    if not Path(model.gguf).is_file():
        pytest.skip("fetch it with `python -m clasp_core.fetch smollm2-135m`")
    return model


@pytest.fixture(scope="module")
def loaded_smollm2(smollm2) -> LoadedModel:
    return smollm2.load()


@pytest.mark.model
def test_embedded_model_is_converted_at_most_once(smollm2, loaded_smollm2, monkeypatch):
    forbid_conversion(monkeypatch)
    assert smollm2.load().info == loaded_smollm2.info
    assert loaded_smollm2.info["num_parameters"] == 134_515_008
    assert loaded_smollm2.target.num_layers == 30
    assert loaded_smollm2.stop_ids == (2,)


@pytest.mark.model
def test_embedded_models_weights_are_the_ggufs_de_quantised(smollm2, loaded_smollm2):
    gguf = importlib.import_module("gguf")
    parts = [(layer, part) for layer in (0, 29) for part in ("up", "down")]
    wanted = {f"blk.{i}.ffn_{part}.weight": f"model.layers.{i}.mlp.{part}_proj.weight" for i, part in parts}
    loaded = dict(loaded_smollm2.hf_model.named_parameters())
    tensors = [t for t in gguf.GGUFReader(Path(smollm2.gguf)).tensors if t.name in wanted]
    assert len(tensors) == 4
    for tensor in tensors:
        dense = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(loaded[wanted[tensor.name]], dense)


@pytest.mark.model
def test_embedded_models_chat_prompt_has_known_ids(loaded_smollm2):
    prompter = Prompter(loaded_smollm2.tokenizer, "chat")
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert prompter.ids(["Hi"], []) == [*system, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]


@pytest.mark.model
def test_embedded_model_knows_a_capital(loaded_smollm2):
    prompter = Prompter(loaded_smollm2.tokenizer, loaded_smollm2.prompt)
    ids = torch.tensor([prompter.ids(["What is the capital of France?"], [])])
    out = loaded_smollm2.hf_model.generate(ids, max_new_tokens=12)
    assert prompter.text_of(out[0, ids.shape[1] :].tolist()) == "The capital of France is Paris."


@pytest.mark.model
def test_expanded_embedded_model_answers_almost_alike(smollm2, loaded_smollm2):
    settings = {"dtype": "float32", "device": "cpu", "prompt": "chat"}
    deep60 = DeepModel(name="deep", base=smollm2, epsilon=0.05, **settings).load()
    assert deep60.label == (
        "SmolLM2-135M-Instruct (GGUF Q4_1 de-quantised to dense weights) expanded to 60 layers (odd layers are copies "
        "scaled by 0.05); not a released model"
    )
    ids = torch.tensor([Prompter(loaded_smollm2.tokenizer, "chat").ids(["What is the capital of France?"], [])])
    with torch.inference_mode():
        first, second = (model.hf_model(ids).logits[0].argmax(-1) for model in (loaded_smollm2, deep60))
    assert float((first == second).double().mean()) > 0.7
