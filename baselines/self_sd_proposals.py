"""Which skip sets Self-SD's search decodes next: structured starts, then Optuna's TPE and neighbours of the best.

Part of Self-SD's search (`baselines.self_sd_search`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import optuna

from baselines.self_sd_replay import Costs
from clasp_core.skip import LayerSkip

START_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of all sub-layers that the structured starts skip where the count is free."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many of the 2L sub-layers a candidate may skip."""

    num_layers: int
    fewest: int
    most: int

    @property
    def num_sets(self) -> int:
        """Size of the space."""
        return sum(math.comb(2 * self.num_layers, count) for count in range(self.fewest, self.most + 1))

    def decode(self, scores: Sequence[float]) -> LayerSkip:
        """The set of 2L scores (attentions, then MLPs): those above one half, as published.

        Where that is too many or too few, the highest so many; of equal scores the first.
        """
        count = min(max(sum(score > 0.5 for score in scores), self.fewest), self.most)
        ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
        return self.of(ranked[:count])

    def of(self, sublayers: Iterable[int]) -> LayerSkip:
        """The set of sub-layer numbers, 0 .. L-1 the attentions and L .. 2L-1 the MLPs."""
        chosen, num = tuple(sublayers), self.num_layers
        return LayerSkip.sublayers(num, attn=[i for i in chosen if i < num], mlp=[i - num for i in chosen if i >= num])

    def admits(self, skip: LayerSkip) -> bool:
        """Whether a set is in the space."""
        return self.fewest <= skip.num_skipped_sublayers <= self.most

    def all(self) -> Iterator[LayerSkip]:
        """Every set, one by one."""
        for count in range(self.fewest, self.most + 1):
            yield from map(self.of, combinations(range(2 * self.num_layers), count))


def structured_starts(bounds: Bounds, influence: Sequence[float], costs: Costs) -> list[LayerSkip]:
    """Sets worth trying first: every second layer, half of the attentions, and the least influential sub-layers.

    The authors' own two starts are for one 40-layer model; an attention-only set is the first of them.
    """
    num = bounds.num_layers
    counts = {round(share * 2 * num) for share in START_SHARES} if bounds.fewest < bounds.most else {bounds.most}
    per_cost = [turn / (cost or 1.0) for turn, cost in zip(influence, (*costs.attn, *costs.mlp), strict=True)]
    starts = [LayerSkip.layers(num, range(1, num, 2)), LayerSkip.sublayers(num, attn=range(1, num, 2), mlp=())]
    for measure in (influence, per_cost):
        ranked = sorted(range(2 * num), key=lambda i: measure[i])
        starts += [bounds.of(ranked[:count]) for count in sorted(counts)]
    return [skip for skip in dict.fromkeys(starts) if bounds.admits(skip)]


class Proposals:
    """One candidate after the other, never the same set twice (P76): the starts, then TPE and neighbours in turn.

    TPE works on the published relaxation to [0, 1]^2L and is told the corners that were decoded. A neighbour is the
    best set with a few choices flipped; it also stands in where TPE repeats a known set. The sequence depends
    on the seed and on the values told only.
    """

    def __init__(self, bounds: Bounds, starts: Sequence[LayerSkip], seed: int):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(len(starts), 1))
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._space: dict[str, optuna.distributions.BaseDistribution] = {
            f"{kind}{i}": optuna.distributions.FloatDistribution(0, 1)
            for kind in ("attn", "mlp")
            for i in range(bounds.num_layers)
        }
        self._bounds = bounds
        self._starts = list(starts)
        self._random = random.Random(seed)
        self._told: dict[LayerSkip, float] = {}

    def next(self) -> LayerSkip | None:
        """A set that has not been told yet; None once there is none left."""
        if len(self._told) == self._bounds.num_sets:
            return None
        turns = (self._asked(), self._neighbours()) if len(self._told) % 2 else (self._neighbours(), self._asked())
        sources = (iter(self._starts), *turns, self._bounds.all())
        return next(skip for source in sources for skip in source if skip not in self._told)

    def tell(self, skip: LayerSkip, value: float) -> None:
        """The value of a set, larger is better."""
        self._told[skip] = value
        params = {name: float(bit) for name, bit in zip(self._space, (*skip.attn, *skip.mlp), strict=True)}
        self._study.add_trial(optuna.trial.create_trial(params=params, distributions=self._space, value=value))

    def _asked(self) -> Iterator[LayerSkip]:
        trial = self._study.ask(self._space)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        yield self._bounds.decode([trial.params[name] for name in self._space])

    def _neighbours(self) -> Iterator[LayerSkip]:
        best = max(self._told, key=lambda skip: self._told[skip], default=self._bounds.of(range(self._bounds.fewest)))
        bits = [*best.attn, *best.mlp]
        for _ in range(1000):
            flipped = set(self._random.sample(range(len(bits)), min(self._random.randint(1, 4), len(bits))))
            skip = self._bounds.of(i for i, bit in enumerate(bits) if bit != (i in flipped))
            if self._bounds.admits(skip):
                yield skip
