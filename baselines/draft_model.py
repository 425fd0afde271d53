"""SpS, speculative sampling with a separate draft model, scheduled as Hugging Face's assisted generation does.

Two generations of its defaults: transformers 4.37 (used by Spec-Bench) starts each answer with 5 tokens, adds 2 after
full acceptance and takes 1 away otherwise (`heuristic`), without a confidence exit; from 4.45 on it is 20 tokens,
`constant`, and an exit below a confidence of 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.checkpoint import fingerprint
from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import ChainRule, FixedExit, one_of
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache
from clasp_core.target import Engine, TargetModel, forward
from clasp_core.verify import Draft


class ModelSource(Protocol):
    """Where the draft model comes from; the classes of `clasp_core.loading` are such."""

    def load(self, engine: Engine) -> Any:
        """A loaded model with a `target`."""


class DraftModel:
    """Drafts chains with a smaller model of the same vocabulary, over a cache of its own.

    The model is loaded at the first `start_stream` and kept. Its cache holds committed tokens only; what it has
    not seen of them yet is fed together with the last token. Its prefill is part of the first draft.
    """

    def __init__(
        self,
        model: ModelSource,
        num_tokens: int,
        schedule: Literal["heuristic", "constant"],
        exit_threshold: float,
        draft_sampling: Literal["sample", "greedy"] = "sample",
    ):
        one_of("schedule", schedule, ("heuristic", "constant"))
        if num_tokens < 1:
            raise UserError(f"num_tokens is {num_tokens}; it must be at least 1")
        self._source = model
        self._num_tokens = num_tokens
        self._adapts = schedule == "heuristic"
        self._exit = FixedExit(exit_threshold)
        self._sampling = draft_sampling
        self._drafter: TargetModel | None = None
        self._cache: KVCache
        self._turn: Turn
        self._text: list[int] = []
        self._num_cached = 0
        self._next_len = num_tokens

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Load the draft model, once; refuse one with another vocabulary."""
        if self._drafter is None:
            self._drafter = self._source.load(target.engine).target
        if self._drafter.vocab_size != target.vocab_size:
            raise UserError(
                f"the draft model has a vocabulary of {self._drafter.vocab_size}, the target one of "
                f"{target.vocab_size}; method.sps.model must share the target's tokenizer"
            )

    def describe(self) -> Mapping[str, Any]:
        """The draft model's fingerprint: its weights decide what is drafted."""
        return {"draft_model": fingerprint(self._model.model)}

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """An empty cache for the drafter, and the initial draft length."""
        self._turn = turn
        self._text = [*prompt, prefill.next_token]
        self._num_cached = 0
        self._next_len = self._num_tokens
        self._cache = self._model.turn_cache(len(prompt) + turn.generation.max_new_tokens)
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """A chain of the scheduled length."""
        rule = ChainRule(self._next_len, draft_sampling=self._sampling)
        return rule.draft(self._step, self._turn, last_token, position, limit, self._exit.threshold)

    def observe(self, verified: Verified) -> int:
        """Keep what was accepted in the drafter's cache, and set the next length."""
        accepted = [verified.draft.tokens[row - 1] for row in verified.path[1:]]
        num_drafted = len(verified.draft.tokens)
        if num_drafted:
            self._num_cached = len(self._text) + min(len(accepted), num_drafted - 1)
        self._text += [*accepted, verified.next_token]
        if self._adapts and num_drafted:
            everything = len(accepted) == num_drafted
            self._next_len = self._next_len + 2 if everything else max(1, self._next_len - 1)
        return 0

    def models(self) -> list[TargetModel]:
        """The draft model, once it is loaded."""
        return [] if self._drafter is None else [self._drafter]

    @property
    def _model(self) -> TargetModel:
        if self._drafter is None:
            raise RuntimeError("the draft model is not loaded: start_stream() comes first")
        return self._drafter

    def _step(self, token: int, position: int) -> Tensor:
        """Logits behind a token; committed tokens that the drafter has not seen are fed before it."""
        unseen = self._text[self._num_cached : position]
        tokens = torch.tensor([*unseen, token], device=self._model.devices[0])
        span = Span.causal(position - len(unseen), len(tokens))
        logits = forward(self._model, tokens, span, self._cache, rows=slice(-1, None)).logits[0]
        self._num_cached = position + 1
        return logits.to(self._turn.target.device)
