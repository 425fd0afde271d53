"""The loop: greedy equals autoregressive whatever is drafted, counts and times by hand, exact laws when sampling.

Every drafter in conf/method/ goes through the contract at the end; a later method needs no line here.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from conftest import (
    ROOT,
    Around,
    FakeClock,
    FixedPolicy,
    answer,
    chi_square_p,
    distance,
    hf_greedy,
    ids,
    make_target,
    prefilled,
)
from omegaconf import OmegaConf
from torch import Tensor

from baselines.random_skip import random_skip
from clasp_core import verify as verify_module
from clasp_core.clasp import Reading, clasp
from clasp_core.decoding import Answer, Drafter, Generation, Turn, Verified, decode
from clasp_core.device import DeviceClock
from clasp_core.drafting import ChainRule, FixedExit, NoDraft, SelfDrafter
from clasp_core.errors import UserError
from clasp_core.records import RoundTrace
from clasp_core.sampling import Randomness, Sampling
from clasp_core.skip import LayerSkip
from clasp_core.target import Engine, TargetModel
from clasp_core.verify import Draft

FALSE_ALARMS = 1e-4
"""The chance that a chi-square test below fails although the law is right; seeds are fixed."""
BUDGET = 40


# ---- drafters of the tests


def identity(draft_len: int) -> SelfDrafter:
    """D2: the draft is the target."""
    return SelfDrafter(FixedPolicy(), FixedExit(0.0), ChainRule(draft_len))


class Scripted(Around):
    """A chain read off a known answer, with chosen mistakes; may ignore its limit. Records what it was asked."""

    def __init__(
        self,
        truth: Sequence[int],
        draft_len: int,
        *,
        wrong: Callable[[int], bool] = lambda index: False,
        overlong: int = 0,
        extra_slots: int = 0,
        vocab: int = 64,
    ):
        super().__init__(NoDraft())
        self._truth = [*truth, *[5] * 64]
        self._draft_len, self._wrong, self._overlong, self._vocab = draft_len, wrong, overlong, vocab
        self._extra_slots = extra_slots
        self.asked: list[tuple[int, int, int]] = []

    def extra_slots(self, budget: int) -> int:
        return self._extra_slots

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self._num_prompt = len(prompt)
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        self.asked.append((last_token, position, limit))
        first = position - self._num_prompt + 1
        num = self._overlong or min(self._draft_len, limit)
        tokens = [self._truth[i] + int(self._wrong(i)) for i in range(first, first + num)]
        return Draft(tuple(token % self._vocab for token in tokens), num_steps=num)


class Caterpillar(Around):
    """A tree of the test's own: a spine, each of whose nodes has random siblings, in random order.

    The spine follows `truth` where it is known, but for some mistakes.
    """

    def __init__(self, truth: Sequence[int], depth: int, siblings: int, seed: int, vocab: int = 64):
        super().__init__(NoDraft())
        self._truth, self._depth, self._siblings, self._vocab = list(truth), depth, siblings, vocab
        self._rng = torch.Generator().manual_seed(seed)

    def extra_slots(self, budget: int) -> int:
        return self._depth * self._siblings

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self._num_prompt = len(prompt)
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        first, spine = position - self._num_prompt + 1, 0
        tokens: list[int] = []
        parents: list[int] = []
        for depth in range(min(self._depth, limit)):
            lucky = torch.rand((), generator=self._rng) < 0.7
            right = self._truth[first + depth] if lucky else int(torch.randint(self._vocab, (), generator=self._rng))
            order = torch.randperm(self._siblings + 1, generator=self._rng).tolist()
            others = [t for t in torch.randperm(self._vocab, generator=self._rng).tolist() if t != right]
            level = [right if place == 0 else others[place] for place in order]
            parents += [spine] * len(level)
            spine = len(tokens) + order.index(0) + 1
            tokens += level
        return Draft(tuple(tokens), None, tuple(parents), num_steps=1)


class Audited(Around):
    """D6: keeps its own list of committed tokens and compares every layer's cache with a fresh full forward."""

    def __init__(self, inner: Drafter, tolerance: float = 1e-5):
        super().__init__(inner)
        self._tolerance = tolerance
        self.num_audits = 0

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self._turn, self._tokens = turn, list(prompt)
        assert prefill.position == prefill.last_position == len(prompt) - 1
        self._audit()
        searches = self.inner.start(turn, prompt, prefill)
        self._audit()
        self._tokens.append(prefill.next_token)
        return searches

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        assert limit >= 1
        assert (last_token, position) == (self._tokens[-1], len(self._tokens) - 1)
        before = self._committed(position)
        draft = self.inner.propose(last_token, position, limit)
        assert all(map(torch.equal, before, self._committed(position)))
        return draft

    def observe(self, verified: Verified) -> int:
        assert verified.position == len(self._tokens) - 1
        self._tokens += [verified.draft.tokens[row - 1] for row in verified.path[1:]]
        assert verified.last_position == len(self._tokens) - 1
        self._audit()
        searches = self.inner.observe(verified)
        self._audit()
        self._tokens.append(verified.next_token)
        return searches

    def _committed(self, stop: int) -> list[Tensor]:
        cache = self._turn.cache
        return [half.clone() for layer in range(cache.num_layers) for half in cache.read(layer, stop)]

    def _audit(self) -> None:
        stop = len(self._tokens)
        fresh = prefilled(self._turn.target, self._tokens)
        expected = [half for layer in range(fresh.num_layers) for half in fresh.read(layer, stop)]
        worst = max(map(distance, self._committed(stop), expected))
        assert worst < self._tolerance, f"cache of {stop} tokens is off by {worst:.2g}"
        self.num_audits += 1


# ---- what is true of every answer


@cache
def truth(
    dtype: torch.dtype, seed: int, budget: int = 96, engine: Engine = "eager"
) -> tuple[TargetModel, list[int], list[int]]:
    """A target, a prompt, and the autoregressive answer, which is Hugging Face's too. Text 1 holds id 0."""
    target = _target(dtype, engine)
    text = (3, 13, 12)[seed]
    prompt = ids(9 + text, seed=text)
    expected = answer(target, NoDraft(), prompt, budget).output_ids
    assert expected == hf_greedy(target, prompt, budget)
    return target, prompt, expected


@cache
def _target(dtype: torch.dtype, engine: Engine = "eager") -> TargetModel:
    return make_target(dtype, engine=engine)


