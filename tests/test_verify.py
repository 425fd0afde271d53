"""Verification and sampling as pure functions: by hand, by exact enumeration of every coin, and by simulation."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import chi_square_p
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from clasp_core import verify as module
from clasp_core.errors import NonFiniteLogits, UserError
from clasp_core.sampling import Randomness, Sampling, draw, greedy_tokens, uniform
from clasp_core.verify import Draft, Verdict, verify

GREEDY = Sampling()
FALSE_ALARMS = 1e-4
"""The chance that a chi-square test below fails although the law is right; seeds are fixed."""


def peaks(*tokens: int, vocab: int = 6) -> Tensor:
    """Logits whose row i has its maximum at tokens[i]."""
    logits = torch.linspace(0, 1, vocab).repeat(len(tokens), 1)
    logits[range(len(tokens)), list(tokens)] = 5.0
    return logits


def states(randomness: Randomness) -> list[Tensor]:
    return [g.get_state() for g in (randomness.draft, randomness.accept, randomness.search)]


# ---- greedy, by hand


@pytest.mark.parametrize(
    ("choices", "tokens", "path", "next_token"),
    [
        ((3,), (), (0,), 3),
        ((3, 1), (3,), (0, 1), 1),
        ((3, 1), (2,), (0,), 3),
        ((3, 1, 4), (3, 1), (0, 1, 2), 4),
        ((3, 1, 4), (3, 2), (0, 1), 1),
        ((3, 1, 4), (2, 1), (0,), 3),
        ((0, 0, 0, 0), (0, 0, 0), (0, 1, 2, 3), 0),
        ((1, 0, 2), (1, 0), (0, 1, 2), 2),
    ],
)
def test_greedy_chain_by_hand(
    choices: tuple[int, ...], tokens: tuple[int, ...], path: tuple[int, ...], next_token: int
) -> None:
    verdict = verify(peaks(*choices), Draft(tokens), GREEDY, Randomness.seeded(0))
    assert verdict == Verdict(path, next_token)
    assert verdict.num_accepted == len(path) - 1


# rows: 0 root; 1, 2 under it (tokens 5, 3); 3, 4 under 2 (tokens 0, 1); 5 under 4 (token 2)
TREE = Draft((5, 3, 0, 1, 2), parents=(0, 0, 2, 2, 4))


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ((4, 0, 0, 0, 0, 0), (0,), 4),
        ((5, 1, 0, 0, 0, 0), (0, 1), 1),
        ((3, 0, 2, 0, 0, 0), (0, 2), 2),
        ((3, 0, 0, 4, 0, 0), (0, 2, 3), 4),
        ((3, 0, 1, 0, 5, 0), (0, 2, 4), 5),
        ((3, 0, 1, 0, 2, 4), (0, 2, 4, 5), 4),
        ((0, 0, 0, 0, 0, 0), (0,), 0),
    ],
)
def test_greedy_tree_by_hand(choices: tuple[int, ...], path: tuple[int, ...], next_token: int) -> None:
    assert verify(peaks(*choices), TREE, GREEDY, Randomness.seeded(0)) == Verdict(path, next_token)


def test_a_leaf_is_followed_by_its_own_row_whatever_id_the_target_wants() -> None:
    """No padding child: id 0 behind a leaf is the target's token, not an accepted one (the SWIFT fault)."""
    verdict = verify(peaks(3, 1, 0), Draft((2, 3), parents=(0, 0)), GREEDY, Randomness.seeded(0))
    assert verdict == Verdict((0, 2), 0)


def test_a_chain_written_as_a_tree_has_the_same_verdict() -> None:
    for choices in itertools.product((0, 1), repeat=4):
        chain = verify(peaks(*choices), Draft((0, 1, 1)), GREEDY, Randomness.seeded(0))
        tree = verify(peaks(*choices), Draft((0, 1, 1), parents=(0, 1, 2)), GREEDY, Randomness.seeded(0))
        assert chain == tree


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_of_equal_logits_the_lower_id_wins(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 300, dtype=dtype)
    logits[1, [7, 250]] = 2.0
    logits[2, [299, 64]] = 2.0
    logits[3] = -3.0
    assert greedy_tokens(logits) == [0, 7, 64, 0]


