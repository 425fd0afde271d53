"""SWIFT: the tree by hand, lossless text and law, a cache that candidates leave alone, the search step by step."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    Around,
    FakeClock,
    answer,
    chi_square_p,
    distance,
    hf_greedy,
    ids,
    llama_config,
    make_target,
    prefilled,
    random_model,
    watched,
)
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baselines import swift as module
from baselines.swift import SwiftDrafter, TreeRule, agreement, draw_distinct, swift
from baselines.swift_search import Candidate, Search, SearchRule, SubLayers, initial_set, num_sublayers
from clasp_core import verify as verify_module
from clasp_core.attention import Span
from clasp_core.decoding import Answer, Drafter, Generation, Turn, Verified, decode
from clasp_core.drafting import NoDraft
from clasp_core.errors import NonFiniteLogits, UserError
from clasp_core.families import wiring_of
from clasp_core.plan import Plan
from clasp_core.records import Question
from clasp_core.runner import Runner
from clasp_core.sampling import Randomness, Sampling
from clasp_core.skip import LayerSkip
from clasp_core.target import Forward, TargetModel, forward
from clasp_core.verify import Draft

FALSE_ALARMS = 1e-4
"""The chance that a chi-square test below fails although the law is right; seeds are fixed."""
HOT, COLD = Sampling(1.0), Sampling(0.5, top_p=0.9)
SHAPES = pytest.mark.parametrize("shape", ["tree", "chain"])
DTYPES = [torch.float32, torch.float64]
QUICK = SearchRule(1, None, 1000, 300, 1.0, 6)
"""Short answers are enough for it: six predictions are scored, and no score ends it."""
BAYES = replace(QUICK, bayes_interval=4)
"""Every fourth candidate is the Gaussian process's."""


def small(shape: Any = "tree", *, threshold: float = 0.0, length: int = 5, **changes: Any) -> SwiftDrafter:
    """SWIFT with options that show something on short answers."""
    options = {"skip_ratio": 0.45, "num_skipped_sublayers": None, "search": QUICK, **changes}
    return swift(exit_threshold=threshold, max_draft_len=length, shape=shape, **options)


@cache
def target_of(dtype: torch.dtype) -> TargetModel:
    return make_target(dtype)


@cache
def truth(dtype: torch.dtype, which: int) -> tuple[TargetModel, list[int], list[int]]:
    """A target, a prompt, and the autoregressive answer, which is Hugging Face's too. Text 1 holds id 0."""
    target, seed = target_of(dtype), (3, 13, 12)[which]
    prompt = ids(9 + seed, seed=seed)
    expected = answer(target, NoDraft(), prompt, 72).output_ids
    assert expected == hf_greedy(target, prompt, 72)
    return target, prompt, expected


