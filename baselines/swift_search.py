"""SWIFT's search (arXiv 2410.06916, model/swift/utils.py:700-854): what a stream has learned about its skip sets.

A candidate is a set of m sub-layers, drawn at random or suggested by a Gaussian process; whoever scores it says
how well the sparse model agrees with text that is already there. Nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from bayes_opt.acquisition import UpperConfidenceBound
from bayes_opt.target_space import TargetSpace
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern

from clasp_core.errors import UserError
from clasp_core.skip import LayerSkip

KAPPA = 2.5
ALPHA = 1e-2
"""The published acquisition and noise; the kernel is the library's own, Matern with nu 2.5."""
NUM_RANDOM, NUM_SMART, NUM_RESTARTS = 2000, 1, 0
"""The library's 10000, 10 and 5 cost 3-10 s a suggestion in 56 dimensions and suggest sets that are no better."""


@dataclass(frozen=True, slots=True)
class SearchRule:
    """When SWIFT tries a candidate, on how much text, and when it stops for good.

    Every `opt_interval`-th verification round, once the answer is longer than `context_window` tokens and one,
    a candidate is scored; every `bayes_interval`-th of them is the Gaussian process's (null: none is). The search
    ends behind a score above `max_score`, behind more than `max_tolerance_iter` candidates in a row that were no
    better than the best, and behind more than `max_opt_iter` in all.
    """

    opt_interval: int
    bayes_interval: int | None
    max_opt_iter: int
    max_tolerance_iter: int
    max_score: float
    context_window: int

    def __post_init__(self) -> None:
        for name in ("opt_interval", "bayes_interval", "context_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        for name in ("max_opt_iter", "max_tolerance_iter"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more (search=null searches nothing)")
        if not 0 <= self.max_score <= 1:
            raise UserError(f"max_score is {self.max_score}; it is a share of tokens, from 0 to 1")


@dataclass(frozen=True, slots=True)
class SubLayers:
    """The 2(L - 2) sub-layers that may be skipped, m = `num_skipped` of them at a time.

    Coordinates 0 .. L - 3 are the attentions of layers 1 .. L - 2, the rest their MLPs; the first and the last
    layer are always kept.
    """

    num_layers: int
    num_skipped: int

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return 2 * _num_inner(self.num_layers)

    @property
    def num_sets(self) -> int:
        """How many different sets there are."""
        return math.comb(self.size, self.num_skipped)

    def decode(self, coordinates: Iterable[int]) -> LayerSkip:
        """The skip set of some coordinates."""
        chosen = list(coordinates)
        inner = _num_inner(self.num_layers)
        attn = [index + 1 for index in chosen if index < inner]
        mlp = [index - inner + 1 for index in chosen if index >= inner]
        return LayerSkip.sublayers(self.num_layers, attn=attn, mlp=mlp)


def num_sublayers(num_skipped_sublayers: int | None, skip_ratio: float | None, num_layers: int) -> int:
    """m, as given or int(2(L - 2) * ratio); an impossible count is refused. A model of two layers skips nothing."""
    size = 2 * _num_inner(num_layers)
    if num_skipped_sublayers is None:
        return int(size * (skip_ratio or 0.0))
    if not 0 < num_skipped_sublayers <= size:
        raise UserError(
            f"num_skipped_sublayers is {num_skipped_sublayers}; of a model of {num_layers} layers, whose first and "
            f"last are kept, 1 to {size} may be skipped"
        )
    return num_skipped_sublayers


def initial_set(num_layers: int, num_skipped: int | None) -> LayerSkip:
    """Layers 1, 3, 5, ... up to L - 2, attention and MLP: about half of all, whatever the ratio says.

    With an exact count whole layers are thinned out evenly, or even ones added evenly; an odd count takes the
    attention of one more layer.
    """
    inner = range(1, num_layers - 1)
    odd, even = inner[::2], inner[1::2]
    if num_skipped is None:
        return LayerSkip.layers(num_layers, odd)
    num_whole, num_half = divmod(num_skipped, 2)
    whole = _evenly(odd, num_whole) + _evenly(even, num_whole - len(odd))
    more = [layer for layer in (*odd, *even) if layer not in whole][:num_half]
    return LayerSkip.sublayers(num_layers, attn=[*whole, *more], mlp=whole)


