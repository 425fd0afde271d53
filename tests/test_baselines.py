"""What is special to each baseline; what all methods have in common is in test_decoding.py."""

from types import SimpleNamespace

import pytest
import torch
from conftest import Around, answer, ids, make_target

from baselines.draft_model import DraftModel
from baselines.layerskip import EarlyExit
from baselines.oracle import Oracle
from baselines.prompt_lookup import PromptLookup
from clasp_core.decoding import Verified
from clasp_core.drafting import NoDraft
from clasp_core.errors import UserError
from clasp_core.sampling import Sampling
from clasp_core.verify import Draft


def source(target):
    return SimpleNamespace(load=lambda engine: SimpleNamespace(target=target))


def sps(target, **changes):
    options = {"num_tokens": 5, "schedule": "constant", "exit_threshold": 0.0, **changes}
    return DraftModel(source(target), **options)


# ---- prompt lookup


def proposal(text, limit=10, **changes):
    """What PLD proposes behind a text, whose last token is the newest one."""
    options = {"max_ngram": 3, "num_tokens": 3, "match": "earliest", "partial": False, **changes}
    method = PromptLookup(**options)
    prefill = Verified(Draft.empty(), (0,), text[-1], len(text) - 2, None)
    method.start(None, text[:-1], prefill)
    return list(method.propose(text[-1], len(text) - 1, limit).tokens)


def test_lookup_prefers_the_longest_ngram_and_then_the_earliest_match():
    # the last two tokens 1 2 occurred at 0 (then 7 8 9) and at 6 (then 4 5 6); token 2 alone is shorter
    text = [1, 2, 7, 8, 9, 0, 1, 2, 4, 5, 6, 3, 1, 2]
    assert proposal(text) == [7, 8, 9]
    assert proposal(text, match="latest") == [4, 5, 6]
    # with 3 before them, 3 1 2 has no earlier occurrence until one is put there
    assert proposal([3, 1, 2, 6, 6, 6, *text]) == [6, 6, 6]


def test_lookup_wants_a_whole_continuation_unless_told_otherwise():
    text = [5, 1, 5]
    assert proposal(text) == []
    assert proposal(text, num_tokens=2) == [1, 5]
    assert proposal(text, partial=True) == [1, 5]


def test_lookup_never_proposes_from_the_pattern_itself():
    assert proposal([1, 2, 3, 4]) == []
    assert proposal([4, 4], partial=True) == [4]
    assert proposal([4], partial=True) == []


def test_lookup_keeps_to_the_limit():
    assert proposal([1, 2, 7, 8, 9, 1, 2], limit=2) == [7, 8]


def test_lookup_searches_what_has_been_committed():
    method = PromptLookup(2, 2, "earliest", False)
    method.start(None, [1, 2, 3], Verified(Draft.empty(), (0,), 4, 2, None))
    method.observe(Verified(Draft((9, 8)), (0, 1), 1, 3, None))
    # the text is now 1 2 3 4 9 1: token 1 stood at 0, followed by 2 3
    assert list(method.propose(1, 5, 9).tokens) == [2, 3]


# ---- the oracle


def test_the_oracle_accepts_everything_and_pays_one_round_for_its_whole_draft(tiny_target64):
    prompt = ids(9)
    truth = answer(tiny_target64, NoDraft(), prompt, 41)
    oracle = Oracle(9)
    oracle.inform(prompt, truth.output_ids)
    got = answer(tiny_target64, oracle, prompt, 41)
    assert got.output_ids == truth.output_ids
    assert got.rounds.num_accepted == got.rounds.num_drafted == [9, 9, 9, 9]
    assert got.rounds.num_draft_steps == [0, 0, 0, 0]


def test_the_oracle_does_not_replay_an_answer_to_another_prompt(tiny_target64):
    oracle = Oracle(9)
    oracle.inform(ids(9, seed=1), [1] * 40)
    got = answer(tiny_target64, oracle, ids(9), 12)
    assert sum(got.rounds.num_drafted) == 0
    assert got.output_ids == answer(tiny_target64, NoDraft(), ids(9), 12).output_ids


# ---- a separate draft model


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_drafter_that_equals_the_target_accepts_everything(tiny_target64, num_tokens):
    got = answer(tiny_target64, sps(tiny_target64, num_tokens=num_tokens), ids(9), 57)
    assert got.rounds.num_accepted == got.rounds.num_drafted
    assert got.output_ids == answer(tiny_target64, NoDraft(), ids(9), 57).output_ids


def test_a_drafter_that_equals_the_target_accepts_everything_when_sampling(tiny_target64):
    got = answer(tiny_target64, sps(tiny_target64), ids(9), 57, sampling=Sampling(1.0, top_p=0.9))
    assert got.rounds.num_accepted == got.rounds.num_drafted


