"""SWIFT (arXiv 2410.06916): sub-layers to skip are searched for while answers are written; drafts are caterpillars.

The sparse model drafts a chain, each of whose steps also gives the runners-up as leaves. Between rounds another
skip set is tried on the answer's first tokens, in one parallel pass. Differences to the published code, all of them
faults of it (METHODS.md 5): no padding node, no un-warped bonus token, no clone of the cache, any layer's cache may
stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from baselines.swift_search import Search, SearchRule, SubLayers, initial_set, num_sublayers
from clasp_core.attention import Span
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule, ExitRule, FixedExit, Step, one_of
from clasp_core.errors import UserError
from clasp_core.sampling import non_finite
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from clasp_core.verify import Draft

# ---- the draft

CONFIDENCES = (0.95, 0.8, 0.5)
GREEDY_WIDTHS = (3, 5, 8, 10)
SAMPLING_WIDTHS = (1, 3, 5, 10)
"""Children per depth: the first width where confidence is above 0.95, and so on (utils.py:74-89)."""
WIDEST = 10


@dataclass(frozen=True, slots=True)
class TreeRule:
    """How a caterpillar is drafted: at most `max_draft_len` steps, the first child of each being expanded.

    Children are the most probable tokens; at a temperature above 0 they are drawn from the draft's own warped
    distribution without replacement. Their number depends on the un-warped probability of the first one.
    """

    max_draft_len: int

    def __post_init__(self) -> None:
        if self.max_draft_len < 1:
            raise UserError(f"max_draft_len is {self.max_draft_len}; it must be at least 1 (method=ar drafts nothing)")

    def extra_slots(self, budget: int) -> int:
        """Leaves beside the spine; the spine itself lies within the budget."""
        return (WIDEST - 1) * min(self.max_draft_len, budget)

    def draft(self, step: Step, turn: Turn, last_token: int, position: int, limit: int, threshold: float) -> Draft:
        """A tree that ends at the limit, or with a spine token that is a stop token or below the threshold."""
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[Tensor] = []
        num_steps, spine, expanded, sure = 0, 0, last_token, True
        while sure and num_steps < min(limit, self.max_draft_len):
            children, confidence, draft_probs = _children(step(expanded, position + num_steps), turn)
            num_steps += 1
            parents += [spine] * len(children)
            spine = len(tokens) + 1
            tokens += children
            if draft_probs is not None:
                probs += [draft_probs] * len(children)
            expanded = children[0]
            sure = confidence >= threshold and expanded not in turn.generation.stop_ids
        return Draft(tuple(tokens), torch.stack(probs) if probs else None, tuple(parents), num_steps)


def _children(logits: Tensor, turn: Turn) -> tuple[list[int], float, Tensor | None]:
    """Tokens in drawn order, the confidence of the first, and (where they were drawn) the law that they come from.

    One transfer from the device. Fewer than wanted where the law knows no more tokens.
    """
    sampling = turn.generation.sampling
    plain = logits.float().softmax(dim=-1)
    wanted = min(WIDEST, len(plain))
    if sampling.greedy:
        draft_probs, order = None, plain.topk(wanted).indices
    else:
        draft_probs = sampling.probs(logits)
        order = draw_distinct(draft_probs, wanted, turn.randomness.draft)
    mass = (plain if draft_probs is None else draft_probs)[order]
    known = torch.stack((order.double(), mass.double(), plain[order].double())).tolist()
    confidence = known[2][0]
    if not math.isfinite(confidence):
        raise non_finite("draft", logits.dtype, 0)
    possible = [int(token) for token, weight in zip(*known[:2], strict=True) if weight > 0]
    return possible[: _width(confidence, sampling.greedy)], confidence, draft_probs


def _width(confidence: float, greedy: bool) -> int:
    widths = GREEDY_WIDTHS if greedy else SAMPLING_WIDTHS
    return widths[sum(confidence <= bound for bound in CONFIDENCES)]


def draw_distinct(probs: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """`num` different tokens of a distribution `V`, drawn one after the other without replacement, in that order.

    A race of exponential times: the winner is token i with chance p_i, the next one with what is left of the
    chances, and so on. Where fewer tokens are possible, impossible ones come last.
    """
    times = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / times).topk(num).indices


# ---- the policy


def agreement(turn: Turn, skip: LayerSkip, tokens: Sequence[int], start: int) -> float:
    """The share of `tokens[1:]` that the sparse model predicts, of tokens that begin at position `start`.

    One pass over all of them: they see the full model's keys of slots `0 .. start - 1` and the sparse model's of
    one another. The cache is not written. What overflows predicts nothing.
    """
    rows = torch.tensor(tokens[:-1], device=turn.target.devices[0])
    logits = forward(turn.target, rows, Span.trial(start, len(rows)), turn.cache, skip=skip).logits
    largest, predicted = logits.max(dim=-1)
    right = (predicted == torch.tensor(tokens[1:], device=predicted.device)) & largest.isfinite()
    return int(right.sum()) / len(rows)


class SwiftPolicy:
    """Skips the best set that the stream has found, and tries one more behind a verification round.

    `skip_ratio` (of the 2(L - 2) inner sub-layers, rounded down) or `num_skipped_sublayers` sets how many sub-layers
    a candidate skips; the initial set has its own count, unless an exact one is asked for. `search=None` keeps the
    initial set.
    """

    def __init__(
        self,
        skip_ratio: float | None,
        num_skipped_sublayers: int | None,
        search: SearchRule | None,
        reset: Literal["stream", "never"] = "stream",
    ):
        if (skip_ratio is None) == (num_skipped_sublayers is None):
            raise UserError(
                f"skip_ratio is {skip_ratio} and num_skipped_sublayers is {num_skipped_sublayers}; set exactly one of "
                "them (the other null)"
            )
        if skip_ratio is not None and not 0 < skip_ratio <= 1:
            raise UserError(f"skip_ratio is {skip_ratio}; it must be above 0 and at most 1")
        one_of("reset", reset, ("stream", "never"))
        self._skip_ratio = skip_ratio
        self._exact = num_skipped_sublayers
        self._rule = search
        self._reset = reset
        self._target: TargetModel | None = None
        self.search: Search
        self._turn: Turn
        self._answer: list[int] = []
        self._num_prompt = 0
        self._num_rounds = 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never: candidates are judged by tokens."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Forget everything (with `reset=never` only what belongs to another target); refuse an impossible count."""
        if self._reset == "stream" or target is not self._target:
            space = SubLayers(target.num_layers, num_sublayers(self._exact, self._skip_ratio, target.num_layers))
            self.search = Search(self._rule, initial_set(target.num_layers, self._exact), space)
            self._target = target

    @property
    def carries(self) -> Literal["stream", "run"] | None:
        """What the search learns, for as long as it goes on; with `reset=never` every stream profits from it."""
        if self.search.stopped is not None:
            return None
        return "run" if self._reset == "never" else "stream"

    def forget(self) -> None:
        """The next stream begins with nothing, whatever `reset` says: what came before was a warm-up."""
        self._target = None

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """Nothing is tried before the answer is long enough."""
        self._turn = turn
        self._answer = [prefill.next_token]
        self._num_prompt = len(prompt)
        self._num_rounds = 0
        return 0

    def current(self) -> LayerSkip:
        """The best set so far."""
        return self.search.skip

    def observe(self, verified: Verified) -> int:
        """Score one candidate, if the search is on and due; the token that the cache does not hold yet is not counted.

        Its window is the first `context_window` predictions of this answer, not the latest ones.
        """
        self._answer += [verified.draft.tokens[row - 1] for row in verified.path[1:]]
        self._answer.append(verified.next_token)
        round_index = self._num_rounds
        self._num_rounds += 1
        if verified.last or not self.search.due(round_index, len(self._answer) - 1):
            return 0
        candidate = self.search.propose(self._turn.randomness.search)
        window = self._answer[: self.search.context_window + 1]
        self.search.learn(candidate, agreement(self._turn, candidate.skip, window, self._num_prompt))
        return 1