def check_counts(got: Answer, budget: int, stop_ids: Sequence[int] = ()) -> None:
    """The trace adds up to the answer."""
    rounds = got.rounds
    num = len(got.output_ids)
    assert sum(rounds.num_emitted) + 1 == num
    assert num <= budget
    ended = [i for i, token in enumerate(got.output_ids) if token in stop_ids]
    assert ended == ([num - 1] if got.stop_reason == "stop" else [])
    assert got.stop_reason == ("stop" if ended else "length")
    assert ended or num == budget
    lists = [getattr(rounds, name) for name in RoundTrace.__dataclass_fields__]
    assert {len(values) for values in lists} == {len(rounds)}
    for drafted, accepted, emitted in zip(rounds.num_drafted, rounds.num_accepted, rounds.num_emitted, strict=True):
        assert 0 <= accepted <= min(drafted, emitted)
        assert 1 <= emitted <= drafted + 1
    inner = list(zip(rounds.num_accepted, rounds.num_emitted, strict=True))[:-1]
    assert all(emitted == accepted + 1 for accepted, emitted in inner)
    check_drafted(got)


def check_drafted(got: Answer) -> None:
    """The kept ones of the drafted ids are what the answer holds there."""
    rounds, at = got.rounds, 1
    assert [len(drafted) for drafted in rounds.drafted_ids] == rounds.num_drafted
    for drafted, path, accepted, emitted in zip(
        rounds.drafted_ids, rounds.accepted_path, rounds.num_accepted, rounds.num_emitted, strict=True
    ):
        places = list(range(accepted)) if path is None else path
        assert [drafted[place] for place in places] == got.output_ids[at : at + accepted]
        at += emitted


DTYPES = [torch.float32, torch.float64]


def test_the_texts_of_these_tests_are_worth_testing() -> None:
    """They do not collapse, they hold id 0, and drafts are sometimes right and sometimes wrong."""
    texts = [truth(torch.float32, seed)[2] for seed in range(3)]
    assert all(len(set(text)) >= 18 for text in texts)
    assert 0 in texts[1][:BUDGET]
    target, prompt, _ = truth(torch.float32, 0)
    rounds = answer(target, clasp(2, None, 8, 0.0, 6), prompt, 96).rounds
    rate = sum(rounds.num_accepted) / sum(rounds.num_drafted)
    assert 0.05 < rate < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_autoregressive_decoding_is_the_loop_with_an_empty_draft(dtype: torch.dtype) -> None:
    target, prompt, expected = truth(dtype, 1)
    got = answer(target, NoDraft(), prompt, 30)
    assert got.output_ids == expected[:30]
    assert got.rounds.num_drafted == got.rounds.num_accepted == got.rounds.num_draft_steps == [0] * 29
    assert got.rounds.num_emitted == [1] * 29
    assert got.rounds.skip == [None] * 29
    check_counts(got, 30)


# ---- D2, D3, mistakes in between


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_an_identity_draft_is_accepted_whole(draft_len: int, dtype: torch.dtype) -> None:
    """P20, P22: every round commits K + 1 tokens, for every K, up to the last one."""
    target, prompt, expected = truth(dtype, 2)
    got = answer(target, Audited(identity(draft_len), 1e-4), prompt, BUDGET)
    assert got.output_ids == expected[:BUDGET]
    assert got.rounds.num_accepted == got.rounds.num_drafted == got.rounds.num_draft_steps
    assert set(got.rounds.num_emitted[:-1]) == {draft_len + 1}
    assert len(got.rounds) == math.ceil((BUDGET - 1) / (draft_len + 1))
    assert got.rounds.skip[0] == LayerSkip.none(8).code
    check_counts(got, BUDGET)


def test_an_identity_draft_is_accepted_whole_when_sampling(tiny_target: TargetModel) -> None:
    got = answer(tiny_target, identity(5), ids(9), 60, sampling=Sampling(1.0, top_p=0.95))
    assert got.rounds.num_accepted == got.rounds.num_drafted
    assert len(set(got.output_ids)) > 20


class Spoiled(Around):
    """Replaces the token at every fifth place of the answer by a wrong one."""

    def __init__(self, inner: Drafter, expected: Sequence[int], num_prompt: int):
        super().__init__(inner)
        self._expected, self._num_prompt = expected, num_prompt
        self.spoilt: list[int] = []

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        draft = self.inner.propose(last_token, position, limit)
        tokens, first = list(draft.tokens), position - self._num_prompt + 1
        for i in range(len(tokens)):
            if (first + i) % 5 == 0:
                tokens[i] = (self._expected[first + i] + 1) % 64
        return Draft(tuple(tokens), None, None, draft.num_steps, draft.skip)


