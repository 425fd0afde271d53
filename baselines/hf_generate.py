"""Hugging Face's own `generate`, with the harness's stopping rules: a second denominator for speed-ups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from clasp_core.decoding import Answer, Generation
from clasp_core.device import Clock, Mark
from clasp_core.drafting import one_of
from clasp_core.records import RoundTrace
from clasp_core.sampling import Randomness
from clasp_core.target import TargetModel


class HFGenerate:
    """Autoregressive decoding by `generate`; same warpers, stop ids and budget.

    Its cache grows with the answer (`dynamic`) or is allocated whole (`static`), which lets transformers compile the
    forward on a GPU. It compiles anew, under the clock, for every turn that is longer than all before.
    """

    def __init__(self, cache: Literal["dynamic", "static"] = "dynamic"):
        one_of("cache", cache, ("dynamic", "static"))
        self._cache = cache

    def start_stream(self, target: TargetModel) -> None:
        """Nothing to forget."""

    @torch.inference_mode()
    def answer(
        self,
        target: TargetModel,
        prompt: Sequence[int],
        generation: Generation,
        randomness: Randomness,
        clock: Clock,
    ) -> Answer:
        """One turn. A stopping criterion that never stops marks the end of each step."""
        tokens = torch.tensor([list(prompt)], device=target.devices[0])
        ticks = _Ticks(clock)
        with torch.random.fork_rng(devices=[d for d in target.devices if d.type == "cuda"]):
            torch.manual_seed(randomness.draft.initial_seed())
            started = clock.now()
            begin = clock.mark()
            ids = target.model.generate(tokens, stopping_criteria=[ticks], **_options(tokens, generation, self._cache))
            ended = clock.now()
        output = ids[0, len(prompt) :].tolist()
        prefill_s = begin.seconds_until(ticks.marks[0])
        reason = "stop" if output[-1] in generation.stop_ids else "length"
        return Answer(output, reason, prefill_s, ended - started - prefill_s, ticks.trace())


def _options(tokens: Tensor, generation: Generation, cache: str) -> dict[str, Any]:
    """Every setting explicit, so that nothing comes from a checkpoint's generation config."""
    stops = sorted(generation.stop_ids)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": generation.max_new_tokens,
        "eos_token_id": stops or None,
        "pad_token_id": stops[0] if stops else 0,
        "do_sample": not generation.sampling.greedy,
    }
    if cache == "static":
        options["cache_implementation"] = cache
    if not generation.sampling.greedy:
        sampling = generation.sampling
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return options


class _Ticks:
    """A stopping criterion that notes when each token was there, and never stops."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.marks: list[Mark] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.marks.append(self._clock.mark())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def trace(self) -> RoundTrace:
        """One round per token after the first; its whole time is the target's pass."""
        seconds = [before.seconds_until(after) for before, after in pairwise(self.marks)]
        num = len(seconds)
        return RoundTrace(
            num_drafted=[0] * num,
            num_accepted=[0] * num,
            num_emitted=[1] * num,
            num_draft_steps=[0] * num,
            num_searches=[0] * num,
            draft_s=[0.0] * num,
            verify_s=seconds,
            select_s=[0.0] * num,
            skip=[None] * num,
            drafted_ids=[[]] * num,
            accepted_path=[None] * num,
        )
