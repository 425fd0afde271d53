"""PLD, prompt lookup decoding: the draft is copied from where the last n-gram stood before.

Facts of the version that Spec-Bench runs: n-grams of 3, 2, 1; the earliest earlier occurrence in prompt and output
whose continuation is complete; ten tokens. Where nothing matches, it proposes a dummy token; here nothing is proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from clasp_core.decoding import Turn, Verified
from clasp_core.drafting import one_of
from clasp_core.errors import UserError
from clasp_core.target import TargetModel
from clasp_core.verify import Draft


class PromptLookup:
    """Copies `num_tokens` tokens from behind a match of the last `max_ngram` .. 1 tokens.

    `match`: which earlier occurrence is taken. `partial`: whether a continuation that the text's end cuts short
    counts; the version of Spec-Bench wants a whole one.
    """

    def __init__(self, max_ngram: int, num_tokens: int, match: Literal["earliest", "latest"], partial: bool):
        if max_ngram < 1 or num_tokens < 1:
            raise UserError(f"max_ngram is {max_ngram} and num_tokens is {num_tokens}; both must be at least 1")
        one_of("match", match, ("earliest", "latest"))
        self._max_ngram = max_ngram
        self._num_tokens = num_tokens
        self._latest = match == "latest"
        self._partial = partial
        self._text: list[int] = []

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Nothing outlives a turn."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """The text so far is the prompt and the first token."""
        self._text = [*prompt, prefill.next_token]
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """The continuation of the longest n-gram that occurred before, or nothing."""
        for size in range(min(self._max_ngram, len(self._text) - 1), 0, -1):
            if found := self._continuation(size):
                return Draft(tuple(found[:limit]))
        return Draft.empty()

    def observe(self, verified: Verified) -> int:
        """The committed tokens become searchable."""
        self._text += [verified.draft.tokens[row - 1] for row in verified.path[1:]]
        self._text.append(verified.next_token)
        return 0

    def _continuation(self, size: int) -> list[int]:
        text = self._text
        pattern = text[-size:]
        last_start = len(text) - size - (1 if self._partial else self._num_tokens)
        starts = range(max(last_start + 1, 0))
        for start in reversed(starts) if self._latest else starts:
            if text[start] == pattern[0] and text[start : start + size] == pattern:
                return text[start + size : start + size + self._num_tokens]
        return []