def stopped(expected: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
    """The autoregressive answer up to its first stop token."""
    first = next((i for i, token in enumerate(expected) if token in stop_ids), len(expected) - 1)
    return list(expected[: first + 1])


def summary(got: Answer) -> tuple[Any, ...]:
    rounds = got.rounds
    return got.output_ids, rounds.num_drafted, rounds.num_accepted, rounds.num_emitted, rounds.skip, rounds.num_searches


def everything(turn: Turn) -> list[Tensor]:
    """A copy of every slot of a cache, scratch and all."""
    store = turn.cache
    return [half.clone() for layer in range(store.num_layers) for half in store.read(layer, store.capacity)]


class Audited(Around):
    """After every prefill, verification and search the cache equals a fresh full forward over the text so far; a
    draft leaves the committed part alone, and learning leaves every single slot alone."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        self.turn, self.tokens, self.num_searches = turn, list(prompt), 0
        searches = self.inner.start(turn, prompt, prefill)
        self.audit()
        self.tokens.append(prefill.next_token)
        return searches

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        before = everything(self.turn)
        draft = self.inner.propose(last_token, position, limit)
        after = everything(self.turn)
        assert all(torch.equal(a[:, :position], b[:, :position]) for a, b in zip(before, after, strict=True))
        return draft

    def observe(self, verified: Verified) -> int:
        self.tokens += [verified.draft.tokens[row - 1] for row in verified.path[1:]]
        self.audit()
        before = everything(self.turn)
        searches = self.inner.observe(verified)
        assert all(map(torch.equal, before, everything(self.turn)))
        self.num_searches += searches
        self.tokens.append(verified.next_token)
        return searches

    def audit(self) -> None:
        stop = len(self.tokens)
        fresh, turn = prefilled(self.turn.target, self.tokens), self.turn
        worst = max(
            distance(ours, theirs)
            for layer in range(fresh.num_layers)
            for ours, theirs in zip(turn.cache.read(layer, stop), fresh.read(layer, stop), strict=True)
        )
        assert worst < (1e-10 if turn.target.dtype == torch.float64 else 1e-4), worst


# ---- the tree, by hand


def by_hand(*levels: dict[int, float], vocab: int = 16) -> tuple[Callable[[int, int], Tensor], list[tuple[int, int]]]:
    """A step that gives these probabilities one after the other (the rest is spread evenly), and what it was asked."""
    asked: list[tuple[int, int]] = []

    def step(token: int, position: int) -> Tensor:
        level = levels[len(asked)]
        asked.append((token, position))
        probs = torch.full((vocab,), (1 - sum(level.values())) / (vocab - len(level)), dtype=torch.float64)
        for index, p in level.items():
            probs[index] = p
        return probs.log()

    return step, asked


def a_turn(sampling: Sampling, stop_ids: Sequence[int] = (), seed: int = 0) -> Any:
    generation = Generation(99, frozenset(stop_ids), sampling)
    return SimpleNamespace(generation=generation, randomness=Randomness.seeded(seed))


LEVELS = ({7: 0.96, 0: 0.02}, {0: 0.9, 3: 0.05}, {5: 0.6, 4: 0.3}, {2: 0.4, 9: 0.3}, {1: 0.99})


def test_a_greedy_tree_by_hand() -> None:
    """Widths 3, 5, 8, 10 by confidence; the first child of each depth is the parent of the next."""
    step, asked = by_hand(*LEVELS)
    draft = TreeRule(4).draft(step, a_turn(Sampling()), 11, 30, 50, 0.0)
    assert asked == [(11, 30), (7, 31), (0, 32), (5, 33)]
    assert draft.num_steps == 4
    assert draft.parents == (*[0] * 3, *[1] * 5, *[4] * 8, *[9] * 10)
    assert draft.tokens[:2] == (7, 0)
    assert draft.tokens[3:5] == (0, 3)
    assert draft.tokens[8:10] == (5, 4)
    assert draft.tokens[16:18] == (2, 9)
    assert draft.probs is None


@pytest.mark.parametrize(
    ("threshold", "limit", "stop_ids", "steps"),
    [(0.8, 50, (), 3), (0.95, 50, (), 2), (0.97, 50, (), 1), (0.0, 2, (), 2), (0.0, 1, (), 1), (0.0, 50, (0,), 2),
     (0.0, 50, (7,), 1), (0.0, 50, (3, 9), 5)],
)  # fmt: skip
def test_a_tree_ends_behind_an_unsure_token_at_a_stop_token_and_at_the_limit(
    threshold: float, limit: int, stop_ids: tuple[int, ...], steps: int
) -> None:
    """The token that ends it stays, with its siblings."""
    step, asked = by_hand(*LEVELS)
    draft = TreeRule(5).draft(step, a_turn(Sampling(), stop_ids), 11, 30, limit, threshold)
    assert len(asked) == draft.num_steps == steps
    assert len(draft.tokens) == sum((3, 5, 8, 10, 3)[:steps])
    assert Span.tree(30, draft.parents or ()).last_position == 30 + steps


def test_a_token_as_sure_as_the_threshold_is_drafted_past() -> None:
    """Two equally probable tokens: exactly a half."""
    for threshold, steps in ((0.5, 2), (0.5000001, 1)):
        step, _ = by_hand({0: 0.5}, {0: 0.5}, vocab=2)
        assert TreeRule(2).draft(step, a_turn(Sampling()), 0, 30, 50, threshold).num_steps == steps


@pytest.mark.parametrize(
    ("confidence", "greedy", "sampled"),
    [(0.96, 3, 1), (0.95, 5, 3), (0.81, 5, 3), (0.8, 8, 5), (0.51, 8, 5), (0.5, 10, 10), (0.01, 10, 10)],
)
def test_the_widths_are_the_published_ones(confidence: float, greedy: int, sampled: int) -> None:
    assert module._width(confidence, greedy=True) == greedy
    assert module._width(confidence, greedy=False) == sampled


def test_a_sampled_tree_lists_distinct_draws_with_the_law_they_were_drawn_from() -> None:
    """The law is the warped one before any removal; confidence is without warpers (0.44 here, 0.67 with them)."""
    sampling = Sampling(0.5)
    level = {3: 0.44, 8: 0.36}
    for seed in range(20):
        step, _ = by_hand(level)
        draft = TreeRule(1).draft(step, a_turn(sampling, seed=seed), 11, 30, 50, 0.0)
        assert len(set(draft.tokens)) == len(draft.tokens) == 10
        assert draft.probs is not None
        law = sampling.probs(by_hand(level)[0](0, 0))
        assert all(torch.equal(row, law) for row in draft.probs)
        assert law[3] == pytest.approx(0.44**2 / (0.44**2 + 0.36**2 + 14 * (0.2 / 14) ** 2), rel=1e-5)


@pytest.mark.parametrize(("sampling", "possible"), [(Sampling(1.0, top_k=2), 2), (Sampling(1.0, top_p=0.3), 1),
                                                    (Sampling(1e-3), 1)])  # fmt: skip
def test_fewer_possible_tokens_than_children_give_fewer_children(sampling: Sampling, possible: int) -> None:
    """Nothing impossible is ever proposed, whatever the width (10 here)."""
    for seed in range(20):
        step, _ = by_hand({3: 0.44, 8: 0.36})
        draft = TreeRule(1).draft(step, a_turn(sampling, seed=seed), 11, 30, 50, 0.0)
        assert len(draft.tokens) == possible
        assert set(draft.tokens) <= {3, 8}
        assert draft.probs is not None
        assert draft.probs.shape == (possible, 16)


def test_a_vocabulary_smaller_than_a_level_is_proposed_whole() -> None:
    step, _ = by_hand({1: 0.3}, vocab=4)
    assert sorted(TreeRule(1).draft(step, a_turn(Sampling()), 0, 0, 9, 0.0).tokens) == [0, 1, 2, 3]


def test_distinct_draws_have_the_law_of_draws_without_replacement() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(1)
    seen = Counter(tuple(draw_distinct(probs, 5, generator).tolist()) for _ in range(4000))
    assert all(order[-1] == 1 for order in seen)
    orders = list(itertools.permutations((0, 2, 3, 4)))
    law = []
    for order in orders:
        left, weight = 1.0, 1.0
        for token in order:
            weight *= float(probs[token]) / left
            left -= float(probs[token])
        law.append(weight)
    counts = torch.tensor([seen[(*order, 1)] for order in orders])
    assert chi_square_p(counts, torch.tensor(law, dtype=torch.float64)) > FALSE_ALARMS


@pytest.mark.parametrize(("shape", "sampling"), [("tree", Sampling()), ("tree", HOT), ("chain", Sampling())])
def test_a_draft_that_is_not_a_number_is_refused(shape: str, sampling: Sampling) -> None:
    drafter = small(shape)
    drafter._step = lambda token, position: torch.full((64,), math.nan)  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogits, match="draft's logits"):
        answer(target_of(torch.float32), drafter, ids(5), 9, sampling=sampling)


# ---- lossless text, a full cache


@SHAPES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_greedy_text_is_the_targets_and_the_cache_is_the_full_models(
    budget: int, dtype: torch.dtype, shape: str
) -> None:
    """Audited in every round, with searches in between; text 1 holds id 0."""
    for which, threshold in ((0, 0.0), (1, 0.2)) if budget == 64 else ((0, 0.0), (1, 0.2), (2, 0.8)):
        target, prompt, expected = truth(dtype, which)
        drafter = Audited(small(shape, threshold=threshold, search=BAYES))
        got = answer(target, drafter, prompt, budget)
        assert got.output_ids == expected[:budget]
        assert got.stop_reason == "length"
        assert sum(got.rounds.num_emitted) + 1 == budget
        assert sum(got.rounds.num_searches) == (drafter.num_searches if budget > 1 else 0)
        if budget == 64:
            assert sum(got.rounds.num_searches) >= 10
            assert len(set(got.rounds.skip)) > 1
            assert {1, 2, 3} <= set(got.rounds.num_accepted)


def test_id_0_is_a_token_like_any_other() -> None:
    """The published tree pads with it. Here the text holds it, drafts propose it, and it is accepted and rejected."""
    target, prompt, expected = truth(torch.float32, 1)
    assert 0 in expected[1:40]
    fates: set[tuple[bool, bool]] = set()

    class Zeros(Around):
        def observe(self, verified: Verified) -> int:
            kept = [verified.draft.tokens[row - 1] for row in verified.path[1:]]
            fates.add((0 in verified.draft.tokens, 0 in kept))
            return self.inner.observe(verified)

    for shape, length in itertools.product(("tree", "chain"), (1, 3, 7)):
        drafter = small(shape, length=length, num_skipped_sublayers=1, skip_ratio=None, search=None)
        assert answer(target, Zeros(drafter), prompt, 64).output_ids == expected[:64]
    assert fates == {(True, True), (True, False), (False, False)}


def mostly_right(shape: str) -> SwiftDrafter:
    """One sub-layer is left out, so many drafts are accepted whole."""
    return small(shape, length=7, skip_ratio=None, num_skipped_sublayers=1, search=None)


@SHAPES
@pytest.mark.parametrize("offset", range(24))
def test_generation_ends_at_a_stop_token_wherever_it_lies_in_a_block(offset: int, shape: str) -> None:
    """Blocks of up to 8, and (at every second offset) with the search running."""
    target, prompt, expected = truth(torch.float32, 0)
    stop_ids = [expected[offset]]
    for drafter in (mostly_right(shape), small(shape))[: 2 - offset % 2]:
        got = answer(target, drafter, prompt, 40, stop_ids=stop_ids)
        assert got.output_ids == stopped(expected[:40], stop_ids)
        assert sum(got.rounds.num_emitted) + 1 == len(got.output_ids)
        assert got.stop_reason == "stop"


@SHAPES
def test_every_offset_inside_a_block_was_met(shape: str) -> None:
    target, prompt, expected = truth(torch.float32, 0)
    answers = [answer(target, mostly_right(shape), prompt, 40, stop_ids=[expected[offset]]) for offset in range(24)]
    assert set(range(1, 9)) == {got.rounds.num_emitted[-1] for got in answers if len(got.rounds)}


@pytest.mark.parametrize("sampling", [Sampling(), HOT, COLD], ids=["greedy", "T=1", "T=0.5 top_p=0.9"])
def test_the_widest_tree_fits_behind_the_longest_answer(sampling: Sampling) -> None:
    """Confidence is low, so levels are ten wide: the head-room is needed at the very end of the budget."""
    target = make_target(sharpness=0.5)
    drafter = small(length=25)
    got = answer(target, drafter, ids(5), 30, sampling=sampling)
    assert len(got.output_ids) == 30
    assert max(got.rounds.num_drafted) > (100 if sampling != COLD else 30)


# ---- the law of sampled answers

PROMPT = [1, 0, 2, 2, 0]


@cache
def lawful(vocab: int) -> TargetModel:
    """Four layers; what is drafted without most of the two inner ones is far from the target's law."""
    return make_target(layers=4, width=16, vocab=vocab, sharpness=3.0, depth_gain=1.0, seed=4)


def lawful_drafter(shape: str, threshold: float = 0.0) -> SwiftDrafter:
    rule = replace(QUICK, context_window=1)
    return small(shape, threshold=threshold, skip_ratio=None, num_skipped_sublayers=3, search=rule)


def warped(logits: Tensor, sampling: Sampling) -> list[float]:
    """Temperature and nucleus once more, in plain Python."""
    probs = (logits.double() / sampling.temperature).softmax(-1).tolist()
    kept: dict[int, float] = {}
    for token in sorted(range(len(probs)), key=lambda t: -probs[t]):
        if sum(kept.values()) < sampling.top_p:
            kept[token] = probs[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(probs))]


