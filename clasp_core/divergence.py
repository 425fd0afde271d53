"""Where two greedy answers part, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from clasp_core.attention import Span
from clasp_core.metrics.grading import first_divergence
from clasp_core.target import TargetModel, forward

TIE_ULPS = MappingProxyType({torch.float64: 64, torch.float32: 64})
"""Gaps of that many units in the last place of the largest logit are ties: sums over thousands of terms differ
by some tens of units between kernels. 16-bit kernels accumulate in float32 and round each layer's output, so a
logit is off by few units there."""

TIE_ULPS_16_BIT = 4


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first index at which ids differ; by how much the worse of the two tokens' logits falls short of the
    best one there; and the largest shortfall that rounding explains in the target's dtype."""

    index: int
    gap: float | None
    bound: float | None


@torch.inference_mode()
def divergence(
    target: TargetModel, prompt: Sequence[int], reference_ids: Sequence[int], ids: Sequence[int]
) -> Divergence | None:
    """None where the ids are equal. The target is run once over prompt and common prefix to get the logits there.

    Where one answer is a mere prefix of the other there is no second token, so gap and bound are unknown.
    """
    index = first_divergence(reference_ids, ids)
    if index is None:
        return None
    if index >= min(len(reference_ids), len(ids)):
        return Divergence(index, None, None)
    tokens = torch.tensor([*prompt, *reference_ids[:index]], device=target.devices[0])
    cache = target.new_cache(len(tokens))
    logits = forward(target, tokens, Span.causal(0, len(tokens)), cache, rows=slice(-1, None)).logits[0].double()
    worse = min(float(logits[reference_ids[index]]), float(logits[ids[index]]))
    resolution = torch.finfo(target.dtype).eps * float(logits.abs().max())
    return Divergence(index, float(logits.max()) - worse, TIE_ULPS.get(target.dtype, TIE_ULPS_16_BIT) * resolution)
