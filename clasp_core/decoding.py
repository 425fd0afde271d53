"""The loop: prefill, then rounds of propose, verify, observe. With an empty draft it is autoregressive decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.device import Clock, Mark
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache
from clasp_core.records import RoundTrace
from clasp_core.sampling import Randomness, Sampling
from clasp_core.target import TargetModel, forward
from clasp_core.verify import Draft, verify


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is drawn and when it ends: at the first stop id, or after `max_new_tokens` exactly."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a drafter works with during one turn. The cache's committed prefix is never to be changed."""

    target: TargetModel
    cache: KVCache
    generation: Generation
    randomness: Randomness


@dataclass(frozen=True, slots=True)
class Verified:
    """What a drafter may learn from: a verified stretch of tokens, the prefill being the first.

    `position` is that of row 0. `path` lists the accepted rows; the last of them is the newest token with
    a state of its own, and produced the distribution that `next_token` was taken from. `hidden` (L + 1
    tensors `R d`, R = 1 after a prefill) was kept only where `needs_hidden` asked for it.
    """

    draft: Draft
    path: tuple[int, ...]
    next_token: int
    position: int
    hidden: tuple[Tensor, ...] | None
    last: bool = False
    """The answer ends here: what is learned may serve later turns, and nothing is to be searched for this one."""

    @property
    def num_accepted(self) -> int:
        """Kept draft tokens."""
        return len(self.path) - 1

    @property
    def last_position(self) -> int:
        """Position of the newest token that the cache holds."""
        return self.position + len(self.path) - 1

    def last_states(self) -> list[Tensor]:
        """The newest token's state before and after every layer: L + 1 tensors `1 d`, each on its device."""
        if self.hidden is None:
            raise RuntimeError("states were not kept for this pass; needs_hidden was false")
        row = self.path[-1]
        return [states[row : row + 1] for states in self.hidden]


class Drafter(Protocol):
    """A method: it proposes drafts and learns from verdicts; it never counts, times, appends or verifies."""

    def extra_slots(self, budget: int) -> int:
        """Cache slots that a draft may need beyond a budget of new tokens: 0 for chains, the side branches of a tree.

        No draft is deeper than the budget.
        """

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Whether the coming prefill, or the coming verification, is to keep its states."""

    def start_stream(self, target: TargetModel) -> None:
        """A new method x task: forget everything; refuse a target that does not fit, before anything is timed."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """A new turn, after its prefill. Returns the number of searches that were run."""

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """At most `limit` tokens (one or more) behind `last_token`, which sits at `position`."""

    def observe(self, verified: Verified) -> int:
        """Learn from a verdict. Returns the number of searches that were run: none behind the answer's last one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids, times and rounds of one turn."""

    output_ids: list[int]
    stop_reason: str
    prefill_s: float
    decode_s: float
    rounds: RoundTrace


@torch.inference_mode()
def decode(
    target: TargetModel,
    drafter: Drafter,
    prompt: Sequence[int],
    generation: Generation,
    randomness: Randomness,
    clock: Clock,
) -> Answer:
    """Answer a prompt. The timed region is everything between the two readings of `clock.now`."""
    tokens = torch.tensor(prompt, device=target.devices[0])
    started = clock.now()
    capacity = len(prompt) + generation.max_new_tokens + drafter.extra_slots(generation.max_new_tokens)
    turn = Turn(target, target.turn_cache(capacity), generation, randomness)
    prefill = _prefill(turn, drafter, tokens)
    output = [prefill.next_token]
    first_token = clock.now()
    laps = _Laps(clock)
    verified: Verified | None = None
    if not _finished(output, generation):
        laps.end("select", drafter.start(turn, prompt, prefill))
        while not _finished(output, generation):
            verified = _round(turn, drafter, output, len(prompt), laps)
    ended = clock.now()
    if verified is not None:
        drafter.observe(replace(verified, last=True))
    return Answer(output, _reason(output, generation), first_token - started, ended - first_token, laps.trace())


def _prefill(turn: Turn, drafter: Drafter, tokens: Tensor) -> Verified:
    """The full model over the prompt; the verdict on an empty draft is the first token."""
    span = Span.causal(0, len(tokens))
    keep_hidden = drafter.needs_hidden(prefill=True)
    out = forward(turn.target, tokens, span, turn.cache, rows=slice(-1, None), keep_hidden=keep_hidden)
    verdict = verify(out.logits, Draft.empty(), turn.generation.sampling, turn.randomness)
    return Verified(Draft.empty(), verdict.path, verdict.next_token, len(tokens) - 1, out.hidden)