def test_acceptance_of_a_drafter_does_not_decay_after_rejections(tiny_target64):
    """A drafter equal to the target whose every third draft is spoiled in its second token: the rest stays perfect."""

    class Spoiled(Around):
        num_rounds = 0

        def propose(self, last_token, position, limit):
            draft = self.inner.propose(last_token, position, limit)
            self.num_rounds += 1
            if self.num_rounds % 3 or len(draft.tokens) < 2:
                return draft
            tokens = list(draft.tokens)
            tokens[1] = (tokens[1] + 1) % 64
            return Draft(tuple(tokens), num_steps=draft.num_steps)

    got = answer(tiny_target64, Spoiled(sps(tiny_target64)), ids(9), 300)
    accepted = [(kept, drafted) for kept, drafted in zip(got.rounds.num_accepted, got.rounds.num_drafted, strict=True)]
    assert all(kept == (1 if index % 3 == 2 else drafted) for index, (kept, drafted) in enumerate(accepted[:-1]))
    assert got.output_ids == answer(tiny_target64, NoDraft(), ids(9), 300).output_ids


def test_the_heuristic_schedule_adds_two_and_takes_one(tiny_target64):
    whole = answer(tiny_target64, sps(tiny_target64, num_tokens=2, schedule="heuristic"), ids(9), 40)
    assert whole.rounds.num_drafted[:3] == [2, 4, 6]
    other = make_target(torch.float64, seed=9)
    poor = answer(tiny_target64, sps(other, num_tokens=3, schedule="heuristic"), ids(9), 30)
    expected = 3
    for kept, drafted in zip(poor.rounds.num_accepted[:-2], poor.rounds.num_drafted[:-2], strict=True):
        assert drafted == expected
        expected = expected + 2 if kept == drafted else max(1, expected - 1)


def test_the_drafters_cache_equals_a_fresh_pass_over_what_is_committed(tiny_target64):
    drafter_model = make_target(torch.float64, seed=3, layers=3)

    class Audited(Around):
        def observe(self, verified):
            found = self.inner.observe(verified)
            cached, text = self.inner._num_cached, self.inner._text
            fresh = drafter_model.new_cache(cached)
            from clasp_core.attention import Span
            from clasp_core.target import forward

            with torch.inference_mode():
                forward(drafter_model, torch.tensor(text[:cached]), Span.causal(0, cached), fresh)
            for layer in range(drafter_model.num_layers):
                for ours, theirs in zip(self.inner._cache.read(layer, cached), fresh.read(layer, cached), strict=True):
                    assert torch.allclose(ours, theirs, atol=1e-10)
            return found

    answer(tiny_target64, Audited(sps(drafter_model)), ids(9), 60)


def test_a_drafter_of_another_vocabulary_is_refused(tiny_target64):
    with pytest.raises(UserError, match="vocabulary of 32, the target one of 64"):
        sps(make_target(vocab=32)).start_stream(tiny_target64)


# ---- early exit


def test_verification_that_starts_where_the_draft_ended_equals_one_that_starts_anew(tiny_target64):
    """Shared early layers equal recomputation: same answers, and the same acceptance round by round."""

    class Anew(Around):
        def propose(self, last_token, position, limit):
            draft = self.inner.propose(last_token, position, limit)
            return Draft(draft.tokens, draft.probs, num_steps=draft.num_steps)

    for sampling in (Sampling(), Sampling(0.8, top_p=0.9)):
        shared = answer(tiny_target64, EarlyExit(4, None, 5), ids(9), 60, sampling=sampling)
        anew = answer(tiny_target64, Anew(EarlyExit(4, None, 5)), ids(9), 60, sampling=sampling)
        assert shared.output_ids == anew.output_ids
        assert shared.rounds.num_accepted == anew.rounds.num_accepted


def test_early_layers_see_each_drafted_token_once(tiny_target64, monkeypatch):
    from clasp_core.target import TargetModel

    rows = dict.fromkeys(range(8), 0)
    real = TargetModel.layer

    def counted(self, index, hidden, span, cache, **skip):
        rows[index] += len(hidden)
        return real(self, index, hidden, span, cache, **skip)

    monkeypatch.setattr(TargetModel, "layer", counted)
    got = answer(tiny_target64, EarlyExit(3, None, 4), ids(9), 60)
    verified = sum(got.rounds.num_drafted) + len(got.rounds)
    assert {rows[index] - 9 for index in range(8)} == {verified}


@pytest.mark.parametrize(
    ("layer", "ratio", "text"), [(0, None, "exit_layer is 0"), (8, None, "1 to 7"), (None, None, "exactly one")]
)
def test_an_exit_outside_the_target_is_refused(tiny_target64, layer, ratio, text):
    with pytest.raises(UserError, match=text):
        EarlyExit(layer, ratio, 4).start_stream(tiny_target64)
