"""Lossless verification: one function from the target's logits and a draft to what is kept. Pure.

Rules (Leviathan et al. 2023, Chen et al. 2023; without-replacement siblings as in Li et al. 2024):
greedy keeps the longest path of the target's own choices; sampling accepts a drafted token x with
probability min(1, p(x) / q(x)), and draws the correction from norm(max(p - q, 0)).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clasp_core.sampling import Randomness, Sampling, check_finite, draw, greedy_tokens, uniform
from clasp_core.skip import LayerSkip
from clasp_core.target import HeadStart


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens behind the last known one (the root, row 0 of verification).

    `tokens`: ids, N of them. `probs` `N V`: the distribution that each token was really drawn from, before
    any sibling was removed; None where drafts are deterministic (then q is one at the token).
    `parents[i]`: the row of token i's parent (0 is the root, j the token j - 1); None means a chain.
    Siblings are listed in the order in which they were drawn.
    `num_steps`: forward passes that the drafter spent. `skip`: the skip set it used, if any, for the trace.
    `head_start`: work on the first rows that verification need not do again.
    """

    tokens: tuple[int, ...]
    probs: Tensor | None = None
    parents: tuple[int, ...] | None = None
    num_steps: int = 0
    skip: LayerSkip | None = None
    head_start: HeadStart | None = None

    @classmethod
    def empty(cls) -> Draft:
        """Nothing proposed: the round is one step of autoregressive decoding."""
        return cls(())

    def children(self, row: int) -> list[int]:
        """Rows of the tokens that follow `row`, in the order in which they were drawn."""
        if self.parents is None:
            return [row + 1] if row < len(self.tokens) else []
        return [index + 1 for index, parent in enumerate(self.parents) if parent == row]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target keeps: `path` holds the accepted rows, root first; `next_token` is the target's own."""

    path: tuple[int, ...]
    next_token: int

    @property
    def num_accepted(self) -> int:
        """Kept draft tokens; the target's own token is not counted."""
        return len(self.path) - 1


def verify(logits: Tensor, draft: Draft, sampling: Sampling, randomness: Randomness) -> Verdict:
    """The verdict on a draft of N tokens, from logits `N+1 V`: row 0 follows the root, row i token i - 1."""
    if sampling.greedy:
        return _greedy(logits, draft)
    return _sampled(logits, draft, sampling, randomness)


def _greedy(logits: Tensor, draft: Draft) -> Verdict:
    choices = greedy_tokens(logits)
    path = [0]
    while True:
        wanted = choices[path[-1]]
        match = next((row for row in draft.children(path[-1]) if draft.tokens[row - 1] == wanted), None)
        if match is None:
            return Verdict(tuple(path), wanted)
        path.append(match)


def _sampled(logits: Tensor, draft: Draft, sampling: Sampling, randomness: Randomness) -> Verdict:
    check_finite(logits, "target")
    target_probs = sampling.probs(logits)
    path = [0]
    while True:
        accepted, rest = _try_children(target_probs[path[-1]], draft, draft.children(path[-1]), randomness.accept)
        if accepted is None:
            return Verdict(tuple(path), draw(rest, randomness.accept))
        path.append(accepted)


def _try_children(
    target_probs: Tensor, draft: Draft, children: list[int], generator: torch.Generator
) -> tuple[int | None, Tensor]:
    """The first accepted child, or None and the distribution `V` that the correction is drawn from.

    Children were drawn without replacement from one q: a later child was drawn from q with the earlier ones
    removed and the rest renormalised, so that is the q it is tested against.
    """
    rest = target_probs
    proposal = draft.probs[children[0] - 1] if draft.probs is not None and children else None
    for child in children:
        token = draft.tokens[child - 1]
        chance = 1.0 if proposal is None else float(proposal[token])
        if chance <= 0:
            raise ValueError(f"token {token} was drafted, but the distribution that it is said to be from excludes it")
        if uniform(generator) * chance < float(rest[token]):
            return child, rest
        if proposal is None:
            rest = _without(rest, token)
        else:
            rest = _normalised((rest - proposal).clamp(min=0), otherwise=rest)
            proposal = _without(proposal, token)
    return None, rest


def _without(probs: Tensor, token: int) -> Tensor:
    """A distribution with one token removed and the rest renormalised."""
    left = probs.clone()
    left[token] = 0
    return _normalised(left, otherwise=probs)


def _normalised(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Mass scaled to one; where rounding left none, the event had probability zero and nothing changes."""
    total = mass.sum()
    return mass / total if total > 0 else otherwise
