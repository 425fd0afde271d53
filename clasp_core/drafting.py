"""Drafters of the core: none at all, and the target itself with sub-layers skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.decoding import Turn, Verified
from clasp_core.errors import UserError
from clasp_core.sampling import check_finite, non_finite
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from clasp_core.verify import Draft


class NoDraft:
    """Autoregressive decoding: the same loop, cache and clock, with an empty draft."""

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Nothing to forget."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """Nothing to prepare."""
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """Nothing."""
        return Draft.empty()

    def observe(self, verified: Verified) -> int:
        """Nothing to learn."""
        return 0


class LayerSkipPolicy(Protocol):
    """The one thing in which layer-skipping methods differ: which sub-layers the next draft step leaves out."""

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Whether the coming prefill, or the coming verification, is to keep its states."""

    def start_stream(self, target: TargetModel) -> None:
        """A new method x task: forget everything; refuse a target that does not fit."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """A new turn, after its prefill. Returns the number of searches run."""

    def current(self) -> LayerSkip:
        """The skip set for the next draft step."""

    def observe(self, verified: Verified) -> int:
        """Learn from a verdict. Returns the number of searches run."""


@runtime_checkable
class SearchedOffline(Protocol):
    """A policy (or drafter) whose skip set was found before the run."""

    def offline_search_s(self) -> float | None:
        """Seconds that the search took; None where they are unknown. Known once a stream has started."""


@runtime_checkable
class Described(Protocol):
    """A method whose rows depend on more than its options and the target."""

    def describe(self) -> Mapping[str, Any]:
        """Plain data that tells it from others (a draft model's fingerprint). Known once a stream has started."""


@runtime_checkable
class CarriedThroughStream(Protocol):
    """A policy or exit rule that may keep from one turn what bears on the next ones of the stream."""

    @property
    def carried(self) -> bool:
        """Whether the coming turn may change it for those behind it."""


class ExitRule(Protocol):
    """When a draft ends early: after a token whose confidence is below `threshold`."""

    @property
    def threshold(self) -> float:
        """The smallest confidence at which drafting goes on."""

    def start_stream(self) -> None:
        """A new method x task: forget everything."""

    def start_turn(self) -> None:
        """A new turn."""

    def observe(self, verified: Verified) -> None:
        """Learn from a verdict."""


@dataclass(frozen=True, slots=True)
class FixedExit:
    """A constant threshold on the un-warped softmax probability of the drafted token; 0 never exits."""

    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise UserError(f"exit_threshold is {self.threshold}; it is a probability, from 0 (never exit) to 1")

    def start_stream(self) -> None:
        """Nothing to forget."""

    def start_turn(self) -> None:
        """Nothing to prepare."""

    def observe(self, verified: Verified) -> None:
        """Nothing to learn."""


class Step(Protocol):
    """One forward pass of a drafter."""

    def __call__(self, token: int, position: int) -> Tensor:
        """Logits `V` behind a token at a position."""


@dataclass(frozen=True, slots=True)
class ChainRule:
    """How a chain is drawn, token by token, from a drafter's logits.

    `low_confidence_token`: the token that ends a draft stays in it (`keep`) or is left out (`drop`). Confidence is
    the drafted token's own probability, but for `drop` that of the most probable token: leaving out a token for
    what was drawn would bend the law that it was drawn from.
    `draft_sampling` at a temperature above 0: drafts are drawn from the draft's own warped distribution
    (`sample`), or are its most probable tokens, verified as deterministic proposals (`greedy`).
    """

    max_draft_len: int
    low_confidence_token: Literal["keep", "drop"] = "keep"
    draft_sampling: Literal["sample", "greedy"] = "sample"

    def __post_init__(self) -> None:
        if self.max_draft_len < 1:
            raise UserError(f"max_draft_len is {self.max_draft_len}; it must be at least 1 (method=ar drafts nothing)")
        one_of("low_confidence_token", self.low_confidence_token, ("keep", "drop"))
        one_of("draft_sampling", self.draft_sampling, ("sample", "greedy"))

    def draft(self, step: Step, turn: Turn, last_token: int, position: int, limit: int, threshold: float) -> Draft:
        """A chain that ends at the limit, at a stop token, or where confidence falls below the threshold."""
        tokens: list[int] = []
        probs: list[Tensor] = []
        num_steps = 0
        while len(tokens) < min(limit, self.max_draft_len):
            logits = step(tokens[-1] if tokens else last_token, position + len(tokens))
            token, confidence, draft_probs = self._choose(logits, turn)
            num_steps += 1
            unsure = confidence < threshold
            if unsure and self.low_confidence_token == "drop":
                break
            tokens.append(token)
            if draft_probs is not None:
                probs.append(draft_probs)
            if unsure or token in turn.generation.stop_ids:
                break
        return Draft(tuple(tokens), torch.stack(probs) if probs else None, num_steps=num_steps)

    def _choose(self, logits: Tensor, turn: Turn) -> tuple[int, float, Tensor | None]:
        """A token, the confidence without warpers, and (where it was drawn) the distribution it came from."""
        sampling = turn.generation.sampling
        plain = logits.float().softmax(dim=-1)
        draft_probs = None
        if sampling.greedy or self.draft_sampling == "greedy":
            confidence, token = plain.max(dim=-1)
        else:
            check_finite(logits[None], "draft")
            draft_probs = sampling.probs(logits)
            token = torch.multinomial(draft_probs, 1, generator=turn.randomness.draft)[0]
            confidence = plain[token] if self.low_confidence_token == "keep" else plain.max()
        chosen, certainty = torch.stack((token.double(), confidence.double())).tolist()
        if not math.isfinite(certainty):
            raise non_finite("draft", logits.dtype, 0)
        return int(chosen), certainty, draft_probs


class SelfDrafter:
    """Drafts a chain with the target minus a skip set, into the scratch part of the target's own cache.

    The draft reads the committed prefix (full-model keys and values) and writes its own behind it, for kept
    layers only; verification then overwrites those slots in every layer, so nothing is cloned or rolled back.
    """

    def __init__(self, policy: LayerSkipPolicy, exit_rule: ExitRule, chain: ChainRule):
        self.policy = policy
        self.exit_rule = exit_rule
        self._chain = chain
        self._turn: Turn
        self._skip: LayerSkip

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """As the policy says."""
        return self.policy.needs_hidden(prefill=prefill)

    def start_stream(self, target: TargetModel) -> None:
        """Policy and exit rule forget everything."""
        self.policy.start_stream(target)
        self.exit_rule.start_stream()

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """The policy may choose its first skip set from the prefill."""
        self._turn = turn
        self.exit_rule.start_turn()
        return self.policy.start(turn, prompt, prefill)

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """A chain by the rule; the trace notes the last skip set used."""
        draft = self._chain.draft(self._step, self._turn, last_token, position, limit, self.exit_rule.threshold)
        return replace(draft, skip=self._skip)

    def observe(self, verified: Verified) -> int:
        """Exit rule and policy learn."""
        self.exit_rule.observe(verified)
        return self.policy.observe(verified)

    def offline_search_s(self) -> float | None:
        """As the policy says, if its set was found before the run."""
        return self.policy.offline_search_s() if isinstance(self.policy, SearchedOffline) else None

    @property
    def carries(self) -> Literal["stream"] | None:
        """Through the stream, where the policy or the exit rule says so."""
        parts = (self.policy, self.exit_rule)
        return "stream" if any(isinstance(part, CarriedThroughStream) and part.carried for part in parts) else None

    def _step(self, token: int, position: int) -> Tensor:
        self._skip = self.policy.current()
        target = self._turn.target
        row = torch.tensor([token], device=target.devices[0])
        return forward(target, row, Span.causal(position, 1), self._turn.cache, skip=self._skip).logits[0]


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse an option value that is not among the allowed ones."""
    if value not in allowed:
        raise UserError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
