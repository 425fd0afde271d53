"""Our wiring of Hugging Face's modules: the same numbers as theirs for every supported family; the rest refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import distance, ids, llama_config, make_target, random_model
from torch import Tensor

from clasp_core import families
from clasp_core.attention import Span
from clasp_core.errors import UserError
from clasp_core.families import QK_NORM, Wiring, wiring_of
from clasp_core.loading import HubModel
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "llama-biases": lambda: tf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: tf.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "llama-one-head-group": lambda: tf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-rope-llama3": lambda: tf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-rope-linear": lambda: tf.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama-rope-yarn": lambda: tf.LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: tf.Qwen2Config(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=12),
    "smollm3": lambda: tf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=24, mlp_only_layers=[1]),
    "olmoe": lambda: tf.OlmoeConfig(**SIZES, **EXPERTS, clip_qkv=0.8),
}
TOLERANCE = 3e-5
"""Absolute, on logits whose standard deviation is about 2.5, in float32."""


@cache
def wired(name: str) -> TargetModel:
    """A family's small model; behind a plus sign the engine, if it is not the eager one."""
    family, _, engine = name.partition("+")
    config = CONFIGS[family]()
    return TargetModel(random_model(config, seed=5), wiring_of(config), engine or "eager")


@cache
def reference(name: str, num: int = 24) -> tuple[list[int], Tensor, tuple[Tensor, ...]]:
    """Tokens, and Hugging Face's logits and hidden states for them."""
    tokens = ids(num, seed=3)
    with torch.inference_mode():
        out = wired(name).model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return tokens, out.logits[0], tuple(states[0] for states in out.hidden_states)


every_family = pytest.mark.parametrize("name", [*CONFIGS, *(f"{family}+compiled" for family in CONFIGS)])


def test_every_supported_family_is_compared_with_hf() -> None:
    assert {wired(name).config.model_type for name in CONFIGS} == set(QK_NORM)


def test_the_special_features_of_the_small_models_are_switched_on() -> None:
    """Else equality would prove nothing about them."""
    bounded = wired("olmoe")
    hidden = reference("olmoe")[2]
    block = bounded.model.model.layers[0]
    queries = block.self_attn.q_norm(block.self_attn.q_proj(block.input_layernorm(hidden[0])))
    assert bounded.wiring.clip_qkv == 0.8
    assert float(queries.abs().max()) > 0.8
    assert {bool(b.self_attn.use_rope) for b in wired("smollm3").model.model.layers} == {True, False}
    assert float(wired("qwen2").model.model.layers[0].self_attn.q_proj.bias.abs().max()) > 0.1
    assert wired("qwen3").head_width == 12
    assert len({type(block.mlp).__name__ for block in wired("qwen3_moe").model.model.layers}) == 2


@every_family
def test_prefill_logits_equal_hf(name: str) -> None:
    target = wired(name)
    tokens, logits, _ = reference(name)
    ours = forward(target, torch.tensor(tokens), Span.causal(0, len(tokens)), target.new_cache(len(tokens))).logits
    gap = distance(ours, logits)
    print(f"{name}: largest difference of prefill logits {gap:.2g}")
    assert gap < TOLERANCE
    assert float(logits.std()) > 1


@every_family
def test_token_by_token_logits_equal_hf(name: str) -> None:
    target = wired(name)
    tokens, logits, _ = reference(name)
    cache = target.new_cache(len(tokens))
    rows = [
        forward(target, torch.tensor([token]), Span.causal(at, 1), cache).logits[0] for at, token in enumerate(tokens)
    ]
    assert distance(torch.stack(rows), logits) < TOLERANCE


@every_family
@pytest.mark.parametrize("drafted", [1, 4, 11])
def test_rows_over_a_prefix_equal_hf(name: str, drafted: int) -> None:
    target = wired(name)
    tokens, logits, _ = reference(name)
    cache = target.new_cache(len(tokens))
    start = len(tokens) - drafted - 1
    forward(target, torch.tensor(tokens[:start]), Span.causal(0, start), cache)
    ours = forward(target, torch.tensor(tokens[start:]), Span.causal(start, drafted + 1), cache).logits
    assert distance(ours, logits[start:]) < TOLERANCE


@every_family
def test_hidden_states_equal_hf_and_the_last_is_before_the_norm(name: str) -> None:
    target = wired(name)
    tokens, _, theirs = reference(name)
    cache = target.new_cache(len(tokens))
    ours = forward(target, torch.tensor(tokens), Span.causal(0, len(tokens)), cache, keep_hidden=True).hidden
    assert ours is not None
    assert len(ours) == len(theirs) == target.num_layers + 1
    for mine, his in zip(ours[:-1], theirs[:-1], strict=True):
        assert distance(mine, his) < TOLERANCE
    assert distance(target.final_norm(ours[-1]), theirs[-1]) < TOLERANCE
    assert distance(ours[-1], theirs[-1]) > 0.1


