"""Hugging Face's loop as a method: the same rules as ours, its own loop."""

import pytest
import torch
from conftest import FakeClock, answer, ids

from baselines.hf_generate import HFGenerate
from clasp_core.decoding import Generation
from clasp_core.drafting import NoDraft
from clasp_core.errors import UserError
from clasp_core.sampling import Randomness, Sampling


def generate(target, prompt, budget=40, stop_ids=(), sampling=None, seed=0):
    generation = Generation(budget, frozenset(stop_ids), sampling or Sampling())
    return HFGenerate().answer(target, prompt, generation, Randomness.seeded(seed), FakeClock())


@pytest.mark.parametrize("budget", [1, 2, 7, 40])
def test_its_greedy_answers_budgets_and_rounds_are_ours(tiny_target64, budget):
    ours, theirs = answer(tiny_target64, NoDraft(), ids(9), budget), generate(tiny_target64, ids(9), budget)
    assert theirs.output_ids == ours.output_ids
    assert theirs.rounds.num_emitted == ours.rounds.num_emitted
    assert theirs.stop_reason == ours.stop_reason == "length"


def test_a_static_cache_gives_the_same_answers_turn_after_turn(tiny_target64):
    static = HFGenerate("static")
    for length in (9, 30, 4):
        generation, prompt = Generation(20, frozenset()), ids(length)
        got = static.answer(tiny_target64, prompt, generation, Randomness.seeded(0), FakeClock())
        assert got.output_ids == generate(tiny_target64, prompt, 20).output_ids
    with pytest.raises(UserError, match="cache is 'paged'; it must be one of dynamic, static"):
        HFGenerate("paged")


def test_it_stops_at_any_of_several_stop_tokens(tiny_target64):
    whole = answer(tiny_target64, NoDraft(), ids(9), 40).output_ids
    stops = (whole[11], whole[23])
    ours, theirs = (
        answer(tiny_target64, NoDraft(), ids(9), 40, stop_ids=stops),
        generate(tiny_target64, ids(9), 40, stops),
    )
    assert theirs.output_ids == ours.output_ids
    assert theirs.stop_reason == "stop"


def test_sampling_takes_every_setting_from_the_run_and_leaves_the_global_generator_alone(tiny_target64):
    before = torch.get_rng_state()
    certain = generate(tiny_target64, ids(9), sampling=Sampling(1.5, top_k=1))
    assert certain.output_ids == answer(tiny_target64, NoDraft(), ids(9), 40).output_ids
    free = Sampling(1.5)
    assert generate(tiny_target64, ids(9), sampling=free, seed=1).output_ids != certain.output_ids
    again = [generate(tiny_target64, ids(9), sampling=free, seed=seed).output_ids for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]
    assert torch.equal(before, torch.get_rng_state())


def test_no_token_is_left_out_by_a_default_top_k(tiny_target64):
    """Of 64 tokens at a high temperature, a hidden top_k of 50 would never show the other 14."""
    hot = Sampling(50.0)
    seen = {token for seed in range(8) for token in generate(tiny_target64, ids(9), 200, (), hot, seed).output_ids}
    assert len(seen) == 64
