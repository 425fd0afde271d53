"""The oracle: replays the target's own answer as the draft. Its acceptance is 1 and its drafts cost nothing.

So its time is verification and host alone: the ceiling for any drafter of that draft length. Under sampling the
replayed answer is only one of many, and its acceptance falls below 1; read its table at temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from clasp_core.decoding import Turn, Verified
from clasp_core.errors import UserError
from clasp_core.target import TargetModel
from clasp_core.verify import Draft


class Oracle:
    """Drafts `max_draft_len` tokens of the reference's answer to the same prompt; the runner supplies it."""

    def __init__(self, max_draft_len: int):
        if max_draft_len < 1:
            raise UserError(f"max_draft_len is {max_draft_len}; it must be at least 1")
        self._max_draft_len = max_draft_len
        self._prompt: list[int] = []
        self._answer: list[int] = []
        self._num_prompt = 0

    def inform(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The reference's answer to the prompt that comes next."""
        self._prompt, self._answer = list(prompt), list(answer)

    def extra_slots(self, budget: int) -> int:
        """None: chains lie within the budget."""
        return 0

    def needs_hidden(self, *, prefill: bool) -> bool:
        """Never."""
        return False

    def start_stream(self, target: TargetModel) -> None:
        """Nothing outlives a turn."""

    def start(self, turn: Turn, prompt: Sequence[int], prefill: Verified) -> int:
        """An answer to another prompt is not used."""
        if list(prompt) != self._prompt:
            self._answer = []
        self._num_prompt = len(prompt)
        return 0

    def propose(self, last_token: int, position: int, limit: int) -> Draft:
        """What follows `last_token` in the saved answer."""
        start = position - self._num_prompt + 1
        return Draft(tuple(self._answer[start : start + min(limit, self._max_draft_len)]))

    def observe(self, verified: Verified) -> int:
        """Nothing to learn."""
        return 0