def test_greedy_uses_no_randomness() -> None:
    randomness = Randomness.seeded(1)
    before, everywhere = states(randomness), torch.get_rng_state()
    for choices in itertools.product((0, 1, 2), repeat=3):
        verify(peaks(*choices), Draft((1, 2)), GREEDY, randomness)
        verify(peaks(*choices), Draft((1, 2), parents=(0, 0)), GREEDY, randomness)
    assert all(map(torch.equal, before, states(randomness)))
    assert torch.equal(everywhere, torch.get_rng_state())


def test_sampled_verification_draws_from_its_own_generator_only() -> None:
    randomness = Randomness.seeded(1)
    before, everywhere = states(randomness), torch.get_rng_state()
    verify(peaks(1, 2, 3), Draft((1, 2)), Sampling(1.0), randomness)
    after = states(randomness)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert torch.equal(everywhere, torch.get_rng_state())


def test_verification_changes_nothing_that_it_is_given() -> None:
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    probs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).softmax(-1)
    copies = logits.clone(), probs.clone()
    for seed in range(40):
        for parents in (None, (0, 0, 0, 1)):
            verify(logits, Draft((1, 2, 3, 4), probs, parents), Sampling(0.8, 4, 0.9), Randomness.seeded(seed))
    assert torch.equal(logits, copies[0])
    assert torch.equal(probs, copies[1])


# ---- what is not a number


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0), Sampling(0.7, 3, 0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_that_are_not_finite_are_refused(sampling: Sampling, bad: float, row: int) -> None:
    logits = peaks(1, 2, 3)
    logits[row, 4] = bad
    with pytest.raises(NonFiniteLogits, match=rf"target's logits.*row {row} .*float32"):
        verify(logits, Draft((1, 2)), sampling, Randomness.seeded(0))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)])
def test_a_row_without_any_token_is_refused(sampling: Sampling) -> None:
    logits = peaks(1, 2)
    logits[1] = -math.inf
    with pytest.raises(NonFiniteLogits, match="row 1"):
        verify(logits, Draft((1,)), sampling, Randomness.seeded(0))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)])
def test_masked_tokens_are_fine_and_never_drawn(sampling: Sampling) -> None:
    logits = torch.zeros(1, 4)
    logits[0, :3] = -math.inf
    assert {verify(logits, Draft.empty(), sampling, Randomness.seeded(s)).next_token for s in range(20)} == {3}


def test_the_refusal_names_the_dtype_and_its_limit() -> None:
    logits = torch.full((1, 4), math.inf, dtype=torch.float16)
    with pytest.raises(NonFiniteLogits, match=r"float16; .*6\.55e\+04.*model\.dtype"):
        verify(logits, Draft.empty(), GREEDY, Randomness.seeded(0))


# ---- the exact law: every coin is tossed both ways


@dataclass
class Coins:
    """Stands in for `uniform` and `draw`: runs a fixed script of decisions and notes their probabilities."""

    script: list[bool]
    chances: list[float] = field(default_factory=list)
    rest: Tensor | None = None

    def uniform(self, generator: torch.Generator) -> Toss:
        return Toss(self)

    def draw(self, probs: Tensor, generator: torch.Generator) -> int:
        self.rest = probs.double()
        return -1


@dataclass
class Toss:
    """A uniform number that has not been looked at yet, times a factor."""

    coins: Coins
    factor: float = 1.0

    def __mul__(self, factor: float) -> Toss:
        return Toss(self.coins, self.factor * factor)

    __rmul__ = __mul__

    def __lt__(self, bound: float) -> bool:
        chance = (1.0 if bound > 0 else 0.0) if self.factor == 0 else min(1.0, max(0.0, bound / self.factor))
        at = len(self.coins.chances)
        yes = self.coins.script[at] if at < len(self.coins.script) else True
        self.coins.chances.append(chance if yes else 1 - chance)
        if at >= len(self.coins.script):
            self.coins.script.append(True)
        return yes