@cache
def exact_law(vocab: int, sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The joint law of an answer, from Hugging Face's forward over every context."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        with torch.inference_mode():
            logits = lawful(vocab).model(torch.tensor([[*PROMPT, *key] for key in law])).logits[:, -1]
        rows = zip(list(law), logits, strict=True)
        law = {
            (*key, token): law[key] * p for key, row in rows for token, p in enumerate(warped(row, sampling)) if p > 0
        }
    return law


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

    def others(self) -> Iterator[list[int]]:
        """The runs that leave this one at a decision which it made on its own."""
        for at in range(self.given, len(self.decisions)):
            for i, p in enumerate(self.options[at]):
                if p > 0 and i != self.decisions[at]:
                    yield [*self.decisions[:at], i]

    def multinomial(self, probs: Tensor, num_samples: int, **more: Any) -> Tensor:
        assert num_samples == 1
        return torch.tensor([self.pick((probs.double() / probs.double().sum()).tolist())])

    def draw_distinct(self, probs: Tensor, num: int, generator: torch.Generator) -> Tensor:
        left, order = probs.double().clone(), []
        for _ in range(min(num, int((left > 0).sum()))):
            order.append(self.pick((left / left.sum()).tolist()))
            left[order[-1]] = 0
        return torch.tensor(order + [token for token in range(len(probs)) if token not in order])[:num]

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


def law_of(drafter: Drafter, sampling: Sampling, vocab: int, length: int, patch: Any) -> dict[tuple[int, ...], float]:
    """The exact law of a drafter's answers: every draw and every coin of the whole loop is taken each way."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    todo: list[list[int]] = [[]]
    while todo:
        script = Script(todo.pop())
        with patch.context() as inner:
            inner.setattr(torch, "multinomial", script.multinomial)
            inner.setattr(module, "draw_distinct", script.draw_distinct)
            inner.setattr(verify_module, "uniform", script.uniform)
            got = answer(lawful(vocab), drafter, PROMPT, length, sampling=sampling)
        law[tuple(got.output_ids)] += script.weight()
        todo += script.others()
    return law


def variation(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


@pytest.mark.parametrize(
    ("sampling", "vocab", "length", "widths"),
    [(HOT, 4, 3, (2, 2, 2, 2)), (HOT, 3, 3, None), (COLD, 3, 4, (1, 2, 2, 2))],
    ids=["T=1, two children", "T=1, published widths", "T=0.5 top_p=0.9"],
)
def test_the_exact_law_of_tree_and_chain_is_the_targets(
    sampling: Sampling, vocab: int, length: int, widths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws without replacement, every order of them, and every coin: float32's rounding is all that is left.

    So small a vocabulary is covered by the published widths, so narrower ones let all children be rejected too.
    """
    if widths:
        monkeypatch.setattr(module, "SAMPLING_WIDTHS", widths)
    wanted = exact_law(vocab, sampling, length)
    tree, chain = (law_of(lawful_drafter(shape), sampling, vocab, length, monkeypatch) for shape in ("tree", "chain"))
    for law in (tree, chain):
        assert sum(law.values()) == pytest.approx(1, abs=1e-5)
        assert variation(law, wanted) < 2e-5
    assert variation(tree, chain) < 2e-5


@pytest.mark.parametrize(("shape", "sampling"), [("tree", HOT), ("tree", COLD), ("chain", HOT), ("chain", COLD)])
def test_the_simulated_law_of_three_tokens_is_the_targets(sampling: Sampling, shape: str) -> None:
    """Vocabulary 8, the published widths, the real generators, searches in between."""
    target, drafter = lawful(8), lawful_drafter(shape)
    counts = torch.zeros(8, 8, 8)
    for seed in range(350 if shape == "tree" else 200):
        counts[tuple(answer(target, drafter, PROMPT, 4, sampling=sampling, seed=seed).output_ids[:3])] += 1
    law = torch.zeros(8, 8, 8, dtype=torch.float64)
    for key, p in exact_law(8, sampling, 3).items():
        law[key] = p
    assert chi_square_p(counts, law) > FALSE_ALARMS


def test_the_draft_of_these_tests_is_far_from_the_target() -> None:
    """So that a wrong rule shows: a third of its law is elsewhere, and siblings of every rank are accepted."""
    target, ranks = lawful(8), set()
    gaps: list[float] = []

    class Watched(Around):
        def propose(self, last_token: int, position: int, limit: int) -> Draft:
            draft = self.inner.propose(last_token, position, limit)
            probs = target.model(torch.tensor([[*PROMPT, last_token]])).logits[0, -1].softmax(-1)
            assert draft.probs is not None
            gaps.append(float((draft.probs[0] - probs).abs().sum() / 2))
            return draft

        def observe(self, verified: Verified) -> int:
            ranks.add(verified.path[1] if verified.num_accepted else 0)
            return 0

    for seed in range(60):
        answer(target, Watched(lawful_drafter("tree")), PROMPT, 4, sampling=HOT, seed=seed)
    assert sum(gaps) / len(gaps) > 0.3
    assert {1, 2, 3, 4} <= ranks


# ---- scoring a candidate


def test_a_candidate_reads_the_cache_and_never_writes_it() -> None:
    """Every slot of every layer is bit for bit what it was, whether the candidate is good or bad."""
    target = target_of(torch.float32)
    prompt = ids(11)
    turn = Turn(target, prefilled(target, prompt, 40), Generation(20, frozenset()), Randomness.seeded(0))
    before = everything(turn)
    for skip in (LayerSkip.none(8), LayerSkip.layers(8, range(1, 7)), LayerSkip.layers(8, range(8))):
        agreement(turn, skip, ids(9, seed=1), 11)
        assert all(map(torch.equal, before, everything(turn)))


@pytest.mark.parametrize(("attn", "mlp"), [([], []), ([1, 2, 3], [1]), ([0, 6], [7]), (range(8), [])])
def test_the_score_is_what_the_sparse_model_says_token_by_token(attn: Sequence[int], mlp: Sequence[int]) -> None:
    """Against one token at a time behind a full prefill of the prompt, in a cache of its own."""
    target, prompt, expected = truth(torch.float64, 0)
    text = expected[:25]
    text[7:9] = [1, 2]
    skip = LayerSkip.sublayers(8, attn=attn, mlp=mlp)
    turn = Turn(target, prefilled(target, prompt, 90), Generation(20, frozenset()), Randomness.seeded(0))
    own = prefilled(target, prompt, 90)
    predicted = [
        int(forward(target, torch.tensor([token]), Span.causal(len(prompt) + i, 1), own, skip=skip).logits.argmax())
        for i, token in enumerate(text[:-1])
    ]
    matches = sum(a == b for a, b in zip(predicted, text[1:], strict=True))
    assert 0 < matches < 24
    assert agreement(turn, skip, text, len(prompt)) == matches / 24
    assert (agreement(turn, skip, expected[:25], len(prompt)) == 1) == (skip == LayerSkip.none(8))


def test_what_overflows_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(torch.float32)
    turn = Turn(target, prefilled(target, ids(5), 20), Generation(9, frozenset()), Randomness.seeded(0))
    logits = torch.zeros(4, 64)
    logits[0, 3] = 1.0
    logits[1] = math.nan
    logits[2, 5] = math.inf
    monkeypatch.setattr(module, "forward", lambda *args, **more: Forward(logits, None))
    assert agreement(turn, LayerSkip.none(8), [9, 3, 0, 5, 0], 5) == 2 / 4


def test_a_trial_leaves_the_cache_as_it_was() -> None:
    target = target_of(torch.float32)
    turn = Turn(target, prefilled(target, ids(6), 20), Generation(9, frozenset()), Randomness.seeded(0))
    before = [tuple(part.clone() for part in turn.cache.read(layer, 6)) for layer in range(8)]
    agreement(turn, LayerSkip.none(8), [9, 3, 0, 5, 0], 5)
    for layer, (keys, values) in enumerate(before):
        after = turn.cache.read(layer, 6)
        assert torch.equal(keys, after[0])
        assert torch.equal(values, after[1])


def planted() -> TargetModel:
    """Layers 2 and 5 of eight do nothing: their four sub-layers can be skipped without any loss."""
    config = llama_config()
    model = random_model(config, dtype=torch.float64, depth_gain=0.5)
    for layer in (2, 5):
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    return TargetModel(model, wiring_of(config))


def test_a_score_by_hand_on_a_planted_model() -> None:
    """The six pairs of idle sub-layers predict all of the target's own text, any other pair loses a quarter of it or
    more; a false last token costs one match of thirty."""
    target, prompt = planted(), ids(8)
    expected = answer(target, NoDraft(), prompt, 40).output_ids
    turn = Turn(target, prefilled(target, prompt, 60), Generation(9, frozenset()), Randomness.seeded(0))
    scores = {pair: agreement(turn, SubLayers(8, 2).decode(pair), expected[:31], 8)
              for pair in itertools.combinations(range(12), 2)}  # fmt: skip
    idle = set(itertools.combinations((1, 4, 7, 10), 2))
    assert {pair for pair, score in scores.items() if score == 1} == idle
    assert max(score for pair, score in scores.items() if pair not in idle) <= 0.75
    last_is_false = [*expected[:30], (expected[30] + 1) % 64]
    assert agreement(turn, SubLayers(8, 2).decode((1, 4)), last_is_false, 8) == 29 / 30


def test_the_search_finds_what_was_planted() -> None:
    """A score of 1 ends the search, and from then on chains are accepted whole."""
    target = planted()
    rule = SearchRule(1, None, 1000, 300, 0.99, 20)
    drafter = small("chain", skip_ratio=None, num_skipped_sublayers=2, search=rule)
    drafter.start_stream(target)
    for seed in range(3):
        answer(target, drafter, ids(8, seed=seed), 60, seed=seed, fresh=False)
    search = drafter.policy.search
    assert (search.best_score, search.stopped) == (1.0, "max_score")
    assert {*search.skip.skipped_attn, *search.skip.skipped_mlp} <= {2, 5}
    got = answer(target, drafter, ids(8, seed=9), 60, fresh=False)
    assert got.rounds.num_accepted == got.rounds.num_drafted
    assert sum(got.rounds.num_searches) == 0
    assert set(got.rounds.skip) == {search.skip.code}


# ---- the search, by hand


def a_search(rule: SearchRule, num_layers: int = 8, num_skipped: int = 5) -> Search:
    return Search(rule, initial_set(num_layers, None), SubLayers(num_layers, num_skipped))


def score_all(search: Search, scores: Sequence[float], seed: int = 0) -> list[Candidate]:
    """Propose and learn, one score after the other."""
    generator = torch.Generator().manual_seed(seed)
    tried = []
    for score in scores:
        tried.append(search.propose(generator))
        search.learn(tried[-1], score)
    return tried


PLAIN = replace(QUICK, context_window=4, max_score=0.93)


def test_a_better_candidate_takes_over_and_an_equal_one_does_not() -> None:
    search = a_search(PLAIN)
    first = search.skip
    seen = []
    tried = []
    for seed, score in enumerate((0.0, 0.25, 0.25, 0.0, 0.5, 0.25)):
        tried += score_all(search, [score], seed)
        seen.append((search.best_score, search.num_stale, search.stopped))
    assert seen == [(0, 1, None), (0.25, 0, None), (0.25, 1, None), (0.25, 2, None), (0.5, 0, None), (0.5, 1, None)]
    assert search.skip == tried[4].skip
    again = a_search(PLAIN)
    score_all(again, [0.0])
    assert again.skip == first == LayerSkip.layers(8, (1, 3, 5))


@pytest.mark.parametrize(
    ("changes", "scores", "reason"),
    [
        ({"max_score": 0.5}, [0.25, 0.5, 0.75], "max_score"),
        ({"max_score": 0.0}, [0.0, 0.1], "max_score"),
        ({"max_tolerance_iter": 2}, [0.5, 0.5, 0.25, 0.75, 0.5, 0.5, 0.75], "max_tolerance_iter"),
        ({"max_tolerance_iter": 0}, [0.5, 0.6, 0.6], "max_tolerance_iter"),
        ({"max_opt_iter": 3}, [0.1, 0.2, 0.3, 0.4], "max_opt_iter"),
        ({"max_opt_iter": 0}, [0.1], "max_opt_iter"),
    ],
)
def test_the_search_stops_for_good(changes: dict[str, Any], scores: Sequence[float], reason: str) -> None:
    """Behind the last of these scores, and not before; all limits are passed, not reached."""
    search = a_search(replace(PLAIN, **changes))
    score_all(search, scores[:-1])
    assert search.stopped is None
    assert search.due(0, 99)
    score_all(search, scores[-1:], seed=1)
    assert search.stopped == reason
    assert not search.due(0, 99)


def test_a_candidate_is_due_behind_long_enough_answers_and_every_few_rounds() -> None:
    search = a_search(replace(PLAIN, context_window=10, opt_interval=3))
    assert [tokens for tokens in range(20) if search.due(0, tokens)] == list(range(12, 20))
    assert [index for index in range(10) if search.due(index, 12)] == [0, 3, 6, 9]


def test_searches_in_an_answer_by_hand() -> None:
    """No draft is right here, so each round commits one token: the cache holds 1, 2, ... new tokens behind rounds
    0, 1, ...; with a window of 4 the first to be scored are six, behind round 5."""
    target, prompt, expected = truth(torch.float32, 0)

    class Wrong(Around):
        def propose(self, last_token: int, position: int, limit: int) -> Draft:
            wrong = (expected[position - len(prompt) + 1] + 1) % 64
            return replace(self.inner.propose(last_token, position, limit), tokens=(wrong,), parents=None)

    for interval, budget, rounds in ((1, 14, range(5, 12)), (3, 16, (6, 9, 12)), (7, 25, (7, 14, 21))):
        rule = replace(PLAIN, opt_interval=interval, max_score=1.0)
        got = answer(target, Wrong(small(search=rule)), prompt, budget)
        assert got.output_ids == expected[:budget]
        assert [index for index, num in enumerate(got.rounds.num_searches) if num] == list(rounds)


def test_rounds_are_counted_anew_in_each_answer() -> None:
    """With one candidate in five rounds, every answer of a stream tries its first behind the same round."""
    target, prompt, expected = truth(torch.float32, 0)
    drafter = small(search=replace(PLAIN, opt_interval=5, max_score=1.0), length=1)
    drafter.start_stream(target)
    firsts = []
    for budget in (15, 18, 24):
        got = answer(target, drafter, prompt, budget, fresh=False)
        assert got.output_ids == expected[:budget]
        firsts.append([index for index, num in enumerate(got.rounds.num_searches) if num])
    assert all(indices and all(index % 5 == 0 for index in indices) for indices in firsts)


def test_the_window_is_the_first_of_the_answer_and_candidates_see_the_prompt_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, prompt, expected = truth(torch.float32, 0)
    calls: list[tuple[list[int], int]] = []
    monkeypatch.setattr(module, "agreement", lambda turn, skip, tokens, start: calls.append((tokens, start)) or 0.5)
    got = answer(target, small(), prompt, 30)
    assert len(calls) == sum(got.rounds.num_searches) > 5
    assert all(call == (expected[:7], len(prompt)) for call in calls)


# ---- the space


def test_candidates_skip_m_inner_sub_layers_and_are_all_different() -> None:
    """A space of 15 sets: all of them come, then the search stops."""
    search = a_search(replace(PLAIN, max_score=1.0), num_layers=5, num_skipped=2)
    tried = score_all(search, [0.1] * 14)
    assert search.stopped is None
    tried += score_all(search, [0.1])
    assert search.stopped == "every set was scored"
    assert len({candidate.skip for candidate in tried}) == 15
    for candidate in tried:
        assert candidate.skip.num_skipped_sublayers == 2
        assert {*candidate.skip.skipped_attn, *candidate.skip.skipped_mlp} <= {1, 2, 3}
        ones = [index for index, bit in enumerate(candidate.point) if bit]
        assert SubLayers(5, 2).decode(ones) == candidate.skip
        assert set(candidate.point) == {0.0, 1.0}


def test_random_candidates_are_uniform() -> None:
    search, space = a_search(PLAIN, 5, 2), SubLayers(5, 2)
    generator = torch.Generator().manual_seed(3)
    seen = Counter(search.propose(generator).skip for _ in range(1500))
    sets = [space.decode(pair) for pair in itertools.combinations(range(6), 2)]
    counts = torch.tensor([seen[skip] for skip in sets])
    assert chi_square_p(counts, torch.full((15,), 1 / 15)) > FALSE_ALARMS


def test_coordinates_are_attentions_then_mlps() -> None:
    space = SubLayers(5, 2)
    assert (space.size, space.num_sets) == (6, 15)
    assert [space.decode([i]) for i in range(3)] == [LayerSkip.sublayers(5, attn=[i + 1], mlp=[]) for i in range(3)]
    assert [space.decode([i + 3]) for i in range(3)] == [LayerSkip.sublayers(5, attn=[], mlp=[i + 1]) for i in range(3)]


@pytest.mark.parametrize(
    ("num_layers", "exact", "attn", "mlp"),
    [
        (8, None, (1, 3, 5), (1, 3, 5)),
        (7, None, (1, 3, 5), (1, 3, 5)),
        (3, None, (1,), (1,)),
        (2, None, (), ()),
        (8, 6, (1, 3, 5), (1, 3, 5)),
        (8, 4, (1, 3), (1, 3)),
        (8, 5, (1, 3, 5), (1, 3)),
        (8, 1, (1,), ()),
        (8, 9, (1, 2, 3, 4, 5), (1, 2, 3, 5)),
        (8, 12, (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6)),
        (12, 4, (1, 5), (1, 5)),
    ],
)
def test_initial_sets_by_hand(num_layers: int, exact: int | None, attn: tuple[int, ...], mlp: tuple[int, ...]) -> None:
    skip = initial_set(num_layers, exact)
    assert (skip.skipped_attn, skip.skipped_mlp) == (attn, mlp)
    assert exact is None or skip.num_skipped_sublayers == exact


@pytest.mark.parametrize("num_layers", [3, 8, 30, 32, 80])
def test_an_exact_count_is_the_count_of_every_set(num_layers: int) -> None:
    for count in range(1, 2 * (num_layers - 2) + 1):
        skip = initial_set(num_layers, count)
        assert skip.num_skipped_sublayers == count == num_sublayers(count, None, num_layers)
        assert {*skip.skipped_attn, *skip.skipped_mlp} <= set(range(1, num_layers - 1))
    rounds = answer(target_of(torch.float32), small(skip_ratio=None, num_skipped_sublayers=7), ids(9), 40).rounds
    assert {LayerSkip.decode(code).num_skipped_sublayers for code in rounds.skip if code} == {7}


@pytest.mark.parametrize(
    ("ratio", "num_layers", "count"),
    [(0.45, 40, 34), (0.45, 80, 70), (0.45, 30, 25), (0.5, 32, 30), (0.45, 2, 0), (1.0, 5, 6)],
)
def test_the_ratio_is_of_the_inner_sub_layers_rounded_down(ratio: float, num_layers: int, count: int) -> None:
    assert num_sublayers(None, ratio, num_layers) == count


def test_a_model_without_inner_layers_drafts_with_all_of_it() -> None:
    target = make_target(layers=2)
    got = answer(target, small(), ids(6), 20)
    assert got.rounds.num_accepted == got.rounds.num_draft_steps
    assert sum(got.rounds.num_searches) == 0


# ---- suggestions of the Gaussian process


def test_every_fourth_candidate_is_the_m_largest_coordinates_of_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    search = a_search(BAYES)
    points = iter([(0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6, 0.5, 0.5, 0.0, 1.0), (0.5,) * 12, (0.5,) * 12])
    seeds: list[int] = []
    monkeypatch.setattr(search._surrogate, "suggest", lambda seed: seeds.append(seed) or next(points))
    tried = score_all(search, [0.1] * 12)
    # coordinates 11, 1, 3, 5 and 7: MLP 6, attentions 2, 4, 6 and MLP 2
    assert tried[3].skip == LayerSkip.sublayers(8, attn=[2, 4, 6], mlp=[2, 6])
    # of equal coordinates the first ones, here the attentions 1 to 5
    assert tried[7].skip == LayerSkip.sublayers(8, attn=[1, 2, 3, 4, 5], mlp=[])
    # the third suggestion was scored before, so a random one takes its place
    assert tried[11].skip != tried[7].skip
    assert len({candidate.skip for candidate in tried}) == 12
    assert len(set(seeds)) == 3


def test_suggestions_learn_from_scores_and_beat_chance() -> None:
    """Each sub-layer costs its own share: 12 of 24 coordinates, true worth by hand, 8 suggestions among 80."""
    costs = torch.linspace(0.0, 0.08, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(5))].tolist()
    search = a_search(SearchRule(1, 10, 1000, 300, 1.0, 4), num_layers=14, num_skipped=12)
    generator = torch.Generator().manual_seed(0)
    worth: dict[bool, list[float]] = {True: [], False: []}
    for index in range(1, 81):
        candidate = search.propose(generator)
        bits = [*candidate.skip.attn[1:-1], *candidate.skip.mlp[1:-1]]
        score = 1 - sum(cost for cost, bit in zip(costs, bits, strict=True) if bit)
        worth[index % 10 == 0].append(score)
        search.learn(candidate, score)
    assert np.mean(worth[True][2:]) > max(worth[False])


