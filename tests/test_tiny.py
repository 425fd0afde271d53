"""The tiny model is a usable stand-in: seeded, neither flat nor certain, with a tokenizer for real text."""

from __future__ import annotations

import math

import pytest
import torch

from clasp_core.errors import UserError
from clasp_core.tiny import NUM_TOKENS, TinyModel, byte_tokenizer


def logits_of(**settings) -> torch.Tensor:
    """Logits `2 32 V` of random text."""
    model = TinyModel(**settings).checkpoint().hf_model
    ids = torch.randint(0, model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return model(ids).logits.double()


def test_one_seed_gives_one_model_and_another_seed_another():
    assert torch.equal(logits_of(seed=3), logits_of(seed=3))
    assert not torch.allclose(logits_of(seed=3), logits_of(seed=4))


def test_weights_do_not_depend_on_torchs_random_state_and_leave_it_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = logits_of()
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, logits_of())


def test_other_dtypes_hold_the_same_weights_rounded():
    full = TinyModel().checkpoint().hf_model
    half = TinyModel(dtype="bfloat16").checkpoint().hf_model
    for ours, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16))
    for ours, theirs in zip(half.buffers(), full.buffers(), strict=True):
        assert torch.equal(ours, theirs)  # the rotary frequencies, which from_pretrained does not round either


@pytest.mark.parametrize("vocab_size", [8, 16, 64, NUM_TOKENS])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_distributions_are_neither_flat_nor_certain(vocab_size, seed):
    probs = logits_of(vocab_size=vocab_size, seed=seed).softmax(-1)
    entropy = -(probs * probs.log()).sum(-1) / math.log(vocab_size)
    assert 0.4 < float(entropy.mean()) < 0.9
    assert float(probs.max()) < 0.99


@pytest.mark.parametrize("vocab_size", [16, 64, NUM_TOKENS])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_text_does_not_collapse_to_one_token(vocab_size, seed):
    model = TinyModel(vocab_size=vocab_size, seed=seed).load().hf_model
    out = model.generate(
        torch.arange(2, 7)[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert len(set(out[0, -24:].tolist())) > 1


def test_skipping_a_layer_changes_the_distribution_without_ruining_it():
    model = TinyModel().load().hf_model
    ids = torch.arange(4, 68)[None]
    with torch.inference_mode():
        full = model(ids).logits[0]
        del model.model.layers[3]
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = index
        model.config.num_hidden_layers = len(model.model.layers)
        part = model(ids).logits[0]
    agreement = float((full.argmax(-1) == part.argmax(-1)).double().mean())
    assert 0.3 < agreement < 1.0


def test_small_vocabulary_has_neither_tokenizer_nor_stop_token():
    loaded = TinyModel(vocab_size=8).load()
    assert loaded.tokenizer is None
    assert loaded.stop_ids == ()
    assert loaded.target.vocab_size == 8


@pytest.mark.parametrize("text", ["What is 2 + 2?", "Größe: 12 µm\n\ttab", "日本語 🙂", ""])
def test_any_text_is_encoded_and_comes_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(text.encode())
    assert max(ids) < NUM_TOKENS
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_shape_follows_the_settings():
    loaded = TinyModel(num_layers=3, width=48, num_heads=6, num_kv_heads=3, max_position_embeddings=77).load()
    assert loaded.target.num_layers == 3
    assert loaded.hf_model.config.hidden_size == 48
    assert loaded.target.num_kv_heads == 3
    assert loaded.max_positions == 77
    assert loaded.stop_ids == (1,)
    assert "not a trained model" in loaded.label


def test_a_million_positions_cost_nothing():
    small, large = (TinyModel(max_position_embeddings=n).load() for n in (2048, 1_000_000))
    assert large.info["weights_bytes"] == small.info["weights_bytes"]
    assert sum(b.numel() for b in large.hf_model.buffers()) == sum(b.numel() for b in small.hf_model.buffers())


@pytest.mark.parametrize("settings", [{"width": 30}, {"num_kv_heads": 3}, {"width": 12}, {"dtype": "int8"}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(UserError):
        TinyModel(**settings).load()