def outcomes(
    logits: Tensor, draft: Draft, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """Every (path, next token) with its exact probability, for one draft."""
    scripts: list[list[bool]] = [[]]
    while scripts:
        start = scripts.pop()
        coins = Coins(list(start))
        monkeypatch.setattr(module, "uniform", coins.uniform)
        monkeypatch.setattr(module, "draw", coins.draw)
        verdict = verify(logits, draft, sampling, Randomness.seeded(0))
        scripts += [[*coins.script[:at], False] for at in range(len(start), len(coins.script))]
        weight = math.prod(coins.chances)
        assert coins.rest is not None
        if weight > 0:
            yield from ((verdict.path, token, weight * float(p)) for token, p in enumerate(coins.rest))


class Language:
    """Random target and draft logits for every context, over a vocabulary of `vocab`."""

    def __init__(self, seed: int, vocab: int = 4, spread: float = 1.2):
        self.vocab = vocab
        self._rng = torch.Generator().manual_seed(seed)
        self._spread = spread
        self._target: dict[tuple[int, ...], Tensor] = {}
        self._draft: dict[tuple[int, ...], Tensor] = {}

    def target(self, context: tuple[int, ...]) -> Tensor:
        return self._known(self._target, context)

    def draft(self, context: tuple[int, ...]) -> Tensor:
        return self._known(self._draft, context)

    def _known(self, table: dict[tuple[int, ...], Tensor], context: tuple[int, ...]) -> Tensor:
        if context not in table:
            table[context] = torch.randn(self.vocab, generator=self._rng) * self._spread
        return table[context]

    def law(self, length: int, probs: Callable[[Tensor], Tensor]) -> dict[tuple[int, ...], float]:
        """The exact joint law of the first tokens."""
        law = {(): 1.0}
        for _ in range(length):
            law = {
                (*context, token): weight * float(p)
                for context, weight in law.items()
                for token, p in enumerate(probs(self.target(context)).double())
            }
        return law


def contexts(tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The context of every row, the root's being empty."""
    ways: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        ways.append((*ways[parent], token))
    return ways


def drafts(
    language: Language, parents: tuple[int, ...], draft_probs: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Draft, float]]:
    """Every draft of a shape with its probability; siblings are drawn without replacement.

    Where q has fewer tokens than the shape has siblings, the rest of them (and what hangs on them) is missing.
    """

    def extend(
        places: dict[int, int], made: tuple[int, ...], tokens: tuple[int, ...], rows: list[Tensor], weight: float
    ) -> Iterator[tuple[Draft, float]]:
        """`places` maps rows of the shape to rows of the draft, `made` are the draft's parents."""
        row = len(places)
        if row > len(parents):
            yield Draft(tokens, torch.stack(rows), made), weight
            return
        parent = places[parents[row - 1]]
        law = draft_probs(language.draft(contexts(tokens, made)[parent])) if parent >= 0 else torch.zeros(1)
        left = law.double().clone()
        left[[token for token, p in zip(tokens, made, strict=True) if p == parent]] = 0
        if parent < 0 or left.sum() == 0:
            yield from extend({**places, row: -1}, made, tokens, rows, weight)
            return
        for token, p in enumerate(left / left.sum()):
            if p > 0:
                more = {**places, row: len(tokens) + 1}
                yield from extend(more, (*made, parent), (*tokens, token), [*rows, law], weight * float(p))

    yield from extend({0: 0}, (), (), [], 1.0)


def emitted_law(
    language: Language,
    proposals: Iterator[tuple[Draft, float]],
    sampling: Sampling,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[tuple[int, ...], float]:
    """The joint law of the first `length` tokens after one round, completed by plain sampling."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for draft, weight in proposals:
        assert draft.parents is not None
        rows = contexts(draft.tokens, draft.parents)
        logits = torch.stack([language.target(row) for row in rows])
        for path, token, chance in outcomes(logits, draft, sampling, monkeypatch):
            law[*rows[path[-1]], token] += weight * chance
    full: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in law.items():
        tails = {(): 1.0}
        for _ in range(length - len(tokens)):
            tails = {
                (*tail, token): share * float(p)
                for tail, share in tails.items()
                for token, p in enumerate(sampling.probs(language.target((*tokens, *tail))).double())
            }
        for tail, share in tails.items():
            full[(*tokens, *tail)[:length]] += weight * share
    return full


def assert_same_law(got: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> None:
    assert sum(got.values()) == pytest.approx(1, abs=1e-5)
    assert max(abs(got.get(key, 0.0) - wanted.get(key, 0.0)) for key in {*got, *wanted}) < 1e-5


WARPERS = [Sampling(1.0), Sampling(0.5), Sampling(1.0, top_p=0.8), Sampling(0.7, top_k=2), Sampling(0.6, 3, 0.9)]
SHAPES = {
    "one": (0,),
    "chain": (0, 1),
    "two siblings": (0, 0),
    "three siblings": (0, 0, 0),
    "all four siblings": (0, 0, 0, 0),
    "caterpillar": (0, 0, 1),
    "branch under the second": (0, 0, 2),
}


@pytest.mark.parametrize("sampling", WARPERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_drafts_leave_the_target_law_exact(
    shape: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p and q warped alike; siblings drawn without replacement from one q."""
    language, parents = Language(seed=len(shape)), SHAPES[shape]
    proposals = drafts(language, parents, sampling.probs)
    got = emitted_law(language, proposals, sampling, 2, monkeypatch)
    assert_same_law(got, language.law(2, sampling.probs))


@pytest.mark.parametrize("seed", range(4))
def test_a_long_sampled_chain_leaves_the_target_law_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    language, parents = Language(seed=seed, vocab=3), (0, 1, 2)
    proposals = drafts(language, parents, Sampling(1.0).probs)
    got = emitted_law(language, proposals, Sampling(1.0), 4, monkeypatch)
    assert_same_law(got, language.law(4, Sampling(1.0).probs))


def test_a_draft_law_of_its_own_leaves_the_target_law_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """q may be anything that the tokens were really drawn from, even with zeros where p has none."""
    language, parents, sampling = Language(seed=3), (0, 0, 1), Sampling(0.8)
    proposals = drafts(language, parents, Sampling(2.0, top_k=2).probs)
    got = emitted_law(language, proposals, sampling, 3, monkeypatch)
    assert_same_law(got, language.law(3, sampling.probs))


@pytest.mark.parametrize("sampling", WARPERS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((1,), (0,)),
        ((0, 0), (0, 1)),
        ((2, 1), (0, 0)),
        ((3, 0, 2), (0, 0, 1)),
        ((0, 1, 2, 3), (0, 0, 0, 0)),
        ((1, 1), (0, 0)),
    ],
)
def test_deterministic_drafts_leave_the_target_law_exact(
    tokens: tuple[int, ...], parents: tuple[int, ...], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A point mass: accept x with probability p(x), then take p without x (q is one, not a softmax value)."""
    language = Language(seed=11)
    proposals = iter([(Draft(tokens, None, parents), 1.0)])
    got = emitted_law(language, proposals, sampling, 3, monkeypatch)
    assert_same_law(got, language.law(3, sampling.probs))


def test_a_sibling_that_q_has_no_mass_left_for_does_not_bend_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """q = one token, but a fixed tree shape wants two siblings (SWIFT's top-k children under top-p).

    Refusing such a draft, never accepting the second sibling, or taking it as deterministic are all lossless.
    """
    target, q = torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), torch.tensor([1.0, 0.0, 0.0, 0.0])
    draft = Draft((0, 1), torch.stack((q, q)), (0, 0))
    law: dict[int, float] = defaultdict(float)
    try:
        for path, token, p in outcomes(target.repeat(3, 1), draft, Sampling(1.0), monkeypatch):
            law[draft.tokens[path[1] - 1] if len(path) > 1 else token] += p
    except ValueError:
        return
    assert [law[token] for token in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1], abs=1e-5)


def test_an_argmax_draft_with_its_softmax_value_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The enumeration has teeth: the fault of Self-SD's default moves the law by more than 0.05."""
    language = Language(seed=11)
    law = Sampling(1.0).probs(language.draft(()))
    wrong = Draft((int(law.argmax()),), law[None], (0,))
    got = emitted_law(language, iter([(wrong, 1.0)]), Sampling(1.0), 1, monkeypatch)
    wanted = language.law(1, Sampling(1.0).probs)
    assert max(abs(got[key] - wanted[key]) for key in wanted) > 0.05


def test_acceptance_probabilities_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (.5 .3 .2), q = (.2 .6 .2): token 1 passes with .3/.6, and the residual is token 0 alone."""
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    logits = torch.stack((target.log(), torch.tensor([0.0, -20.0, -20.0])))
    got = {
        (path, token): p for path, token, p in outcomes(logits, Draft((1,), draft[None]), Sampling(1.0), monkeypatch)
    }
    assert got[(0, 1), 0] == pytest.approx(0.5, abs=1e-6)
    assert got[(0,), 0] == pytest.approx(0.5, abs=1e-6)
    assert got[(0,), 1] == got[(0,), 2] == 0


def test_the_bonus_token_is_warped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a fully accepted chain the target's token comes from the warped law (B-EA-1)."""
    sampling = Sampling(0.5, top_k=2)
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.4, 0.3]])
    got = {token: p for path, token, p in outcomes(logits, Draft((0,)), sampling, monkeypatch) if path == (0, 1)}
    share = math.exp(2.0) / (math.exp(2.0) + math.exp(1.0))
    assert got == pytest.approx({0: share, 1: 1 - share, 2: 0, 3: 0}, abs=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9)], ids=str)