def global_states() -> list[Any]:
    """numpy's and torch's own generators: key and place."""
    _, key, place, *_ = np.random.get_state()  # noqa: NPY002
    return [key.tolist(), place, torch.get_rng_state().tolist()]


def test_suggestions_are_quiet_and_depend_on_the_seed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed in (1, 1, 2):
        np.random.rand()  # noqa: NPY002
        torch.rand(1)
        before = global_states()
        runs.append([candidate.skip for candidate in score_all(a_search(BAYES), [0.3, 0.1, 0.2, 0.5] * 2, seed)])
        assert global_states() == before
    assert runs[0] == runs[1] != runs[2]
    assert capsys.readouterr() == ("", "")


# ---- randomness


def test_greedy_answers_use_the_search_generator_only() -> None:
    target, prompt, expected = truth(torch.float32, 0)
    randomness = Randomness.seeded(7)
    everywhere = torch.get_rng_state()
    before = [g.get_state() for g in (randomness.draft, randomness.accept, randomness.search)]
    drafter = small()
    drafter.start_stream(target)
    got = decode(target, drafter, prompt, Generation(40, frozenset()), randomness, FakeClock())
    after = [g.get_state() for g in (randomness.draft, randomness.accept, randomness.search)]
    assert got.output_ids == expected[:40]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False]
    assert torch.equal(everywhere, torch.get_rng_state())