def _round(turn: Turn, drafter: Drafter, output: list[int], num_prompt: int, laps: _Laps) -> Verified:
    """One draft, one verification pass, one verdict; commits what the stop ids and the budget allow.

    The drafter observes the verdict here if more rounds follow; of the last one it is told outside the clock.
    """
    position = num_prompt + len(output) - 1
    limit = turn.generation.max_new_tokens - len(output) - 1
    laps.begin_round()
    draft = drafter.propose(output[-1], position, limit) if limit > 0 else Draft.empty()
    laps.end("draft")
    verified = _verify(turn, drafter, draft, output[-1], position)
    laps.end("verify")
    block = [*(draft.tokens[row - 1] for row in verified.path[1:]), verified.next_token]
    emitted = _cut(block, output, turn.generation)
    output += emitted
    laps.count(verified, min(verified.num_accepted, len(emitted)), len(emitted))
    if not _finished(output, turn.generation):
        laps.begin()
        laps.end("select", drafter.observe(verified))
    return verified


def _verify(turn: Turn, drafter: Drafter, draft: Draft, last_token: int, position: int) -> Verified:
    """The full model over root and draft at explicit slots; every layer's keys there are the full model's then."""
    tokens = torch.tensor([last_token, *draft.tokens], device=turn.target.devices[0])
    span = Span.causal(position, len(tokens)) if draft.parents is None else Span.tree(position, draft.parents)
    keep_hidden = drafter.needs_hidden(prefill=False)
    out = forward(turn.target, tokens, span, turn.cache, keep_hidden=keep_hidden, head_start=draft.head_start)
    verdict = verify(out.logits, draft, turn.generation.sampling, turn.randomness)
    turn.cache.keep(position, verdict.path)
    return Verified(draft, verdict.path, verdict.next_token, position, out.hidden)


def _cut(block: list[int], output: list[int], generation: Generation) -> list[int]:
    """The part of a verified block that is committed: up to the first stop id, and within the budget."""
    room = generation.max_new_tokens - len(output)
    stop = next((i + 1 for i, token in enumerate(block) if token in generation.stop_ids), len(block))
    return block[: min(room, stop)]


def _finished(output: list[int], generation: Generation) -> bool:
    return output[-1] in generation.stop_ids or len(output) >= generation.max_new_tokens


def _reason(output: list[int], generation: Generation) -> str:
    return "stop" if output[-1] in generation.stop_ids else "length"


class _Laps:
    """Marks the phases of each round, and turns them into a trace once the clock has stopped."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._trace = RoundTrace()
        self._drafts: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = []
        self._marks: list[tuple[str, int, Mark, Mark]] = []
        self._round = 0
        self._since: Mark = clock.mark()

    def begin_round(self) -> None:
        """The next round starts now; a search that preceded the first round belongs to it."""
        self._round = len(self._trace)
        self._trace.num_searches += [0] * (self._round + 1 - len(self._trace.num_searches))
        self.begin()

    def begin(self) -> None:
        """A phase starts now; the time since the last one ended is the host's."""
        self._since = self._clock.mark()

    def end(self, phase: str, num_searches: int = 0) -> None:
        """The phase ends now, and the next one begins."""
        now = self._clock.mark()
        self._marks.append((phase, self._round, self._since, now))
        self._since = now
        if num_searches:
            self._trace.num_searches += [0] * (self._round + 1 - len(self._trace.num_searches))
            self._trace.num_searches[self._round] += num_searches

    def count(self, verified: Verified, num_accepted: int, num_emitted: int) -> None:
        """The counters of the round that has just been verified; tuples are kept as they are until `trace`."""
        draft = verified.draft
        self._drafts.append((draft.tokens, None if draft.parents is None else verified.path))
        self._trace.num_drafted.append(len(draft.tokens))
        self._trace.num_draft_steps.append(draft.num_steps)
        self._trace.num_accepted.append(num_accepted)
        self._trace.num_emitted.append(num_emitted)
        self._trace.skip.append(draft.skip.code if draft.skip is not None else None)

    def trace(self) -> RoundTrace:
        """The rounds with their seconds; to be called once every device is idle."""
        seconds = {phase: [0.0] * len(self._trace) for phase in ("draft", "verify", "select")}
        for phase, index, begin, end in self._marks:
            seconds[phase][index] += begin.seconds_until(end)
        self._trace.draft_s, self._trace.verify_s = seconds["draft"], seconds["verify"]
        self._trace.select_s = seconds["select"]
        self._trace.drafted_ids = [list(tokens) for tokens, _ in self._drafts]
        self._trace.accepted_path = [
            None if path is None else [row - 1 for row in path[1 : 1 + num_accepted]]
            for (_, path), num_accepted in zip(self._drafts, self._trace.num_accepted, strict=True)
        ]
        return self._trace