def test_identical_laws_accept_everything(sampling: Sampling) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    probs = sampling.probs(logits[:4])
    randomness = Randomness.seeded("identical")
    for _ in range(200):
        tokens = tuple(draw(row, randomness.draft) for row in probs)
        assert verify(logits, Draft(tokens, probs), sampling, randomness).num_accepted == 4


# ---- the same with real random numbers


@pytest.mark.parametrize(("shape", "sampling"), [("chain", Sampling(0.7, top_p=0.9)), ("caterpillar", Sampling(1.0))])
def test_simulated_law_of_two_tokens(shape: str, sampling: Sampling) -> None:
    """8 000 rounds with the real generators; catches what the scripted coins cannot (draws that are reused)."""
    language, parents = Language(seed=2), SHAPES[shape]
    randomness = Randomness.seeded("simulation", shape)
    counts = torch.zeros(language.vocab, language.vocab)
    for _ in range(8_000):
        tokens: tuple[int, ...] = ()
        rows: list[Tensor] = []
        for i, parent in enumerate(parents):
            law = sampling.probs(language.draft(contexts(tokens, parents[:i])[parent]))
            left = law.clone()
            left[[tokens[j] for j in range(i) if parents[j] == parent]] = 0
            tokens = (*tokens, draw(left, randomness.draft))
            rows.append(law)
        ways = contexts(tokens, parents)
        logits = torch.stack([language.target(way) for way in ways])
        verdict = verify(logits, Draft(tokens, torch.stack(rows), parents), sampling, randomness)
        emitted = (*ways[verdict.path[-1]], verdict.next_token)
        if len(emitted) == 1:
            emitted = (*emitted, draw(sampling.probs(language.target(emitted)), randomness.draft))
        counts[emitted[0], emitted[1]] += 1
    wanted = language.law(2, sampling.probs)
    law = torch.tensor([[wanted[a, b] for b in range(language.vocab)] for a in range(language.vocab)])
    assert chi_square_p(counts, law) > FALSE_ALARMS