@SHAPES
def test_searching_does_not_shift_what_is_drafted_or_accepted(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P29: with the set held fixed, searches on or off give the same sampled text, round by round."""
    target, prompt, _ = truth(torch.float32, 0)
    monkeypatch.setattr(Search, "learn", lambda self, candidate, score: None)
    rounds = []
    for rule in (None, PLAIN):
        got = answer(target, small(shape, search=rule), prompt, 40, sampling=Sampling(0.8))
        rounds.append((got.output_ids, got.rounds.num_drafted, got.rounds.num_accepted))
    assert rounds[0] == rounds[1]


# ---- what is kept and what is forgotten


def stream_of(drafter: SwiftDrafter, seeds: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """The answers of one stream to prompts named by their seeds."""
    target = target_of(torch.float32)
    drafter.start_stream(target)
    return {seed: summary(answer(target, drafter, ids(9, seed=seed), 24, seed=seed, fresh=False)) for seed in seeds}


def test_streams_may_come_in_any_order() -> None:
    """P30: each of three streams gives the same wherever it comes, and all by itself."""
    streams = ((1, 2), (3,), (4, 5, 6))
    results = []
    for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
        drafter = small()
        results.append({seed: each for i in order for seed, each in stream_of(drafter, streams[i]).items()})
    assert all(result == results[0] for result in results)
    assert all(results[0][seed][5] for seed in range(1, 7))
    alone = {seed: each for stream in streams for seed, each in stream_of(small(), stream).items()}
    assert alone == results[0]


def test_within_a_stream_later_answers_profit_from_earlier_ones() -> None:
    """So that order matters there, and the test above says something."""
    learned = stream_of(small(), (1, 2))[2]
    assert learned != stream_of(small(), (2,))[2]
    assert learned[4][0] != initial_set(8, None).code
    assert learned == stream_of(small(reset="never"), (1, 2))[2]


def test_without_a_reset_a_new_stream_goes_on_and_forgetting_starts_anew() -> None:
    drafter = small(reset="never")
    warm = stream_of(drafter, (7,))
    assert stream_of(drafter, (1,)) != stream_of(small(), (1,))
    drafter.forget()
    assert stream_of(drafter, (1,)) == stream_of(small(), (1,))
    first = stream_of(drafter, (2,))[2]
    assert first == stream_of(small(), (1, 2))[2]
    drafter.forget()
    assert stream_of(drafter, (7,)) == warm


def test_another_target_is_another_stream_even_without_a_reset() -> None:
    """What was learned names layers of the old one, be the new one as deep."""
    drafter = small(reset="never")
    stream_of(drafter, (1,))
    for target in (make_target(layers=5), make_target(seed=1)):
        drafter.start_stream(target)
        assert drafter.policy.search.num_scored == 0
        prompt = ids(8)
        assert answer(target, drafter, prompt, 20).output_ids == answer(target, NoDraft(), prompt, 20).output_ids
        drafter.start_stream(target)
        assert drafter.policy.search.num_scored > 0


class Words:
    """A prompter whose prompt is a number's random ids."""

    def ids(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        return ids(6 + int(turns[0]) % 5, seed=int(turns[0])) if turns[0].isdigit() else [5] * len(turns[0])

    def text_of(self, answer: Sequence[int]) -> str:
        return ""


class Rows:
    """A store and a progress bar that keep what they are given."""

    run_id = "r"

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def append(self, rows: Sequence[Any]) -> None:
        self.rows += rows

    def update(self, rows: Sequence[Any]) -> None:
        pass


@pytest.mark.parametrize("reset", ["stream", "never"])
def test_a_warm_up_teaches_nothing(reset: str) -> None:
    """Warm-ups long enough to be learned from, two tasks, the runner itself: the rows are those of a cold run."""
    questions = [
        Question(question_id=index, task=f"task {index // 2}", category="c", turns=[str(index)]) for index in range(4)
    ]
    results = []
    for warm in (True, False):
        drafter, store = small(reset=reset), Rows()
        generation = Generation(24, frozenset())
        plan = Plan("m", {"ar": NoDraft(), "swift": drafter}, "ar", questions, generation, warm_up_tokens=30)
        runner = Runner(target_of(torch.float32), Words(), plan, FakeClock())  # type: ignore[arg-type]
        runner.check()
        if warm:
            runner.warm_up()
            assert drafter.policy.search.num_scored > 0
        assert runner.run(store, store) == 0
        results.append([(row.output_ids, row.rounds) for row in store.rows if row.method == "swift"])
    assert results[0] == results[1]
    assert len(results[0]) == 4


@SHAPES
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9)], ids=["greedy", "sampled"])
def test_two_instances_do_not_interact(sampling: Sampling, shape: str) -> None:
    """A whole answer of a second instance, on another prompt, between any two rounds of the first."""
    target = target_of(torch.float32)

    def other() -> tuple[Any, ...]:
        return summary(answer(target, small(shape, threshold=0.3), ids(14, seed=9), 16, sampling=sampling, seed=3))

    alone = answer(target, small(shape), ids(9), 24, sampling=sampling)
    other_alone = other()
    within: list[tuple[Any, ...]] = []

    class Interrupted(Around):
        def observe(self, verified: Verified) -> int:
            within.append(other())
            return self.inner.observe(verified)

    got = answer(target, Interrupted(small(shape)), ids(9), 24, sampling=sampling)
    assert summary(got) == summary(alone)
    assert all(each == other_alone for each in within)
    assert len(within) > 2


