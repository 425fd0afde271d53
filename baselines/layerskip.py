"""LayerSkip (arXiv 2404.16710): draft with the first E layers and the head; verification starts where the draft ended.

The draft's keys and values of the first E layers are the target's own, and its states after layer E are kept, so
verification runs the first E layers only for the last drafted token. The method wants checkpoints that were trained
for early exit; on others its acceptance is low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule
from clasp_core.errors import UserError
from clasp_core.skip import LayerSkip
from clasp_core.target import HeadStart, TargetModel
from clasp_core.verify import Draft


class EarlyExit:
    """Drafts chains of `num_speculations` tokens with the first `exit_layer` layers (or `exit_ratio` of them)."""

    def __init__(
        self,
        exit_layer: int | None,
        exit_ratio: float | None,
        num_speculations: int,
        draft_sampling: Literal["sample", "greedy"] = "sample",
    ):
        if (exit_layer is None) == (exit_ratio is None):
            raise UserError(f"exit_layer is {exit_layer} and exit_ratio is {exit_ratio}; set exactly one of them")
        if exit_ratio is not None and not 0 < exit_ratio < 1:
            raise UserError(f"exit_ratio is {exit_ratio}; it must satisfy 0 < exit_ratio < 1, such as 0.5")
        self._exit = (exit_layer, exit_ratio)
        self._chain = ChainRule(num_speculations, draft_sampling=draft_sampling)
        self._turn: Turn
        self._states: list[Tensor] = []

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never: the draft's own states are what is reused."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Refuse an exit that is not inside the target."""
        layer, ratio = self._exit
        self._num_layers = layer if layer is not None else round((ratio or 0.0) * target.num_layers)
        if not 0 < self._num_layers < target.num_layers:
            raise UserError(
                f"exit_layer is {self._num_layers}; a model of {target.num_layers} layers takes 1 to "
                f"{target.num_layers - 1}"
            )
        late = range(self._num_layers, target.num_layers)
        self._skip = LayerSkip.layers(target.num_layers, late)

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """Nothing to prepare."""
        self._turn = turn
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """A chain, and the states that its rows have after the exit layer."""
        self._states = []
        draft = self._chain.draft(self._step, self._turn, last_token, position, limit, threshold=0.0)
        return replace(draft, skip=self._skip, head_start=HeadStart(self._num_layers, torch.cat(self._states)))

    def observe(self, verified: Verified) -> int:
        """Nothing to learn."""
        return 0

    def _step(self, token: int, position: int) -> Tensor:
        target, span = self._turn.target, Span.causal(position, 1)
        hidden = target.embed(torch.tensor([token], device=target.devices[0]))
        for index in range(self._num_layers):
            hidden = target.layer(index, hidden, span, self._turn.cache)
        self._states.append(hidden)
        return target.head(hidden)[0]