@every_family
def test_each_layer_alone_equals_hf(name: str) -> None:
    """Fed with HF's input of a layer, ours gives HF's output of it; the last one included."""
    target = wired(name)
    tokens, _, theirs = reference(name)
    outputs: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).reshape(len(tokens), -1))

    hooks = [block.register_forward_hook(keep) for block in target.model.model.layers]
    with torch.inference_mode():
        target.model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    cache = target.new_cache(len(tokens))
    for layer in range(target.num_layers):
        ours = target.layer(layer, theirs[layer], Span.causal(0, len(tokens)), cache)
        assert distance(ours, outputs[layer]) < TOLERANCE
        assert distance(ours, theirs[layer]) > 0.01


@every_family
def test_rows_asked_for_are_the_rows_of_the_whole(name: str) -> None:
    target = wired(name)
    tokens, logits, _ = reference(name)
    cache = target.new_cache(len(tokens))
    span = Span.causal(0, len(tokens))
    out = forward(target, torch.tensor(tokens), span, cache, rows=slice(-1, None), keep_hidden=True)
    assert out.hidden is not None
    assert out.logits.shape == (1, 64)
    assert all(states.shape == (1, 32) for states in out.hidden)
    assert distance(out.logits, logits[-1:]) < TOLERANCE


@every_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_check_at_load_passes_for_a_right_wiring(name: str, dtype: torch.dtype) -> None:
    family, _, engine = name.partition("+")
    config = CONFIGS[family]()
    target = TargetModel(random_model(config, seed=5, dtype=dtype), wiring_of(config), engine or "eager")
    assert target.dtype == dtype
    assert target.check_against_hf() < {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("qwen3", {"qk_norm": None}),
        ("qwen3_moe", {"qk_norm": None}),
        ("olmoe", {"qk_norm": None}),
        ("olmoe", {"clip_qkv": None}),
        ("olmoe", {"clip_qkv": 0.5}),
    ],
)
def test_the_check_at_load_refuses_a_wrong_wiring(name: str, wrong: dict[str, Any]) -> None:
    right = wired(name)
    fields = {"qk_norm": right.wiring.qk_norm, "clip_qkv": right.wiring.clip_qkv, **wrong}
    target = TargetModel(right.model, Wiring(right.wiring.model_type, **fields))
    with pytest.raises(UserError, match=rf"wiring of '{right.wiring.model_type}' does not reproduce"):
        target.check_against_hf()


def test_the_check_at_load_refuses_a_family_that_forgot_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "QK_NORM", {**QK_NORM, "qwen3": None})
    target = TargetModel(wired("qwen3").model, wiring_of(wired("qwen3").config))
    with pytest.raises(UserError, match="does not reproduce Hugging Face's logits"):
        target.check_against_hf()


def test_the_check_at_load_refuses_nan() -> None:
    target = make_target(layers=2)
    with torch.no_grad():
        target.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError):
        target.check_against_hf()


# ---- skipped sub-layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_skipped_sublayer_is_its_identity(name: str) -> None:
    """Skipping equals silencing the sub-layer's last projection in a copy of the model."""
    target = wired(name)
    tokens = ids(10, seed=8)
    span = Span.causal(0, 10)
    skip = LayerSkip.sublayers(4, attn=[0, 2], mlp=[2, 3])
    skipped = forward(target, torch.tensor(tokens), span, target.new_cache(10), skip=skip).logits
    copy = TargetModel(random_model(CONFIGS[name](), seed=5), target.wiring)
    silent = [copy.model.model.layers[i].self_attn.o_proj for i in (0, 2)]
    silent += [copy.model.model.layers[i].mlp for i in (2, 3)]
    with torch.no_grad():
        for module in silent:
            for key, weight in module.named_parameters():
                if "down_proj" in key or module in silent[:2]:
                    weight.zero_()
    silenced = forward(copy, torch.tensor(tokens), span, copy.new_cache(10)).logits
    assert distance(skipped, silenced) < TOLERANCE
    assert distance(skipped, forward(target, torch.tensor(tokens), span, target.new_cache(10)).logits) > 0.1


def test_a_skipped_layer_writes_nothing() -> None:
    target = wired("llama")
    cache = target.new_cache(6)
    skip = LayerSkip.sublayers(4, attn=[1, 2], mlp=[0, 2])
    forward(target, torch.tensor(ids(6)), Span.causal(0, 6), cache, skip=skip)
    written = [bool(cache.read(layer, 6)[0].any()) for layer in range(4)]
    assert written == [True, False, False, True]


# ---- refusals