# ---- memory


class Made(TorchDispatchMode):
    """Notes, per operation, the most elements that a floating-point result of its own (no view) had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        own = not any(returned.alias_info for returned in func._schema.returns)
        for each in out if isinstance(out, tuple) else (out,):
            if own and isinstance(each, Tensor) and each.is_floating_point():
                self.sizes[str(func.overloadpacket)] = max(self.sizes[str(func.overloadpacket)], each.numel())
        return out


def made(max_positions: int, shape: str, sampling: Sampling) -> tuple[Counter[str], Counter[str], int]:
    """Sizes of results of the whole answer, and of what follows the prefill; the cache's capacity."""
    target = make_target(max_position_embeddings=max_positions)
    capacities, after = [], Made()

    class Behind(Around):
        def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
            capacities.append(turn.cache.capacity)
            behind.enter_context(after)
            return self.inner.start(turn, prompt, prefill)

    with Made() as whole, ExitStack() as behind:
        got = answer(target, Behind(small(shape)), ids(300), 24, sampling=sampling)
    assert sum(got.rounds.num_searches) > 3
    return whole.sizes, after.sizes, capacities[0]


@pytest.mark.parametrize(("shape", "sampling"), [("tree", Sampling()), ("tree", HOT), ("chain", HOT)])
def test_nothing_grows_with_the_position_limit_and_the_cache_is_never_copied(sampling: Sampling, shape: str) -> None:
    """P11, P65: the same sizes at a limit of 2048 and of a million. Behind the prefill nothing is made that is as
    large as one layer's keys, but for the mask of a pass, and nothing else larger than the prompt's keys in one layer
    and a window's."""
    whole, after, capacity = made(2048, shape, sampling)
    assert (whole, after, capacity) == made(1 << 20, shape, sampling)
    assert capacity == 300 + 24 + (9 * 5 if shape == "tree" else 0)
    mask = max(after.pop("aten.repeat", 0), after.pop("aten.new_zeros", 0))  # of a pass, for the 2 heads of a group
    assert mask <= 2 * (1 + 10 * 5) * capacity
    assert max(after.values()) == after["aten.cat"] == (300 + 6) * 2 * 8 < capacity * 2 * 8