# ---- warpers


def test_temperature_by_hand() -> None:
    probs = Sampling(0.5).probs(torch.tensor([math.log(3.0), math.log(1.0)]))
    assert probs.tolist() == pytest.approx([0.9, 0.1])
    assert Sampling(1.0).probs(torch.tensor([0.0, math.log(3.0)])).tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(
    ("top_k", "wanted"),
    [(0, [0.4, 0.3, 0.2, 0.1]), (1, [1, 0, 0, 0]), (2, [4 / 7, 3 / 7, 0, 0]), (4, [0.4, 0.3, 0.2, 0.1]), (9, None)],
)
def test_top_k_by_hand(top_k: int, wanted: list[float] | None) -> None:
    probs = Sampling(1.0, top_k=top_k).probs(torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    assert probs.tolist() == pytest.approx(wanted or [0.4, 0.3, 0.2, 0.1])


@pytest.mark.parametrize(
    ("top_p", "wanted"),
    [
        (1.0, [0.4, 0.3, 0.2, 0.1]),
        (0.95, [0.4, 0.3, 0.2, 0.1]),
        (0.85, [4 / 9, 3 / 9, 2 / 9, 0]),
        (0.65, [4 / 7, 3 / 7, 0, 0]),
        (0.35, [1, 0, 0, 0]),
        (1e-6, [1, 0, 0, 0]),
    ],
)
def test_top_p_by_hand(top_p: float, wanted: list[float]) -> None:
    """The smallest set whose mass reaches top_p; the most probable token always stays."""
    probs = Sampling(1.0, top_p=top_p).probs(torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    assert probs.tolist() == pytest.approx(wanted)


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    """At T = 1/2 the law (.4 .3 .2 .1) is (16 9 4 1)/30; top-k 3 leaves (16 9 4)/29; 25/29 > .85 drops the third."""
    probs = Sampling(0.5, top_k=3, top_p=0.85).probs(torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    assert probs.tolist() == pytest.approx([16 / 25, 9 / 25, 0, 0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 80])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
def test_warped_laws_equal_hf(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(60, 80, generator=torch.Generator().manual_seed(3)) * 3
    theirs = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = Sampling(temperature, top_k, top_p).probs(logits)
    assert float((ours - theirs.softmax(-1)).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_laws_are_float32_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits = torch.tensor([[60000.0, 59000.0, -60000.0]]).to(dtype)
    probs = Sampling(1e-3).probs(logits)
    assert probs.dtype == torch.float32
    assert probs.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_p": math.nan},
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=list(setting)[-1]):
        Sampling(**setting)


def test_greedy_is_temperature_zero_exactly() -> None:
    """A tiny temperature still draws, though nearly always the most probable token."""
    assert Sampling(0).greedy
    assert Sampling(0.0, 5, 0.9).greedy
    assert not Sampling(1e-6).greedy
    randomness = Randomness.seeded(0)
    before = randomness.accept.get_state()
    assert verify(peaks(4), Draft.empty(), Sampling(1e-6), randomness).next_token == 4
    assert not torch.equal(before, randomness.accept.get_state())


# ---- randomness


def test_seeded_generators_depend_on_their_parts_alone() -> None:
    everywhere = torch.get_rng_state()
    names = ("draft", "accept", "search")
    first = {name: uniform(getattr(Randomness.seeded(1, "qa", 3), name)) for name in names}
    torch.manual_seed(123)
    again = {name: uniform(getattr(Randomness.seeded(1, "qa", 3), name)) for name in names}
    torch.set_rng_state(everywhere)
    assert first == again
    assert len(set(first.values())) == 3
    others = [
        Randomness.seeded(*parts) for parts in ((1, "qa", 4), (1, "qa3"), (2, "qa", 3), (1, "q", "a3"), ("1q", "a", 3))
    ]
    assert len({uniform(other.accept) for other in others} | {first["accept"]}) == 6


def test_uniform_numbers_are_uniform() -> None:
    generator = Randomness.seeded("uniform").accept
    numbers = torch.tensor([uniform(generator) for _ in range(20_000)])
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    assert chi_square_p(torch.histc(numbers, 20, 0, 1), torch.full((20,), 1 / 20)) > FALSE_ALARMS


def test_draws_follow_their_law() -> None:
    generator, law = Randomness.seeded("draw").accept, torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    counts = torch.bincount(torch.tensor([draw(law, generator) for _ in range(20_000)]), minlength=5)
    assert chi_square_p(counts, law) > FALSE_ALARMS