# ---- the method


class SwiftDrafter:
    """Drafts by a chain or tree rule with the policy's sparse model, into the scratch part of the target's cache.

    As with `SelfDrafter`, verification rewrites every row that the draft wrote, so nothing is cloned or rolled back.
    """

    def __init__(self, policy: SwiftPolicy, exit_rule: ExitRule, rule: ChainRule | TreeRule):
        self.policy = policy
        self.exit_rule = exit_rule
        self._rule = rule
        self._turn: Turn
        self._skip: LayerSkip

    def extra_slots(self, budget: int) -> int:
        """Room for a tree's leaves."""
        return self._rule.extra_slots(budget) if isinstance(self._rule, TreeRule) else 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """As the policy says."""
        return self.policy.needs_hidden(prefill=prefill)

    def start_stream(self, target: TargetModel) -> None:
        """Policy and exit rule forget."""
        self.policy.start_stream(target)
        self.exit_rule.start_stream()

    @property
    def carries(self) -> Literal["stream", "run"] | None:
        """As the policy says."""
        return self.policy.carries

    def forget(self) -> None:
        """What came before was a warm-up."""
        self.policy.forget()

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """A new answer; what was learned stays."""
        self._turn = turn
        return self.policy.start(turn, prompt, prefill)

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """A draft by the rule; the trace notes the skip set used."""
        draft = self._rule.draft(self._step, self._turn, last_token, position, limit, self.exit_rule.threshold)
        return replace(draft, skip=self._skip)

    def observe(self, verified: Verified) -> int:
        """Exit rule and policy learn."""
        self.exit_rule.observe(verified)
        return self.policy.observe(verified)

    def _step(self, token: int, position: int) -> Tensor:
        self._skip = self.policy.current()
        target = self._turn.target
        row = torch.tensor([token], device=target.devices[0])
        return forward(target, row, Span.causal(position, 1), self._turn.cache, skip=self._skip).logits[0]


def swift(
    skip_ratio: float | None,
    num_skipped_sublayers: int | None,
    search: SearchRule | None,
    exit_threshold: float,
    max_draft_len: int,
    shape: Literal["tree", "chain"] = "tree",
    reset: Literal["stream", "never"] = "stream",
) -> SwiftDrafter:
    """The method as a drafter: the policy above, a fixed exit threshold, and a tree or a chain."""
    one_of("shape", shape, ("tree", "chain"))
    policy = SwiftPolicy(skip_ratio, num_skipped_sublayers, search, reset)
    rule = TreeRule(max_draft_len) if shape == "tree" else ChainRule(max_draft_len)
    return SwiftDrafter(policy, FixedExit(exit_threshold), rule)