def _evenly(layers: Sequence[int], num: int) -> list[int]:
    num = min(max(num, 0), len(layers))
    return [layers[i * len(layers) // num] for i in range(num)]


def _num_inner(num_layers: int) -> int:
    return max(num_layers - 2, 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set to be scored, and the point of the cube that stands for it in the Gaussian process."""

    skip: LayerSkip
    point: tuple[float, ...]


class Search:
    """The state of one stream: the best set and its score, what was tried, and whether to go on.

    The initial set is never scored and the best score starts at 0, so the first candidate with any agreement
    takes its place; later answers are compared with the scores of earlier ones. Both as published.
    """

    def __init__(self, rule: SearchRule | None, initial: LayerSkip, space: SubLayers):
        self.skip = initial
        self.best_score = 0.0
        self.num_scored = 0
        self.num_stale = 0
        self.stopped: str | None = None
        if rule is None or space.num_skipped == 0:
            self.stopped = "nothing to search"
        self._rule = rule
        self._space = space
        self._surrogate = _Surrogate(space.size)
        self._seen: set[LayerSkip] = set()

    @property
    def context_window(self) -> int:
        """How many predictions a score counts."""
        return self._rule.context_window if self._rule is not None else 0

    def due(self, round_index: int, num_new_tokens: int) -> bool:
        """Whether a candidate is to be scored behind this round (counted from 0 in each answer)."""
        if self.stopped is not None or self._rule is None:
            return False
        return num_new_tokens > self._rule.context_window + 1 and round_index % self._rule.opt_interval == 0

    def propose(self, generator: torch.Generator) -> Candidate:
        """A set that this stream has not scored yet."""
        suggested = self._suggest(generator)
        if suggested is not None and suggested.skip not in self._seen:
            return suggested
        candidates = map(self._random, repeat(generator))
        return next(candidate for candidate in candidates if candidate.skip not in self._seen)

    def learn(self, candidate: Candidate, score: float) -> None:
        """Keep the candidate if it is better than the best so far; note whether that was the last one."""
        self._seen.add(candidate.skip)
        self._surrogate.register(candidate.point, score)
        self.num_scored += 1
        if score > self.best_score:
            self.skip, self.best_score, self.num_stale = candidate.skip, score, 0
        else:
            self.num_stale += 1
        self.stopped = self._reason_to_stop()

    def _reason_to_stop(self) -> str | None:
        assert self._rule is not None
        reasons = {
            "max_score": self.best_score > self._rule.max_score,
            "max_tolerance_iter": self.num_stale > self._rule.max_tolerance_iter,
            "max_opt_iter": self.num_scored > self._rule.max_opt_iter,
            "every set was scored": len(self._seen) == self._space.num_sets,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _random(self, generator: torch.Generator) -> Candidate:
        order = torch.randperm(self._space.size, generator=generator, device=generator.device)
        chosen = order[: self._space.num_skipped].tolist()
        point = [0.0] * self._space.size
        for index in chosen:
            point[index] = 1.0
        return Candidate(self._space.decode(chosen), tuple(point))

    def _suggest(self, generator: torch.Generator) -> Candidate | None:
        """The Gaussian process's candidate, where it is its turn: the m largest coordinates of its point."""
        every = self._rule.bayes_interval if self._rule is not None else None
        if every is None or self.num_scored == 0 or (self.num_scored + 1) % every:
            return None
        seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
        point = self._surrogate.suggest(seed)
        largest = sorted(range(len(point)), key=lambda index: (-point[index], index))[: self._space.num_skipped]
        return Candidate(self._space.decode(largest), point)


class _Surrogate:
    """The Gaussian process over the cube of sub-layers; draws on no randomness but the seed that it is given."""

    def __init__(self, size: int):
        bounds = {f"{index}": (0.0, 1.0) for index in range(size)}
        self._known = TargetSpace(None, bounds)
        self._acquisition = UpperConfidenceBound(kappa=KAPPA)

    def register(self, point: tuple[float, ...], score: float) -> None:
        """Note what a point is worth."""
        self._known.register(np.array(point), score)

    def suggest(self, seed: int) -> tuple[float, ...]:
        """The point with the largest upper confidence bound that was found."""
        process = GaussianProcessRegressor(
            kernel=Matern(nu=2.5), alpha=ALPHA, normalize_y=True, n_restarts_optimizer=NUM_RESTARTS, random_state=seed
        )
        point = self._acquisition.suggest(
            process, self._known, n_random=NUM_RANDOM, n_smart=NUM_SMART, random_state=seed
        )
        return tuple(point.tolist())