def test_acceptance_does_not_decay_with_length(tiny_target: TargetModel) -> None:
    """P21, P23: with one forced rejection in five tokens, every other drafted token stays right to the end."""
    prompt = ids(9, seed=2)
    expected = answer(tiny_target, NoDraft(), prompt, 260).output_ids
    got = answer(tiny_target, Spoiled(identity(4), expected, 9), prompt, 260)
    assert got.output_ids == expected
    # the first round starts behind token 0 and runs into the mistake at 5; from then on rounds commit 5 tokens
    assert set(got.rounds.num_emitted[:-1]) == {5}
    assert set(got.rounds.num_accepted[:-1]) == {4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("draft_len", [1, 4])
def test_a_hopeless_draft_costs_one_round_a_token(draft_len: int, dtype: torch.dtype) -> None:
    target, prompt, expected = truth(dtype, 0)
    got = answer(target, Audited(Scripted(expected, draft_len, wrong=lambda i: True)), prompt, BUDGET)
    assert got.output_ids == expected[:BUDGET]
    assert got.rounds.num_accepted == [0] * (BUDGET - 1)
    assert got.rounds.num_emitted == [1] * (BUDGET - 1)
    check_counts(got, BUDGET)


@pytest.mark.parametrize("seed", range(4))
def test_mistakes_at_random_places_change_nothing(seed: int) -> None:
    """P23: positions run on from the committed length after every kind of round."""
    target, prompt, expected = truth(torch.float64, seed % 3)
    coin = torch.rand(200, generator=torch.Generator().manual_seed(seed)) < (0.1, 0.3, 0.5, 0.7)[seed]
    drafter = Scripted(expected, 6, wrong=lambda index: bool(coin[index]))
    got = answer(target, Audited(drafter), prompt, 80)
    assert got.output_ids == expected[:80]
    check_counts(got, 80)
    num = 1
    for (last, position, limit), emitted in zip(drafter.asked, got.rounds.num_emitted, strict=False):
        assert (last, position, limit) == (expected[num - 1], len(prompt) + num - 1, 80 - num - 1)
        num += emitted
    assert {0, 6} <= set(got.rounds.num_accepted) or seed in (0, 3)


# ---- D1: stop tokens


def stopped(expected: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """The autoregressive answer up to its first stop token."""
    first = next((i for i, token in enumerate(expected) if token in stop_ids), len(expected) - 1)
    return list(expected[: first + 1])


@pytest.mark.parametrize("offset", range(24))
def test_generation_ends_at_a_stop_token_wherever_it_lies_in_a_block(offset: int) -> None:
    """P1, P2: a block of 8 accepted tokens is cut, and nothing behind the cut is counted."""
    target, prompt, expected = truth(torch.float32, 1)
    stop_ids = [expected[offset]]
    wanted = stopped(expected[:BUDGET], stop_ids)
    for drafter in (NoDraft(), Scripted(expected, 7), Scripted(expected, 3, wrong=lambda i: i % 6 == 5), identity(5)):
        got = answer(target, drafter, prompt, BUDGET, stop_ids=stop_ids)
        assert got.output_ids == wanted
        check_counts(got, BUDGET, stop_ids)
    rounds = answer(target, Scripted(expected, 7), prompt, BUDGET, stop_ids=stop_ids).rounds
    full, rest = divmod(len(wanted) - 1, 8)
    assert rounds.num_emitted == [8] * full + [rest] * (rest > 0)
    assert rounds.num_accepted == [7] * full + [rest] * (rest > 0)


def test_every_offset_inside_a_block_was_met() -> None:
    _, _, expected = truth(torch.float32, 1)
    lengths = {len(stopped(expected[:BUDGET], [token])) for token in expected[:24]}
    assert {(length - 1) % 8 for length in lengths if length > 1} == set(range(8))
    assert 1 in lengths


@pytest.mark.parametrize("which", [(5, 11), (11, 5), (17, 3, 30), (39,)])
def test_several_stop_tokens_end_generation_alike(which: tuple[int, ...]) -> None:
    """P17: whichever comes first."""
    target, prompt, expected = truth(torch.float32, 1)
    stop_ids = [expected[i] for i in which]
    wanted = stopped(expected[:BUDGET], stop_ids)
    assert wanted == hf_greedy(target, prompt, BUDGET, stop_ids)
    for drafter in (NoDraft(), Scripted(expected, 7), identity(4), clasp(2, None, 2, 0.0, 5)):
        got = answer(target, drafter, prompt, BUDGET, stop_ids=stop_ids)
        assert got.output_ids == wanted
        check_counts(got, BUDGET, stop_ids)


def test_the_stop_token_id_0_ends_generation() -> None:
    target, prompt, expected = truth(torch.float32, 1)
    assert 0 in expected[:BUDGET]
    for drafter in (NoDraft(), identity(6), Caterpillar(expected, 4, 3, seed=1)):
        got = answer(target, drafter, prompt, BUDGET, stop_ids=[0])
        assert got.output_ids == stopped(expected, [0])


def test_a_self_draft_ends_at_its_own_stop_token() -> None:
    """Nothing is drafted behind it, so nothing is wasted; the token itself is proposed."""
    target, prompt, expected = truth(torch.float32, 1)
    stop_ids = [expected[10]]
    got = answer(target, identity(8), prompt, BUDGET, stop_ids=stop_ids)
    wanted = stopped(expected, stop_ids)
    assert got.output_ids == wanted
    assert sum(got.rounds.num_drafted) + len(got.rounds) in (len(wanted) - 1, len(wanted))
    assert got.rounds.num_accepted == got.rounds.num_drafted


# ---- budgets


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_the_budget_is_exact(budget: int) -> None:
    """P14: whatever the draft length, and drafts keep within the room that is left."""
    target, prompt, expected = truth(torch.float32, 2)
    oracle = Scripted(expected, 8)
    drafters = [NoDraft(), identity(5), oracle, Scripted(expected, 4, wrong=lambda i: True), clasp(2, None, 3, 0.0, 6)]
    for drafter in [*drafters, random_skip(3, None, "step", 0.0, 6), Caterpillar(expected, 5, 2, seed=budget)]:
        got = answer(target, drafter, prompt, budget)
        assert got.output_ids == expected[:budget]
        assert got.stop_reason == "length"
        check_counts(got, budget)
        if not isinstance(drafter, Caterpillar):
            assert all(
                drafted <= budget - 1 - before - 1
                for drafted, before in zip(
                    got.rounds.num_drafted, itertools.accumulate(got.rounds.num_emitted, initial=0), strict=False
                )
                if drafted
            )
    assert all(limit >= 1 for _, _, limit in oracle.asked)


def test_one_token_needs_no_round() -> None:
    """P66: nothing is drafted, searched or verified, and nothing divides by it."""
    target, prompt, expected = truth(torch.float32, 2)
    for budget, stop_ids in ((1, []), (30, expected[:1])):
        got = answer(target, clasp(2, None, 1, 0.0, 6), prompt, budget, stop_ids=stop_ids)
        assert got.output_ids == expected[:1]
        assert len(got.rounds) == 0
        assert got.rounds == RoundTrace()


@pytest.mark.parametrize("overlong", [3, 9, 20])
def test_a_draft_longer_than_its_limit_is_cut_at_the_budget(overlong: int) -> None:
    target, prompt, expected = truth(torch.float32, 2)
    for budget in (2, 6, 11):
        drafter = Scripted(expected, 0, overlong=overlong, extra_slots=24)
        got = answer(target, drafter, prompt, budget)
        assert got.output_ids == expected[:budget]
        check_counts(got, budget)


def test_a_draft_that_outgrows_the_cache_is_an_error_not_a_wrong_answer() -> None:
    target, prompt, expected = truth(torch.float32, 2)
    with pytest.raises(IndexError, match="beyond the cache"):
        answer(target, Scripted(expected, 0, overlong=20), prompt, 10)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_below_one_is_refused(budget: int) -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        Generation(budget, frozenset())


def test_the_cache_is_sized_by_prompt_and_budget() -> None:
    """P65: not by what the configuration would allow."""
    target, prompt, expected = truth(torch.float32, 2)
    sizes: list[int] = []

    class Size(Around):
        def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
            sizes.append(turn.cache.capacity)
            return self.inner.start(turn, prompt, prefill)

    answer(target, Size(NoDraft()), prompt, 20)
    answer(target, Size(Caterpillar(expected, 3, 2, seed=0)), prompt, 20)
    assert sizes == [len(prompt) + 20, len(prompt) + 26]


# ---- skip sets

LAST = 7
SETS: dict[str, dict[str, Sequence[int]]] = {
    "first": {"attn": [0], "mlp": [0]},
    "last": {"attn": [LAST], "mlp": [LAST]},
    "first two": {"attn": [0, 1], "mlp": [0, 1]},
    "all attention": {"attn": range(8), "mlp": []},
    "all mlp": {"attn": [], "mlp": range(8)},
    "every second": {"attn": range(0, 8, 2), "mlp": range(0, 8, 2)},
    "crossed": {"attn": range(0, 8, 2), "mlp": range(1, 8, 2)},
    "all but one": {"attn": range(7), "mlp": range(7)},
    "everything": {"attn": range(8), "mlp": range(8)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_any_skip_set_is_lossless_and_leaves_a_full_cache(name: str, dtype: torch.dtype) -> None:
    """P26, D6: kept and skipped layers alike hold what a fresh full forward gives."""
    target, prompt, expected = truth(dtype, DTYPES.index(dtype))
    drafter = Audited(SelfDrafter(FixedPolicy(**SETS[name]), FixedExit(0.0), ChainRule(4)), 1e-4)
    got = answer(target, drafter, prompt, 24)
    assert got.output_ids == expected[:24]
    assert drafter.num_audits >= 2 * len(got.rounds)
    skip = LayerSkip.sublayers(8, attn=SETS[name]["attn"], mlp=SETS[name]["mlp"])
    assert set(got.rounds.skip) <= {skip.code, None}
    check_counts(got, 24)


@pytest.mark.parametrize("seed", range(3))
def test_a_skip_set_that_changes_with_every_step_is_lossless(seed: int) -> None:
    """The adversary: draft keys of different depths stand side by side in the scratch part."""
    target, prompt, expected = truth(torch.float64, seed)
    for num_skipped in (1, 4, 7):
        drafter = Audited(random_skip(num_skipped, None, "step", 0.0, 7))
        got = answer(target, drafter, prompt, 32, seed=seed)
        assert got.output_ids == expected[:32]
        assert len({code for code in got.rounds.skip if code}) > 1
        check_counts(got, 32)


@pytest.mark.parametrize("redraw", ["turn", "round", "step"])
def test_random_sets_are_drawn_as_often_as_asked(redraw: Any) -> None:
    target, prompt, _ = truth(torch.float32, 0)
    drafter = random_skip(4, None, redraw, 0.0, 4)
    codes = [code for code in answer(target, drafter, prompt, 30, seed=1).rounds.skip if code]
    assert all(LayerSkip.decode(code).num_skipped_sublayers == 8 for code in codes)
    assert (len(set(codes)) == 1) == (redraw == "turn")
    other = [code for code in answer(target, drafter, prompt, 30, seed=2).rounds.skip if code]
    assert codes != other


# ---- trees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_draft_is_lossless_and_its_accepted_path_is_kept(seed: int, dtype: torch.dtype) -> None:
    target, prompt, expected = truth(dtype, seed % 3)
    drafter = Audited(Caterpillar(expected, 4, (1, 2, 3, 9)[seed], seed), 1e-4)
    got = answer(target, drafter, prompt, BUDGET)
    assert got.output_ids == expected[:BUDGET]
    assert max(got.rounds.num_accepted) == 4
    assert 0 in got.rounds.num_accepted
    check_counts(got, BUDGET)


# ---- the exit rule


def test_a_draft_ends_behind_an_unsure_token() -> None:
    """The token stays (`keep`) or goes (`drop`); the step that made it counts either way."""
    target, prompt, expected = truth(torch.float32, 0)
    kept = answer(target, SelfDrafter(FixedPolicy(), FixedExit(1.0), ChainRule(6, "keep")), prompt, 20)
    dropped = answer(target, SelfDrafter(FixedPolicy(), FixedExit(1.0), ChainRule(6, "drop")), prompt, 20)
    assert kept.output_ids == dropped.output_ids == expected[:20]
    assert set(kept.rounds.num_drafted[:-1]) == {1}
    assert set(kept.rounds.num_emitted[:-1]) == {2}
    assert dropped.rounds.num_drafted == [0] * 19
    assert dropped.rounds.num_draft_steps == [1] * 18 + [0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0), Sampling(0.4, top_k=5)], ids=str)
@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.6])
def test_confidence_is_the_unwarped_probability_of_the_drafted_token(threshold: float, sampling: Sampling) -> None:
    """Every drafted token but the last is sure, the last is not (or the draft is full); warpers do not matter."""
    target, prompt, _ = truth(torch.float64, 0)
    drafts: list[tuple[int, int, tuple[int, ...]]] = []

    class Noting(Around):
        def propose(self, last_token: int, position: int, limit: int) -> Draft:
            draft = self.inner.propose(last_token, position, limit)
            drafts.append((position, limit, draft.tokens))
            return draft

    output = answer(
        target, Noting(SelfDrafter(FixedPolicy(), FixedExit(threshold), ChainRule(5))), prompt, 40, sampling=sampling
    )
    lengths = set()
    for position, limit, tokens in drafts:
        text = [*prompt, *output.output_ids][: position + 1] + list(tokens)
        with torch.inference_mode():
            probs = target.model(torch.tensor([text])).logits[0].softmax(-1)
        sure = [float(probs[position + i, token]) for i, token in enumerate(tokens)]
        assert all(p >= threshold for p in sure[:-1])
        assert sure[-1] < threshold or len(tokens) == min(limit, 5)
        lengths.add(len(tokens))
    assert len(lengths) > 1


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: FixedExit(-0.1), "exit_threshold"),
        (lambda: FixedExit(1.1), "exit_threshold"),
        (lambda: FixedExit(math.nan), "exit_threshold"),
        (lambda: identity(0), "max_draft_len"),
        (lambda: ChainRule(3, "maybe"), "low_confidence_token"),  # type: ignore[arg-type]
        (lambda: ChainRule(3, "keep", "beam"), "draft_sampling"),  # type: ignore[arg-type]
        (lambda: random_skip(2, None, "never", 0.5, 3), "redraw"),  # type: ignore[arg-type]
        (lambda: random_skip(8, None, "turn", 0.5, 3).start_stream(_target(torch.float32)), "num_skipped"),
    ],
)
def test_bad_options_are_refused_by_name(make: Callable[[], object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        make()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.9)])
def test_a_draft_that_is_not_a_number_is_refused(sampling: Sampling) -> None:
    """The exponent overflows in the draft only: the loop must not accept on NaN."""
    target = make_target(layers=4)
    prompt = ids(6)

    class Poison(FixedPolicy):
        def current(self) -> LayerSkip:
            with torch.no_grad():
                target.model.lm_head.weight[3, 3] = float("nan")
            return LayerSkip.none(4)

    with pytest.raises(UserError, match="draft's logits are NaN or infinite"):
        answer(target, SelfDrafter(Poison(), FixedExit(0.0), ChainRule(3)), prompt, 10, sampling=sampling)


