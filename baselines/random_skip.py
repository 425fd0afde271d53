"""A control: whole layers drawn at random, so that a chosen set can be told from a lucky one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from clasp_core.clasp import skip_count
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule, FixedExit, SelfDrafter, one_of
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel


class RandomPolicy:
    """M layers drawn uniformly, anew for each turn, each round or each draft step."""

    def __init__(self, num_skipped: int | None, skip_ratio: float | None, redraw: Literal["turn", "round", "step"]):
        one_of("redraw", redraw, ("turn", "round", "step"))
        self._count = (num_skipped, skip_ratio)
        self._redraw = redraw
        self._turn: Turn
        self._skip: LayerSkip

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Refuse a skip count that the target does not have."""
        self._num_skipped = skip_count(*self._count, target.num_layers)

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """The first draw."""
        self._turn = turn
        self._draw()
        return 0

    def current(self) -> LayerSkip:
        """The set in use, or a new one if every step gets its own."""
        if self._redraw == "step":
            self._draw()
        return self._skip

    def observe(self, verified: Verified) -> int:
        """A new set if every round gets its own."""
        if self._redraw == "round" and not verified.last:
            self._draw()
        return 0

    def _draw(self) -> None:
        generator = self._turn.randomness.search
        num_layers = self._turn.target.num_layers
        order = torch.randperm(num_layers, generator=generator, device=generator.device)
        self._skip = LayerSkip.layers(num_layers, order[: self._num_skipped].tolist())


def random_skip(
    num_skipped: int | None,
    skip_ratio: float | None,
    redraw: Literal["turn", "round", "step"],
    exit_threshold: float,
    max_draft_len: int,
) -> SelfDrafter:
    """The control as a drafter with CLaSp's exit rule."""
    policy = RandomPolicy(num_skipped, skip_ratio, redraw)
    return SelfDrafter(policy, FixedExit(exit_threshold), ChainRule(max_draft_len))