def _rope(**parameters: Any) -> Any:
    return tf.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4, **parameters})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gemma2": (lambda: tf.Gemma2Config(**SIZES), "'gemma2' is not supported"),
    "phi3": (lambda: tf.Phi3Config(**SIZES), "'phi3' is not supported"),
    "olmo2": (lambda: tf.Olmo2Config(**SIZES), "'olmo2' is not supported"),
    "mamba": (lambda: tf.MambaConfig(), "'mamba' is not supported"),
    "rwkv": (lambda: tf.RwkvConfig(), "'rwkv' is not supported"),
    "mistral with a window": (lambda: tf.MistralConfig(**SIZES, sliding_window=16), "sliding window of 16"),
    "mixtral with a window": (lambda: tf.MixtralConfig(**SIZES, sliding_window=16), "sliding window of 16"),
    "qwen2 with windows in some layers": (
        lambda: tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=2),
        "sliding_attention.*qwen2|window of 16",
    ),
    "qwen3_moe with a window": (
        lambda: tf.Qwen3MoeConfig(**SIZES, use_sliding_window=True, sliding_window=16),
        "sliding window of 16",
    ),
    "dynamic rope": (lambda: _rope(rope_type="dynamic", factor=2.0), "'dynamic' depends on the sequence"),
    "longrope": (
        lambda: _rope(
            rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=4.0,
            original_max_position_embeddings=64,
        ),
        "'longrope' depends on the sequence",
    ),
    "partial rotary": (lambda: _rope(rope_type="default", partial_rotary_factor=0.5), r"partial rotary.*0\.5"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_wired_is_refused_by_name(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(UserError, match=words) as caught:
        wiring_of(config())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["gemma2", "mamba", "mistral with a window", "dynamic rope"])
def test_refusal_comes_before_any_weights(case: str, tmp_path: Path) -> None:
    """The folder holds a configuration only: reading anything more would be another error."""
    config, words = REFUSED[case]
    config().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    model = HubModel(name="x", repo=str(tmp_path), dtype="float32", device="cpu", prompt="plain")
    with pytest.raises(UserError, match=words):
        model.load()


@pytest.mark.parametrize("written", ["partial_rotary_factor", "rope_scaling"])
def test_old_spellings_of_rope_in_a_checkpoint_are_seen(written: str, tmp_path: Path) -> None:
    value = {"partial_rotary_factor": 0.25, "rope_scaling": {"type": "dynamic", "factor": 2.0}}[written]
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, written: value}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"partial rotary|'dynamic'"):
        wiring_of(tf.AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "config",
    [
        lambda: tf.MistralConfig(**SIZES, sliding_window=256),
        lambda: tf.Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=16),
        lambda: _rope(rope_type="default", partial_rotary_factor=1.0),
    ],
)
def test_a_window_or_fraction_without_effect_is_accepted(config: Callable[[], Any]) -> None:
    assert isinstance(wiring_of(config()), Wiring)


# ---- angles


def test_angles_far_out_equal_hf_and_do_not_depend_on_what_came_before() -> None:
    """The table grows by doubling; positions before and after a growth agree with HF's own angles."""
    target = make_target(layers=1, rope_parameters=LLAMA3)
    cpu = torch.device("cpu")
    for size in (10, 256, 257, 1500):
        cos, sin = target.rotary.table(size, cpu)
        theirs = target.model.model.rotary_emb(torch.empty(0), torch.arange(size)[None])
        half = target.head_width // 2
        assert distance(cos[:size, 0], theirs[0][0]) == 0
        assert distance(sin[:size, 0].abs(), theirs[1][0].abs()) == 0
        assert distance(sin[:size, 0, :half], -theirs[1][0, :, :half]) == 0


# ---- more than one device


def split_on_meta(at: int, layers: int = 6) -> TargetModel:
    """Layers `at ..`, final norm and head on the meta device; a row can go there, never back."""
    config = llama_config(layers=layers)
    model = random_model(config)
    for module in (*model.model.layers[at:], model.model.norm, model.lm_head):
        module.to("meta")
    return TargetModel(model, wiring_of(config))


def test_caches_masks_and_angles_follow_the_device_of_each_layer() -> None:
    """Two devices stood in for by cpu and meta: shapes and places are real, the numbers on meta are not."""
    target = split_on_meta(2)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert target.layer_devices == (cpu, cpu, meta, meta, meta, meta)
    assert target.devices == (cpu, meta)
    assert target.device == meta
    cache = target.new_cache(32)
    assert [cache.read(layer, 32)[0].device for layer in range(6)] == list(target.layer_devices)
    assert [cache.read(layer, 32)[1].device for layer in range(6)] == list(target.layer_devices)
    tokens = torch.tensor(ids(8))
    for span in (Span.causal(0, 8), Span.causal(8, 8), Span.tree(16, (0, 0, 1, 1, 2, 3, 3))):
        out = forward(target, tokens, span, cache, keep_hidden=True)
        assert out.hidden is not None
        assert out.logits.device == meta
        assert [states.device for states in out.hidden[1:]] == list(target.layer_devices)
    states = target.layer(2, out.hidden[1], Span.siblings(20, 8), cache)
    assert states.device == meta


@pytest.mark.parametrize("skipped", [(1,), (2,), (1, 2), (0, 1, 2), (2, 3, 4, 5), (0, 5), tuple(range(6))])
def test_skipping_the_boundary_layers_still_reaches_the_head(skipped: tuple[int, ...]) -> None:
    """P74: the layer that moves the rows to the next device may be the one that is left out."""
    target = split_on_meta(2)
    cache = target.new_cache(16)
    forward(target, torch.tensor(ids(8)), Span.causal(0, 8), cache)
    skip = LayerSkip.layers(6, skipped)
    out = forward(target, torch.tensor([3]), Span.causal(8, 1), cache, skip=skip)
    assert out.logits.shape == (1, 64)
    assert out.logits.device.type == "meta"