# ---- randomness


def test_greedy_decoding_uses_no_randomness() -> None:
    """P28: neither ours nor torch's own."""
    target, prompt, expected = truth(torch.float32, 0)
    everywhere = torch.get_rng_state()
    for drafter in (NoDraft(), clasp(3, None, 2, 0.3, 5), identity(3)):
        randomness = Randomness.seeded(7)
        before = [g.get_state() for g in (randomness.draft, randomness.accept, randomness.search)]
        drafter.start_stream(target)
        got = decode(target, drafter, prompt, Generation(24, frozenset()), randomness, FakeClock())
        after = [g.get_state() for g in (randomness.draft, randomness.accept, randomness.search)]
        assert got.output_ids == expected[:24]
        assert all(map(torch.equal, before, after))
    assert torch.equal(everywhere, torch.get_rng_state())


def test_searching_more_often_does_not_shift_what_is_accepted() -> None:
    """P29: with a draft that is always accepted, searches on or off give the same sampled text."""
    target, prompt, _ = truth(torch.float32, 0)
    texts = set()
    for search in (False, True):

        class Searching(FixedPolicy):
            searching = search

            def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
                self.turn = turn
                return 0

            def observe(self, verified: Verified) -> int:
                if self.searching:
                    torch.rand(5, generator=self.turn.randomness.search)
                return 0

        drafter = SelfDrafter(Searching(), FixedExit(0.0), ChainRule(4))
        texts.add(tuple(answer(target, drafter, prompt, 40, sampling=Sampling(1.0)).output_ids))
    assert len(texts) == 1


