"""What a skip set would be worth, without running it: exact draft counters by replay, and the ladder's costs.

Part of Self-SD's search (`baselines.self_sd_search`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.decoding import Generation
from clasp_core.device import Clock
from clasp_core.kv_cache import KVCache
from clasp_core.sampling import greedy_tokens
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward

NUM_TIMINGS = 7
"""Passes of each kind whose median is a cost."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A search prompt and the target's own greedy answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class Counts:
    """Counters of the decode rounds over all passages; `num_rounds_by_width` counts verified rows, root included."""

    num_emitted: int = 0
    num_accepted: int = 0
    num_rounds_by_width: Counter[int] = field(default_factory=Counter)

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """One round."""
        self.num_emitted += num_emitted
        self.num_accepted += num_accepted
        self.num_rounds_by_width[num_drafted + 1] += 1

    @property
    def num_drafted(self) -> int:
        """Drafted tokens, which are also draft steps: every step's token stays in the draft."""
        return sum((width - 1) * rounds for width, rounds in self.num_rounds_by_width.items())

    @property
    def acceptance(self) -> float | None:
        """Kept over drafted; unknown where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True)
class Costs:
    """What passes cost, in units of one full pass over one row.

    A draft step is `fixed` (embedding, head) plus its kept sub-layers; `by_width` is a verification pass over so
    many rows, linear in between.
    """

    fixed: float
    attn: tuple[float, ...]
    mlp: tuple[float, ...]
    by_width: tuple[tuple[int, float], ...]

    def draft_step(self, skip: LayerSkip) -> float:
        """c of a skip set."""
        kept = zip((*skip.attn, *skip.mlp), (*self.attn, *self.mlp), strict=True)
        return self.fixed + sum(cost for skipped, cost in kept if not skipped)

    def verification(self, width: int) -> float:
        """v of a pass over `width` rows."""
        widths = [known for known, _ in self.by_width]
        right = min(bisect_left(widths, width), len(widths) - 1)
        (w0, v0), (w1, v1) = self.by_width[max(right - 1, 0)], self.by_width[right]
        return v1 if w1 == w0 else v0 + (v1 - v0) * (width - w0) / (w1 - w0)

    def predicted(self, skip: LayerSkip, counts: Counts) -> float:
        """The ladder's T / (R v + D c); no search inside an answer, so no P p."""
        verify = sum(self.verification(width) * n for width, n in counts.num_rounds_by_width.items())
        return counts.num_emitted / (verify + counts.num_drafted * self.draft_step(skip))

    @classmethod
    def by_bytes(cls, target: TargetModel) -> Costs:
        """Costs as the bytes that are read; a verification reads what one row reads, whatever its width."""
        read = target.read_bytes()
        full = sum(read["attn"]) + sum(read["mlp"]) + read["head"]
        attn, mlp = (tuple(b / full for b in read[kind]) for kind in ("attn", "mlp"))
        return cls(read["head"] / full, attn, mlp, ((1, 1.0),))

    @classmethod
    def measured(cls, target: TargetModel, prompt: Sequence[int], max_width: int, clock: Clock) -> Costs:
        """Medians of interleaved passes behind a prompt.

        The share of all attention, and of all MLPs, is what a pass without them saves; within a kind the layers
        share it by their bytes. Single sub-layers are not timed: alone, they would sit in the processor's cache.
        """
        nothing, every = LayerSkip.none(target.num_layers), range(target.num_layers)
        skips = [LayerSkip.sublayers(target.num_layers, attn=a, mlp=m) for a, m in ((every, ()), ((), every))]
        widths = sorted({1, 2, 3, 4, 6, 8, max_width} & set(range(1, max_width + 1)))
        cases = [(1, skip) for skip in (*skips, LayerSkip.layers(target.num_layers, every))]
        cases += [(width, nothing) for width in widths]
        no_attn, no_mlp, bare, *verify = _timings(target, prompt, cases, clock)
        unit = verify[0]
        savings = max(unit - no_attn, 0.0), max(unit - no_mlp, 0.0)
        fixed = min(bare / unit, 1.0)
        shares = [(1 - fixed) * saved / (sum(savings) or 1.0) for saved in savings]
        by_bytes = cls.by_bytes(target)
        attn, mlp = (
            tuple(cost / sum(of) * share for cost in of)
            for of, share in zip((by_bytes.attn, by_bytes.mlp), shares, strict=True)
        )
        return cls(fixed, attn, mlp, tuple((width, s / unit) for width, s in zip(widths, verify, strict=True)))


