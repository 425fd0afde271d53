"""CLaSp (arXiv 2505.24196): whole layers chosen in context, by a dynamic programme on the last verified token.

Notation of the paper: x_0 .. x_L are the token's states in the full model (x_L before the final norm),
g[i, j] is the best state after i layers of which j were skipped, and
D(i, j) = max{ cos(x_i, g[i-1, j-1]) (skip layer i), cos(x_i, f_i(g[i-1, j])) (keep it) }.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clasp_core.attention import Span
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule, FixedExit, SelfDrafter, one_of
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel


@dataclass(frozen=True, slots=True)
class Selection:
    """What the programme found: the skip set, the state g[L, M] `1 d` that it ends in, and the work done."""

    skip: LayerSkip
    final_state: Tensor
    num_evaluations: int


def select_layers(
    target: TargetModel,
    cache: KVCache,
    states: Sequence[Tensor],
    position: int,
    num_skipped: int,
    *,
    skippable: Sequence[bool] | None = None,
    prune: bool = True,
) -> Selection:
    """The M = `num_skipped` layers to skip at `position`, whose full-model states are `states` (L + 1 of `1 d`).

    All candidate states of a layer go through it in one call: each sees slots `0 .. position - 1` and
    itself, at that position, and nothing is written. Similarities are in float32; a tie skips. Unreachable
    cells are never made. Without `prune` the number of state evaluations is M(M+1)/2 + (L-1-M)M; with it,
    cells from which (L, M) cannot be reached any more are left out, which changes nothing in the result.
    """
    free = tuple(skippable) if skippable is not None else (True,) * target.num_layers
    ranges = _ranges(free, num_skipped, prune)
    best = states[0]
    choices: list[Tensor] = []
    evaluations = 0
    spans: dict[int, Span] = {}  # the same for all layers with as many candidates
    for layer, (old, new) in enumerate(pairwise(ranges)):
        kept = _cut(best, old, max(new[0], 1), min(new[1], old[1])).to(states[layer + 1].device)
        if len(kept):
            span = spans.setdefault(len(kept), Span.siblings(position, len(kept)))
            kept = target.layer(layer, kept, span, cache)
            evaluations += len(kept)
        best, skips = _choose(states[layer + 1], best, kept, old, new, free[layer])
        choices.append(skips)
    skipped = _backtrack(choices, ranges, num_skipped)
    return Selection(LayerSkip.layers(target.num_layers, skipped), best[-1:], evaluations)


def _ranges(free: Sequence[bool], num_skipped: int, prune: bool) -> list[tuple[int, int]]:
    """The first and last j worth making after i = 0 .. L layers."""
    ranges = [(0, 0)]
    for i in range(1, len(free) + 1):
        still_free = sum(free[i:])
        fewest = max(0, num_skipped - still_free) if prune else 0
        ranges.append((fewest, min(sum(free[:i]), num_skipped)))
    return ranges


def _cut(best: Tensor, held: tuple[int, int], first: int, last: int) -> Tensor:
    """g[i, first .. last] out of the rows `held`; no rows where that is empty."""
    return best[first - held[0] : max(last + 1, first) - held[0]]


def _choose(
    full: Tensor, best: Tensor, kept: Tensor, old: tuple[int, int], new: tuple[int, int], free: bool
) -> tuple[Tensor, Tensor]:
    """g[i, j] for the j of `new`, and for each whether layer i is skipped on the way to it.

    Where only one way leads to a cell, the other one's row is filled with `full` and never chosen.
    """
    best = best.to(full.device)
    if not free:
        return torch.cat([full, kept] if new[0] == 0 else [kept]), full.new_zeros(len(best), dtype=torch.bool)
    cannot_keep, cannot_skip = new[1] > old[1], new[0] == old[0]
    by_keep = torch.cat([*[full] * (new[0] == 0), kept, *[full] * cannot_keep])
    by_skip = torch.cat([*[full] * cannot_skip, _cut(best, old, max(new[0] - 1, old[0]), new[1] - 1)])
    skips = ~(_similarity(by_keep, full) > _similarity(by_skip, full))
    if cannot_keep:
        skips[-1] = True
    if cannot_skip:
        skips[0] = False
    return torch.where(skips[:, None], by_skip, by_keep), skips


def _similarity(states: Tensor, full: Tensor) -> Tensor:
    """Cosine of each row `n d` with `1 d`, in float32 whatever the model's dtype (squares overflow in float16)."""
    return cosine_similarity(states.float(), full.float(), dim=-1)


