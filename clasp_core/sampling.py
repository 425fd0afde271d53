"""From logits to a distribution, and draws from it: the only place where either happens.

Target and draft go through the same `Sampling`, so acceptance ratios compare like with like.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from clasp_core.errors import NonFiniteLogits, UserError

SMALLEST_TEMPERATURE = 1e-6
"""Below it a quotient of logits may leave float32; what is drawn there is the most probable token anyway."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature, then top-k, then top-p, in that order. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a number from {SMALLEST_TEMPERATURE} on"
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be 0 (off) or a positive count")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must lie in (0, 1], where 1 is off")

    @property
    def greedy(self) -> bool:
        """True at temperature 0 exactly; then no randomness is used anywhere. A tiny temperature still draws."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Distributions `.. V` in float32 for logits `.. V`; not defined for greedy decoding."""
        logits = logits.float()
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            kth = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        if self.top_p < 1:
            scaled = _nucleus(scaled, self.top_p)
        return scaled.softmax(dim=-1)


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of tokens whose mass reaches `top_p`; the most probable token always stays."""
    ordered, order = scaled.sort(dim=-1, descending=False, stable=True)
    below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    below[..., -1] = False
    return scaled.masked_fill(torch.zeros_like(below).scatter(-1, order, below), -torch.inf)


@dataclass(slots=True)
class Randomness:
    """Separate seeded generators, so that one decision's draws never shift another's."""

    draft: torch.Generator
    accept: torch.Generator
    search: torch.Generator

    @classmethod
    def seeded(cls, *parts: object, device: torch.device | str = "cpu") -> Randomness:
        """Generators that depend on the given parts alone (seed, question, turn, repeat, ...)."""

        def generator(role: str) -> torch.Generator:
            text = "\x1f".join(str(part) for part in (role, *parts))
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
            return torch.Generator(device).manual_seed(seed)

        return cls(generator("draft"), generator("accept"), generator("search"))


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """One token from a distribution `V`."""
    return int(torch.multinomial(probs, 1, generator=generator))


def uniform(generator: torch.Generator) -> float:
    """One number from [0, 1), in double precision."""
    return float(torch.rand((), generator=generator, dtype=torch.float64, device=generator.device))


def greedy_tokens(logits: Tensor) -> list[int]:
    """The most probable token of each row `R V`; of equal ones the lowest id. NaN or infinity is an error."""
    largest, best = logits.max(dim=-1)
    tokens: list[int] = torch.where(largest.isfinite(), best, -1).tolist()
    if -1 in tokens:
        raise non_finite("target", logits.dtype, tokens.index(-1))
    return tokens


def check_finite(logits: Tensor, whose: str) -> None:
    """Refuse NaN and +infinity in logits `R V`; a masked (-infinity) entry is fine unless a whole row is."""
    rows: list[bool] = logits.amax(dim=-1).isfinite().tolist()
    if not all(rows):
        raise non_finite(whose, logits.dtype, rows.index(False))


def non_finite(whose: str, dtype: torch.dtype, row: int) -> NonFiniteLogits:
    """The error for a forward pass that overflowed."""
    name = str(dtype).removeprefix("torch.")
    return NonFiniteLogits(
        f"the {whose}'s logits are NaN or infinite at row {row} of a pass in {name}; the limit of that dtype is "
        f"{torch.finfo(dtype).max:.3g}: try model.dtype=bfloat16 or float32, or check the weights"
    )