# ---- options


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: small(skip_ratio=None), "skip_ratio"),
        (lambda: small(num_skipped_sublayers=3), "num_skipped_sublayers"),
        (lambda: small(skip_ratio=0.0), "skip_ratio is 0.0"),
        (lambda: small(skip_ratio=1.2), "skip_ratio is 1.2"),
        (lambda: small("bush"), "shape is 'bush'.*tree, chain"),
        (lambda: small(reset="turn"), "reset is 'turn'.*stream, never"),
        (lambda: small(length=0), "max_draft_len is 0"),
        (lambda: small("chain", length=0), "max_draft_len is 0"),
        (lambda: small(threshold=1.5), "exit_threshold is 1.5"),
        (lambda: replace(QUICK, opt_interval=0), "opt_interval is 0"),
        (lambda: replace(QUICK, bayes_interval=0), "bayes_interval is 0"),
        (lambda: replace(QUICK, context_window=0), "context_window is 0"),
        (lambda: replace(QUICK, max_opt_iter=-1), "max_opt_iter is -1"),
        (lambda: replace(QUICK, max_tolerance_iter=-1), "max_tolerance_iter is -1"),
        (lambda: replace(QUICK, max_score=1.1), "max_score is 1.1"),
        (lambda: num_sublayers(13, None, 8), "num_skipped_sublayers is 13.*1 to 12"),
        (lambda: num_sublayers(0, None, 8), "num_skipped_sublayers is 0.*1 to 12"),
        (lambda: small(skip_ratio=None, num_skipped_sublayers=13).start_stream(target_of(torch.float32)), "1 to 12"),
    ],
)
def test_bad_options_are_refused_by_name(make: Callable[[], object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        make()


def test_the_configuration_file_is_the_published_evaluation() -> None:
    node = OmegaConf.load(ROOT / "conf" / "method" / "swift.yaml")
    drafter = hydra.utils.instantiate(node, _convert_="all")
    assert isinstance(drafter, SwiftDrafter)
    assert drafter.extra_slots(1024) == 9 * 25
    assert drafter.exit_rule.threshold == 0.8
    drafter.start_stream(target_of(torch.float32))
    assert drafter.policy.search._rule == SearchRule(1, 25, 1000, 300, 0.93, 50)
    target, prompt, expected = truth(torch.float32, 2)
    got = answer(target, drafter, prompt, 72)
    assert got.output_ids == expected
    assert sum(got.rounds.num_searches) > 0


def test_room_for_leaves_is_bounded_by_the_budget() -> None:
    """A long max_draft_len costs no memory that no draft can fill."""
    drafter = swift(0.45, None, None, 0.0, 100_000)
    assert drafter.extra_slots(16) == 9 * 16
    capacities: list[int] = []
    target, prompt, expected = truth(torch.float32, 2)
    with watched(target, "new_cache", capacities.append):
        assert answer(target, drafter, prompt, 16).output_ids == expected[:16]
    assert capacities == [len(prompt) + 16 + 9 * 16]


def test_without_a_search_the_initial_set_stays() -> None:
    rounds = answer(target_of(torch.float32), small(search=None), ids(9), 40).rounds
    assert {code for code in rounds.skip if code} == {initial_set(8, None).code}
    assert sum(rounds.num_searches) == 0