def _backtrack(choices: Sequence[Tensor], ranges: Sequence[tuple[int, int]], num_skipped: int) -> list[int]:
    """Walk from (L, M) to (0, 0) along the stored choices; one transfer from the device."""
    flags = torch.cat([choice.to(choices[-1].device) for choice in choices]).tolist()
    ends = list(accumulate(len(choice) for choice in choices))
    skipped: list[int] = []
    j = num_skipped
    for layer in reversed(range(len(choices))):
        row = flags[ends[layer] - len(choices[layer]) : ends[layer]]
        if row[j - ranges[layer + 1][0]]:
            skipped.append(layer)
            j -= 1
    return skipped


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read what the paper leaves open.

    `interval_unit`: the interval counts verification rounds, or committed tokens. `reset`: set and counter
    start anew with each turn, or live for the whole stream. `final_state`: x_L before the final norm, or
    after it as Hugging Face returns it (which bears on the last comparison only). `prune`: leave out cells
    that cannot matter; the result is the same either way.
    """

    interval_unit: Literal["rounds", "tokens"] = "rounds"
    reset: Literal["turn", "stream"] = "turn"
    may_skip_first: bool = True
    may_skip_last: bool = True
    final_state: Literal["pre_norm", "post_norm"] = "pre_norm"
    prune: bool = True

    def __post_init__(self) -> None:
        one_of("interval_unit", self.interval_unit, ("rounds", "tokens"))
        one_of("reset", self.reset, ("turn", "stream"))
        one_of("final_state", self.final_state, ("pre_norm", "post_norm"))


class ClaspPolicy:
    """Runs the programme after the prefill and then every `interval` verification rounds.

    `num_skipped` or `skip_ratio` (of L, rounded) sets M, one of them. `interval=None` keeps the set that the
    prefill gave.
    """

    def __init__(self, num_skipped: int | None, skip_ratio: float | None, interval: int | None, reading: Reading):
        check_one_count(num_skipped, skip_ratio)
        if interval is not None and interval < 1:
            raise UserError(f"interval is {interval}; it must be at least 1, or null for once per prefill")
        self._count = (num_skipped, skip_ratio)
        self._interval = interval
        self._reading = reading
        self._skip: LayerSkip | None = None
        self._since_search = 0
        self._turn: Turn

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Before a search that is due, or may fall due with the coming tokens."""
        if prefill:
            return self._skip is None or self._reading.reset == "turn"
        if self._interval is None:
            return False
        return self._reading.interval_unit == "tokens" or self._since_search + 1 >= self._interval

    def start_stream(self, target: TargetModel) -> None:
        """Forget the set; refuse a skip count that the target does not have."""
        self._skip = None
        self._since_search = 0
        self.num_skipped = skip_count(*self._count, target.num_layers)
        self._free = _free_layers(target.num_layers, self._reading)
        if self.num_skipped > sum(self._free):
            raise UserError(
                f"num_skipped is {self.num_skipped}, but only {sum(self._free)} of {target.num_layers} layers may be "
                "skipped; lower it, or allow the first and last layer (reading.may_skip_first, reading.may_skip_last)"
            )

    @property
    def carried(self) -> bool:
        """Set and counter, where they live for the stream and still change."""
        return self._reading.reset == "stream" and (self._skip is None or self._interval is not None)

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """The first set comes from the last prompt token."""
        self._turn = turn
        if self._skip is not None and self._reading.reset == "stream":
            return 0
        return self._search(prefill)

    def current(self) -> LayerSkip:
        """The set of the last search."""
        if self._skip is None:
            raise RuntimeError("no skip set yet: start() comes first")
        return self._skip

    def observe(self, verified: Verified) -> int:
        """Count rounds (or tokens) and search when the interval is full and the answer goes on."""
        self._since_search += 1 if self._reading.interval_unit == "rounds" else verified.num_accepted + 1
        if verified.last or self._interval is None or self._since_search < self._interval:
            return 0
        return self._search(verified)

    def _search(self, verified: Verified) -> int:
        states = verified.last_states()
        target = self._turn.target
        if self._reading.final_state == "post_norm":
            states[-1] = target.final_norm(states[-1])
        found = select_layers(
            target,
            self._turn.cache,
            states,
            verified.last_position,
            self.num_skipped,
            skippable=self._free,
            prune=self._reading.prune,
        )
        self._skip = found.skip
        self._since_search = 0
        return 1


def check_one_count(num_skipped: int | None, skip_ratio: float | None) -> None:
    """Refuse a count and a ratio together, and neither."""
    if (num_skipped is None) == (skip_ratio is None):
        raise UserError(
            f"num_skipped is {num_skipped} and skip_ratio is {skip_ratio}; set exactly one of them (the other null)"
        )


def skip_count(num_skipped: int | None, skip_ratio: float | None, num_layers: int) -> int:
    """M layers of L; a count outside 0 < M < L is refused."""
    if num_skipped is None:
        if skip_ratio is None or not 0 < skip_ratio < 1:
            raise UserError(f"skip_ratio is {skip_ratio}; it must satisfy 0 < skip_ratio < 1, such as 0.5")
        num_skipped = round(skip_ratio * num_layers)
    if not 0 < num_skipped < num_layers:
        raise UserError(
            f"num_skipped is {num_skipped}; a model of {num_layers} layers takes 1 to {num_layers - 1} "
            "(method=ar skips nothing and drafts nothing)"
        )
    return num_skipped


def _free_layers(num_layers: int, reading: Reading) -> tuple[bool, ...]:
    free = [True] * num_layers
    free[0], free[-1] = reading.may_skip_first, reading.may_skip_last
    return tuple(free)


def clasp(
    num_skipped: int | None,
    skip_ratio: float | None,
    interval: int | None,
    exit_threshold: float,
    max_draft_len: int,
    low_confidence_token: Literal["keep", "drop"] = "keep",
    draft_sampling: Literal["sample", "greedy"] = "sample",
    reading: Reading | None = None,
) -> SelfDrafter:
    """The method as a drafter: the policy above, a fixed exit threshold and a maximal draft length."""
    return SelfDrafter(
        ClaspPolicy(num_skipped, skip_ratio, interval, reading or Reading()),
        FixedExit(exit_threshold),
        ChainRule(max_draft_len, low_confidence_token, draft_sampling),
    )