def _timings(
    target: TargetModel, prompt: Sequence[int], cases: Sequence[tuple[int, LayerSkip]], clock: Clock
) -> list[float]:
    """Median seconds of each pass (rows, skip set) behind the prompt; every case in turn, so a slow spell hits all."""
    max_width = max(width for width, _ in cases)
    cache, tokens = target.turn_cache(len(prompt) + max_width), torch.tensor(prompt, device=target.devices[0])
    forward(target, tokens, Span.causal(0, len(prompt)), cache, rows=slice(-1, None))
    rows = tokens[-1:].repeat(max_width)
    seconds: list[list[float]] = [[] for _ in cases]
    for timing in range(-1, NUM_TIMINGS):  # the first is to warm up
        for (width, skip), times in zip(cases, seconds, strict=True):
            before = clock.now()
            forward(target, rows[:width], Span.causal(len(prompt), width), cache, skip=skip)
            if timing >= 0:
                times.append(clock.now() - before)
    return [median(times) for times in seconds]


# Exact counters without verification: replay


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Lockstep(Span):
    """Rows of several passages in one pass, each at a position of its own; `visible` is `T slots`, over all slots."""

    at: tuple[int, ...]

    @property
    def stop(self) -> int:
        """All slots are offered; `visible` says who looks where."""
        assert self.visible is not None
        return self.visible.shape[1]

    @property
    def last_position(self) -> int:
        """The largest position of a row."""
        return max(self.at)

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the rows, `T`."""
        return torch.tensor(self.at, device=device)

    def mask(self, device: torch.device) -> Tensor:
        """`T slots` bool, true where a row may look."""
        assert self.visible is not None
        return self.visible.to(device)


@dataclass(slots=True)
class _Walk:
    """Where a replay stands in a passage whose keys begin at slot `first`; `slots` are those of the current draft."""

    passage: Passage
    first: int
    num_done: int = 1
    draft: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ended: bool = False
    """The current draft ends here: its last token was unsure, or a stop token."""

    @property
    def position(self) -> int:
        """Position of the last known token, the root of the draft."""
        return len(self.passage.prompt) + self.num_done - 1

    @property
    def input(self) -> int:
        """The token that the next draft step reads."""
        return self.draft[-1] if self.draft else self.passage.answer[self.num_done - 1]

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.num_done >= len(self.passage.answer)

    def verify(self, counts: Counts) -> None:
        """The greedy verdict, which is known: the target would say what it has said. A new round begins."""
        rest = self.passage.answer[self.num_done :]
        pairs = zip(self.draft, rest, strict=False)
        num_accepted = next((i for i, (drafted, own) in enumerate(pairs) if drafted != own), len(self.draft))
        num_emitted = min(num_accepted + 1, len(rest))
        counts.add(len(self.draft), min(num_accepted, num_emitted), num_emitted)
        self.num_done += num_emitted
        self.draft, self.slots, self.ended = [], [], False


class Replay:
    """The counters of greedy decoding with a skip set, without a verification pass.

    Greedy speculative decoding emits the target's own answer, so the answers and their keys are computed once; what
    is left of a candidate's run are its draft steps, and those of all passages go through the layers together. Drafts
    are real: they read the full model's keys of the prefix and their own behind it, go on past a mistake and
    end as in `ChainRule` (`keep`). Equal to `decode`'s counters up to rounding.
    """

    def __init__(
        self,
        target: TargetModel,
        passages: Sequence[Passage],
        generation: Generation,
        max_draft_len: int,
        exit_threshold: float,
    ):
        self._target = target
        self._passages = passages
        self._generation = generation
        self._max_draft_len = max_draft_len
        self._exit_threshold = exit_threshold
        self._rows = max(2, len(passages))
        caches = [_filled(target, passage) for passage in passages]
        self.influence = [sum(each) / len(caches) for each in zip(*(change for _, change in caches), strict=True)]
        self._first = list(accumulate((cache.capacity for cache, _ in caches), initial=self._rows * max_draft_len))
        self._cache = target.new_cache(self._first[-1])
        for first, (cache, _) in zip(self._first, caches, strict=False):
            for layer in range(target.num_layers):
                keys, values = cache.read(layer, cache.capacity)
                self._cache.write(layer, first, keys.transpose(0, 1), values.transpose(0, 1))

    def counts(self, skip: LayerSkip) -> Counts:
        """Counters of a run over all passages."""
        counts, step = Counts(), 0
        walks = [_Walk(passage, first) for passage, first in zip(self._passages, self._first, strict=False)]
        while active := [walk for walk in walks if self._drafting(walk, counts)]:
            self._step(active, skip, step)
            step += 1
        return counts

    def _drafting(self, walk: _Walk, counts: Counts) -> bool:
        """Whether the passage takes another draft step; rounds that are due for their verdict get it."""
        while not walk.finished:
            limit = min(self._generation.max_new_tokens - walk.num_done - 1, self._max_draft_len)
            if len(walk.draft) < limit and not walk.ended:
                return True
            walk.verify(counts)
        return False

    def _step(self, walks: Sequence[_Walk], skip: LayerSkip, step: int) -> None:
        """One draft step of each passage, in a block of slots that no current draft has rows in."""
        start = step % self._max_draft_len * self._rows
        rows = [*walks, walks[-1]] if len(walks) == 1 else walks
        for slot, walk in enumerate(walks, start):
            walk.slots.append(slot)
        span = _Lockstep(
            start=start,
            length=len(rows),
            depths=(0,) * len(rows),
            at=tuple(walk.position + len(walk.draft) for walk in rows),
            visible=torch.stack([self._view(walk) for walk in rows]),
        )
        tokens = torch.tensor([walk.input for walk in rows], device=self._target.devices[0])
        logits = forward(self._target, tokens, span, self._cache, skip=skip).logits
        confidences = logits.float().softmax(dim=-1).amax(dim=-1).tolist()
        for walk, token, confidence in zip(walks, greedy_tokens(logits), confidences, strict=False):
            walk.draft.append(token)
            walk.ended = confidence < self._exit_threshold or token in self._generation.stop_ids

    def _view(self, walk: _Walk) -> Tensor:
        """The slots that a passage's next row sees: its prefix before the root, and its draft with the row itself."""
        seen = torch.zeros(self._cache.capacity, dtype=torch.bool)
        seen[walk.first : walk.first + walk.position] = True
        seen[walk.slots] = True
        return seen


def _filled(target: TargetModel, passage: Passage) -> tuple[KVCache, list[float]]:
    """The full model's keys of a passage, and how much each sub-layer (attentions, then MLPs) turns the states.

    The influence of a sub-layer is 1 minus the mean cosine of the states before and after it.
    """
    tokens = torch.tensor(passage.prompt + passage.answer, device=target.devices[0])
    cache, span = target.new_cache(len(tokens)), Span.causal(0, len(tokens))
    hidden, attn, mlp = target.embed(tokens), [], []
    for index in range(target.num_layers):
        middle = target.layer(index, hidden, span, cache, skip_mlp=True)
        after = target.layer(index, middle, span, cache, skip_attn=True)
        attn.append(_turn_of(hidden, middle))
        mlp.append(_turn_of(middle, after))
        hidden = after
    return cache, attn + mlp


def _turn_of(before: Tensor, after: Tensor) -> float:
    before = before.to(after.device)
    return 1 - float(torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1).mean())