@pytest.mark.parametrize("how", ["clasp", "random sets"])
def test_drafting_does_not_touch_the_generator_of_acceptance(how: str) -> None:
    """P29: tokens are drafted, drafts are judged and sets are searched for with numbers of their own."""
    target, prompt, _ = truth(torch.float32, 0)
    moved: list[tuple[bool, ...]] = []

    class Watching(Around):
        def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
            self._turn = turn
            return self.inner.start(turn, prompt, prefill)

        def propose(self, last_token: int, position: int, limit: int) -> Draft:
            randomness = self._turn.randomness
            generators = (randomness.draft, randomness.accept, randomness.search)
            before = [generator.get_state() for generator in generators]
            draft = self.inner.propose(last_token, position, limit)
            after = [generator.get_state() for generator in generators]
            moved.append(tuple(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            return draft

    drafter = clasp(3, None, 2, 0.0, 4) if how == "clasp" else random_skip(3, None, "step", 0.0, 4)
    answer(target, Watching(drafter), prompt, 24, sampling=HOT)
    assert set(moved) == {(True, False, how == "random sets")}


def test_sampled_answers_depend_on_the_seed_alone() -> None:
    target, prompt, _ = truth(torch.float32, 0)
    drafter = clasp(3, None, 2, 0.2, 5)
    texts = []
    for seed in (1, 1, 2):
        torch.rand(3)
        texts.append(answer(target, drafter, prompt, 24, sampling=Sampling(0.8, top_p=0.9), seed=seed).output_ids)
    assert texts[0] == texts[1] != texts[2]


# ---- the law of sampled answers

VOCAB = 3


@cache
def _lawful(vocab: int, layers: int = 2) -> TargetModel:
    return make_target(layers=layers, width=16, vocab=vocab, sharpness=1.5, depth_gain=0.7, seed=4)


def warped(logits: Tensor, temperature: float, top_p: float) -> list[float]:
    """Temperature and nucleus written out once more, in plain Python."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    kept: dict[int, float] = {}
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        if sum(kept.values()) < top_p:
            kept[token] = probs[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(probs))]


@cache
def exact_law(
    vocab: int, sampling: Sampling, length: int, stop_ids: tuple[int, ...] = (), layers: int = 2
) -> dict[tuple[int, ...], float]:
    """The joint law of an answer, from Hugging Face's forward over every context."""
    model = _lawful(vocab, layers).model
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        running = [key for key in law if not key or key[-1] not in stop_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([[*LAW_PROMPT, *key] for key in running])).logits[:, -1]
        for key, row in zip(running, logits, strict=True):
            weight = law.pop(key)
            for token, p in enumerate(warped(row, sampling.temperature, sampling.top_p)):
                law[*key, token] = weight * p
    return law


LAW_PROMPT = [1, 0, 2, 2, 0]


class Script:
    """Takes every decision of a run from a list, so that all runs can be gone through with their probabilities."""

    def __init__(self, decisions: Sequence[int]):
        self.decisions = list(decisions)
        self.given = len(self.decisions)
        self.options: list[list[float]] = []

    def pick(self, chances: Sequence[float]) -> int:
        at = len(self.options)
        self.options.append(list(chances))
        if at == len(self.decisions):
            self.decisions.append(next(i for i, p in enumerate(chances) if p > 0))
        return self.decisions[at]

    def weight(self) -> float:
        return math.prod(chances[i] for chances, i in zip(self.options, self.decisions, strict=True))

    def others(self) -> list[list[int]]:
        """The runs that leave this one at a decision which it made on its own."""
        return [
            [*self.decisions[:at], i]
            for at in range(self.given, len(self.decisions))
            for i, p in enumerate(self.options[at])
            if p > 0 and i != self.decisions[at]
        ]

    def multinomial(self, probs: Tensor, num_samples: int, replacement: bool = False, **more: Any) -> Tensor:
        """One draw or, without replacement, several; each is a decision."""
        assert probs.ndim == 1
        assert num_samples == 1 or not replacement
        left, drawn = probs.double().clone(), []
        for _ in range(num_samples):
            drawn.append(self.pick((left / left.sum()).tolist()))
            left[drawn[-1]] = 0
        return torch.tensor(drawn)

    def draw_distinct(self, probs: Tensor, num: int, generator: torch.Generator) -> Tensor:
        """So many different tokens in drawn order, impossible ones last."""
        possible = self.multinomial(probs, min(num, int((probs > 0).sum())))
        rest = [token for token in range(len(probs)) if token not in possible.tolist()]
        return torch.tensor([*possible.tolist(), *rest][:num])

    def uniform(self, generator: torch.Generator) -> Toss:
        return Toss(self)


class Toss:
    """A uniform number that nobody has looked at yet, times a factor."""

    def __init__(self, script: Script, factor: float = 1.0):
        self._script, self._factor = script, factor

    def __mul__(self, factor: float) -> Toss:
        return Toss(self._script, self._factor * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        chance = float(bound > 0) if self._factor == 0 else min(1.0, max(0.0, bound / self._factor))
        return not self._script.pick([chance, 1 - chance])


def law_of(
    drafter: Drafter, sampling: Sampling, monkeypatch: pytest.MonkeyPatch, *, vocab: int, length: int,
    stop_ids: Sequence[int] = (), layers: int = 2,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """The exact law of a drafter's answers: every draw and every coin of the whole loop is taken each way."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    todo: list[list[int]] = [[]]
    target = _lawful(vocab, layers)
    drafter.start_stream(target)
    while todo:
        script = Script(todo.pop())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", script.multinomial)
            patch.setattr(verify_module, "uniform", script.uniform)
            for name, module in list(sys.modules.items()):
                if name.startswith("baselines.") and hasattr(module, "draw_distinct"):
                    patch.setattr(module, "draw_distinct", script.draw_distinct)
            randomness = Randomness.seeded(0)
            before = [g.get_state() for g in (randomness.draft, randomness.accept)]
            generation = Generation(length, frozenset(stop_ids), sampling)
            got = decode(target, drafter, LAW_PROMPT, generation, randomness, FakeClock())
            after = [g.get_state() for g in (randomness.draft, randomness.accept)]
            assert all(map(torch.equal, before, after)), "there are draws that the script does not see"
        law[tuple(got.output_ids)] += script.weight()
        todo += script.others()
    return law


def assert_same_law(got: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> None:
    assert sum(got.values()) == pytest.approx(1, abs=1e-5)
    gaps = {key: got.get(key, 0.0) - wanted.get(key, 0.0) for key in {*got, *wanted}}
    worst = max(gaps, key=lambda key: abs(gaps[key]))
    variation = sum(map(abs, gaps.values())) / 2
    assert variation < 2e-5, f"total variation {variation:.3g}; worst at {worst}: {gaps[worst]:+.3g}"


HOT, COLD = Sampling(1.0), Sampling(0.5, top_p=0.9)
LAWFUL: dict[str, Callable[[], Drafter]] = {
    "no draft": NoDraft,
    "clasp": lambda: clasp(1, None, 1, 0.0, 4),
    "clasp that exits early": lambda: clasp(1, None, 1, 0.4, 4),
    "clasp that drops unsure tokens": lambda: clasp(1, None, 1, 0.4, 4, "drop"),
    "clasp with greedy drafts": lambda: clasp(1, None, 1, 0.0, 4, "keep", "greedy"),
    "clasp with greedy drafts that drops": lambda: clasp(1, None, 1, 0.4, 4, "drop", "greedy"),
    "random sets": lambda: random_skip(1, None, "step", 0.0, 4),
    "half of the target": lambda: SelfDrafter(FixedPolicy(attn=[0, 1], mlp=[1]), FixedExit(0.3), ChainRule(4)),
}


@pytest.mark.parametrize("sampling", [HOT, COLD], ids=["T=1", "T=0.5 top_p=0.9"])
@pytest.mark.parametrize("name", LAWFUL)
def test_the_exact_law_of_three_tokens_is_the_targets(
    name: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = law_of(LAWFUL[name](), sampling, monkeypatch, vocab=4, length=3)
    assert_same_law(got, exact_law(4, sampling, 3))


@pytest.mark.parametrize("name", ["clasp"])
def test_the_exact_law_of_four_tokens_is_the_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of two: rejection at either place, and a round behind it."""
    got = law_of(LAWFUL[name](), HOT, monkeypatch, vocab=VOCAB, length=4)
    assert_same_law(got, exact_law(VOCAB, HOT, 4))


@pytest.mark.parametrize("name", ["clasp", "clasp with greedy drafts"])
def test_the_exact_law_of_answers_that_may_stop_is_the_targets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = law_of(LAWFUL[name](), HOT, monkeypatch, vocab=VOCAB, length=4, stop_ids=(1,))
    wanted = exact_law(VOCAB, HOT, 4, (1,))
    assert len({len(key) for key in wanted}) == 4
    assert_same_law(got, wanted)


class Guesses(Around):
    """Two siblings drawn without replacement from a law of its own, and a child under the second."""

    def __init__(self) -> None:
        super().__init__(NoDraft())

    def extra_slots(self, budget: int) -> int:
        return 2

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self._turn = turn
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        generator = self._turn.randomness.draft
        law = torch.tensor([0.6, 0.4, 0.0]).roll(last_token)
        first = int(torch.multinomial(law, 1, generator=generator))
        left = law.clone()
        left[first] = 0
        second = int(torch.multinomial(left, 1, generator=generator))
        if limit == 1:
            return Draft((first, second), torch.stack((law, law)), (0, 0))
        below = torch.tensor([0.0, 0.2, 0.8])
        third = int(torch.multinomial(below, 1, generator=generator))
        return Draft((first, second, third), torch.stack((law, law, below)), (0, 0, 2))


def test_the_exact_law_behind_a_tree_is_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    got = law_of(Guesses(), HOT, monkeypatch, vocab=VOCAB, length=4)
    assert_same_law(got, exact_law(VOCAB, HOT, 4))


@pytest.mark.parametrize("num_draws", [400, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", [HOT, COLD], ids=["T=1", "T=0.5 top_p=0.9"])
@pytest.mark.parametrize("name", ["no draft", "clasp", "random sets"])
def test_the_simulated_law_of_three_tokens_is_the_targets(name: str, sampling: Sampling, num_draws: int) -> None:
    """Vocabulary 8, budget 4 so that drafts of two occur, the real generators; bins expect five or more.

    What scripted decisions cannot show: a number used twice, or generators that move together.
    """
    target, drafter = _lawful(8), LAWFUL[name]()
    counts = torch.zeros(8, 8, 8)
    budget = 3 if name == "no draft" else 4
    for seed in range(num_draws):
        counts[tuple(answer(target, drafter, LAW_PROMPT, budget, sampling=sampling, seed=seed).output_ids[:3])] += 1
    law = torch.zeros(8, 8, 8, dtype=torch.float64)
    for key, p in exact_law(8, sampling, 3).items():
        law[key] = p
    assert chi_square_p(counts, law) > FALSE_ALARMS


def test_at_a_low_temperature_sampling_is_nearly_greedy() -> None:
    target, prompt, expected = truth(torch.float32, 1)
    for drafter in (NoDraft(), clasp(2, None, 4, 0.0, 5)):
        assert answer(target, drafter, prompt, 30, sampling=Sampling(1e-4)).output_ids == expected[:30]


# ---- time (D4)


class Costly(Around):
    """An oracle whose every phase costs a known time: prefill 10, choosing before the first round 0.5, drafting
    0.4 a token, verification 1, choosing after a round 0.25."""

    def __init__(self, inner: Drafter, clock: FakeClock):
        super().__init__(inner)
        self._clock = clock
        self._num_observed = 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        self._clock.pass_(10 if prefill else 1)
        return False

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self.inner.start(turn, prompt, prefill)
        self._clock.pass_(0.5)
        return 1

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        draft = self.inner.propose(last_token, position, limit)
        self._clock.pass_(0.4 * len(draft.tokens))
        return draft

    def observe(self, verified: Verified) -> int:
        self._clock.pass_(0.25)
        self._num_observed += 1
        return 2 * (self._num_observed % 2)


def test_times_by_hand() -> None:
    """Budget 12, drafts of 4: the first token is prefill's, then 5, 5 and 1 tokens in three rounds."""
    target, prompt, expected = truth(torch.float32, 0)
    clock = FakeClock()
    drafter = Costly(Scripted(expected, 4), clock)
    got = decode(target, drafter, prompt, Generation(12, frozenset()), Randomness.seeded(0), clock)
    assert got.output_ids == expected[:12]
    assert got.rounds.num_emitted == [5, 5, 1]
    assert got.prefill_s == pytest.approx(10)
    assert got.rounds.draft_s == pytest.approx([1.6, 1.6, 0.0])
    assert got.rounds.verify_s == pytest.approx([1.0, 1.0, 1.0])
    assert got.rounds.select_s == pytest.approx([0.75, 0.25, 0.0])
    assert got.rounds.num_searches == [3, 0, 0]
    assert got.decode_s == pytest.approx(0.5 + 3.2 + 3.0 + 0.5)
    assert clock.num_readings == 3


def test_time_between_the_phases_is_decode_time_of_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own share (cutting, counting) is decode_s minus the phases."""
    from clasp_core import decoding

    target, prompt, expected = truth(torch.float32, 0)
    clock = FakeClock()
    cut = decoding._cut

    def slow_cut(*args: Any) -> list[int]:
        clock.pass_(0.125)
        return cut(*args)

    monkeypatch.setattr(decoding, "_cut", slow_cut)
    drafter = Costly(Scripted(expected, 4), clock)
    got = decode(target, drafter, prompt, Generation(12, frozenset()), Randomness.seeded(0), clock)
    phases = sum(map(sum, (got.rounds.draft_s, got.rounds.verify_s, got.rounds.select_s)))
    assert got.decode_s - phases == pytest.approx(3 * 0.125)


def test_autoregressive_time_is_verification_alone() -> None:
    target, prompt, _ = truth(torch.float32, 0)
    clock = FakeClock()

    class Timed(Around):
        def needs_hidden(self, *, prefill: bool) -> bool:
            clock.pass_(10 if prefill else 1)
            return False

    got = decode(target, Timed(NoDraft()), prompt, Generation(11, frozenset()), Randomness.seeded(0), clock)
    assert (got.prefill_s, got.decode_s) == (10, 10)
    assert got.rounds.verify_s == [1.0] * 10
    assert got.rounds.draft_s == got.rounds.select_s == [0.0] * 10


def test_states_are_kept_only_when_asked_for() -> None:
    target, prompt, _ = truth(torch.float32, 0)
    seen: list[tuple[bool, int]] = []

    class Sometimes(Scripted):
        wants = False

        def needs_hidden(self, *, prefill: bool) -> bool:
            self.wants = prefill or not self.wants
            return self.wants

        def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
            assert prefill.hidden is not None
            assert [len(states) for states in prefill.hidden] == [1] * 9
            return super().start(turn, prompt, prefill)

        def observe(self, verified: Verified) -> int:
            assert (verified.hidden is not None) == self.wants
            if verified.hidden is None:
                with pytest.raises(RuntimeError, match="needs_hidden"):
                    verified.last_states()
            else:
                assert {len(states) for states in verified.hidden} == {len(verified.draft.tokens) + 1}
                assert [tuple(states.shape) for states in verified.last_states()] == [(1, 32)] * 9
            seen.append((self.wants, verified.num_accepted))
            return 0

    expected = truth(torch.float32, 0)[2]
    answer(target, Sometimes(expected, 3, wrong=lambda i: i % 7 == 6), prompt, BUDGET)
    assert {wants for wants, _ in seen} == {True, False}


class Recorder:
    """Stands in for a CUDA call and notes its order."""

    def __init__(self, log: list[str], name: str):
        self._log, self._name = log, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._log.append(self._name + "".join(f" {arg}" for arg in args))
        return 0.0


def test_no_cuda_call_is_made_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    for name in ("synchronize", "current_stream", "Event", "Stream", "set_device", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, Recorder(log, name))
    target, prompt, expected = truth(torch.float32, 0)
    cpu = torch.device("cpu")
    drafter = clasp(2, None, 2, 0.0, 4)
    drafter.start_stream(target)
    clock = DeviceClock([cpu], cpu)
    begun = time.perf_counter()
    got = decode(target, drafter, prompt, Generation(16, frozenset()), Randomness.seeded(0), clock)
    took = time.perf_counter() - begun
    assert log == []
    assert got.output_ids == expected[:16]
    phases = sum(map(sum, (got.rounds.draft_s, got.rounds.verify_s, got.rounds.select_s)))
    assert 0 < phases <= got.decode_s < got.decode_s + got.prefill_s <= took
    assert min(got.rounds.verify_s) > 0


def test_every_device_is_idle_before_the_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: sync, sync, read; a mark inside the timed region waits for nobody."""
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", Recorder(log, "sync"))
    monkeypatch.setattr(time, "perf_counter", Recorder(log, "read"))
    clock = DeviceClock([torch.device("cuda:0"), torch.device("cpu"), torch.device("cuda:1")], torch.device("cpu"))
    clock.now()
    assert log == ["sync cuda:0", "sync cuda:1", "read"]
    log.clear()
    clock.mark()
    assert log == ["read"]


def test_the_clock_is_read_around_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings: before the first forward, behind the first token, behind the last round."""
    from clasp_core import decoding

    log: list[str] = []
    real = decoding.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        log.append("forward")
        return real(*args, **kwargs)

    class Clock(FakeClock):
        def now(self) -> float:
            log.append("read")
            return super().now()

    monkeypatch.setattr(decoding, "forward", forward)
    target, prompt, _ = truth(torch.float32, 0)
    decode(target, NoDraft(), prompt, Generation(4, frozenset()), Randomness.seeded(0), Clock())
    assert log == ["read", "forward", "read", "forward", "forward", "forward", "read"]


# ---- the contract of every method in conf/method


def proposes(path: Path) -> bool:
    """Whether a method's file builds a drafter; a function is taken for one, a class is asked for `propose`."""
    built = hydra.utils.get_object(OmegaConf.load(path)._target_)
    return not isinstance(built, type) or hasattr(built, "propose")


METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml") if proposes(path))
OVERRIDES: dict[str, dict[str, Any]] = {
    "self_sd": {"skip_set": {"attn": [1], "mlp": [0]}},
    "swift": {"search": {"context_window": 4, "bayes_interval": 3}},
}
"""What a method needs to fit the small target, and to do on short answers all that it does on long ones."""


@cache
def _cousin(vocab: int) -> TargetModel:
    """A draft model that agrees with the target now and then."""
    if vocab != 64:
        return make_target(layers=1, width=16, vocab=vocab, sharpness=1.5, seed=9)
    return make_target(depth_gain=0.13)


def from_yaml(name: str, *, vocab: int = 64, **overrides: Any) -> Drafter:
    """A drafter as its configuration file builds it. A model that it asks for (`model`) is a small one."""
    settings: Any = OmegaConf.load(ROOT / "conf" / "method" / f"{name}.yaml")
    groups = [str(next(iter(entry)) if hasattr(entry, "keys") else entry) for entry in settings.pop("defaults", [])]
    known = {key: value for key, value in overrides.items() if key in settings}
    parts: dict[str, Any] = {}
    if any(group.endswith("@model") for group in groups) or "model" in settings:
        parts["model"] = SimpleNamespace(load=lambda engine: SimpleNamespace(target=_cousin(vocab)))
    whole = OmegaConf.create({"seed": 0, "method": {name: OmegaConf.merge(settings, OVERRIDES.get(name, {}), known)}})
    method = hydra.utils.instantiate(whole.method[name], **parts)
    assert hasattr(method, "propose"), f"{name} builds no drafter"
    return method  # type: ignore[no-any-return]


every_method = pytest.mark.parametrize("name", METHODS)


def has_key(name: str, key: str) -> bool:
    """Whether a method's file knows an option; else a test of its values would run the same thing again."""
    return key in OmegaConf.load(ROOT / "conf" / "method" / f"{name}.yaml")


with_threshold = pytest.mark.parametrize(
    ("name", "threshold"),
    [(name, value) for name in METHODS for value in ((0.0, 0.3) if has_key(name, "exit_threshold") else (0.0,))],
)


@with_threshold
def test_each_method_is_lossless_and_leaves_a_full_cache(name: str, threshold: float) -> None:
    """D6 in float64 after every search, draft and verification; answers equal AR's and Hugging Face's."""
    for seed in (0, 2):
        target, prompt, expected = truth(torch.float64, seed)
        drafter = Audited(from_yaml(name, exit_threshold=threshold, interval=2, redraw="round"))
        got = answer(target, drafter, prompt, 24)
        assert got.output_ids == expected[:24]
        assert drafter.num_audits >= 2 * len(got.rounds)
        check_counts(got, 24)


@every_method
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_each_method_is_lossless_in_float32(name: str, engine: Engine) -> None:
    """As its file has it, but for the first run, which drafts as long as it may."""
    for seed in range(3):
        target, prompt, expected = truth(torch.float32, seed, engine=engine)
        drafter = from_yaml(name) if seed else from_yaml(name, exit_threshold=0.0)
        assert answer(target, drafter, prompt, 48).output_ids == expected[:48]


@with_threshold
@pytest.mark.parametrize("sampling", [HOT, COLD], ids=["T=1", "T=0.5 top_p=0.9"])
def test_each_methods_exact_law_of_three_tokens_is_the_targets(
    name: str, sampling: Sampling, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = from_yaml(name, vocab=VOCAB, exit_threshold=threshold)
    got = law_of(drafter, sampling, monkeypatch, vocab=VOCAB, length=3, layers=4)
    assert_same_law(got, exact_law(VOCAB, sampling, 3, (), 4))


@every_method
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("offset", [0, 1, 4, 7])
def test_each_method_stops_where_the_target_stops(name: str, offset: int, engine: Engine) -> None:
    target, prompt, expected = truth(torch.float32, 1, engine=engine)
    stop_ids = [expected[offset], expected[offset + 9]]
    got = answer(target, from_yaml(name, exit_threshold=0.0), prompt, BUDGET, stop_ids=stop_ids)
    assert got.output_ids == stopped(expected, stop_ids)
    check_counts(got, BUDGET, stop_ids)


@every_method
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_each_method_keeps_to_the_budget(name: str, budget: int, engine: Engine) -> None:
    target, prompt, expected = truth(torch.float32, 2, engine=engine)
    got = answer(target, from_yaml(name, exit_threshold=0.0), prompt, budget)
    assert got.output_ids == expected[:budget]
    check_counts(got, budget)


def summary(got: Answer) -> tuple[Any, ...]:
    rounds = got.rounds
    return got.output_ids, rounds.num_drafted, rounds.num_accepted, rounds.num_emitted, rounds.skip, rounds.num_searches


@every_method
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "sampled"])
def test_two_instances_do_not_interact(name: str, sampling: Sampling) -> None:
    """A whole answer of a second instance, on another prompt, fits between two rounds of the first."""
    target, prompt, _ = truth(torch.float32, 0)
    other_prompt = ids(14, seed=9)
    alone = answer(target, from_yaml(name, exit_threshold=0.0), prompt, 24, sampling=sampling)
    other_alone = answer(target, from_yaml(name, exit_threshold=0.2), other_prompt, 24, sampling=sampling, seed=3)
    within: list[Answer] = []

    class Interrupted(Around):
        def propose(self, last_token: int, position: int, limit: int) -> Draft:
            if len(within) < 2:
                second = from_yaml(name, exit_threshold=0.2)
                within.append(answer(target, second, other_prompt, 24, sampling=sampling, seed=3))
            return self.inner.propose(last_token, position, limit)

    got = answer(target, Interrupted(from_yaml(name, exit_threshold=0.0)), prompt, 24, sampling=sampling)
    assert summary(got) == summary(alone)
    assert [summary(each) for each in within] == [summary(other_alone)] * 2


@every_method
def test_a_new_stream_forgets_the_last_one(name: str) -> None:
    target, prompt, _ = truth(torch.float32, 0)
    drafter = from_yaml(name, exit_threshold=0.0)
    first = answer(target, drafter, prompt, 24)
    answer(target, drafter, ids(20, seed=5), 24)
    assert summary(answer(target, drafter, prompt, 24)) == summary(first)


@pytest.mark.parametrize("name", ["ar", "clasp", "random_skip"])
def test_the_order_of_prompts_does_not_matter(name: str) -> None:
    """P30: these methods learn within a turn only; one stream, shuffled."""
    target = _target(torch.float32)
    prompts = {seed: ids(7 + seed, seed=seed) for seed in range(4)}
    results = []
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        drafter = from_yaml(name, exit_threshold=0.2, interval=3)
        drafter.start_stream(target)
        results.append(
            {seed: summary(answer(target, drafter, prompts[seed], 24, seed=seed, fresh=False)) for seed in order}
        )
    assert results[0] == results[1]


@every_method
def test_each_method_reports_searches_and_steps_that_add_up(name: str) -> None:
    target, prompt, _ = truth(torch.float32, 0)
    rounds = answer(target, from_yaml(name, exit_threshold=0.0, interval=2), prompt, 40).rounds
    assert all(searches >= 0 for searches in rounds.num_searches)
    assert all(code is None or LayerSkip.decode(code).num_layers == 8 for code in rounds.skip)
    assert all(steps >= 0 for steps in rounds.num_draft_steps)


@every_method
def test_each_method_refuses_nothing_on_other_sizes(name: str) -> None:
    """A stream may begin on another target: what belongs to the old one is forgotten."""
    drafter = from_yaml(name, exit_threshold=0.0)
    for layers in (8, 5, 2):
        target = make_target(layers=layers)
        prompt = ids(8)
        expected = answer(target, NoDraft(), prompt, 16).output_ids
        assert answer(target, drafter, prompt, 16).output_ids == expected


def test_reset_per_stream_is_lossless_too() -> None:
    target = _target(torch.float32)
    drafter = clasp(3, None, 2, 0.0, 4, reading=Reading(reset="stream", interval_unit="tokens"))
    drafter.start_stream(target)
    for seed in range(3):
        _, prompt, expected = truth(torch.float32, seed)
        assert answer(target, drafter, prompt, 30, fresh=False).output_ids == expected[:30]
