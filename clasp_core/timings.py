"""Timed passes as they are stored in `results/<machine>/bench/`: one case, its seconds, and the bytes it must read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from statistics import median
from typing import Any

STEP, READ = "ar_step", "read"
"""The cases that the others are divided by: one token by the whole model, and reading a large buffer once."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One case: its seconds turn by turn, and the bytes that a pass must read (None: not counted)."""

    case: str
    context: int
    seconds: tuple[float, ...]
    num_bytes: int | None

    def over(self, other: Timing) -> float:
        """Median over the turns of this case's time by another's."""
        return median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))

    def share_of(self, read: Timing) -> float | None:
        """Bytes per second of this case over those of plain reading: 1 is the machine's limit."""
        if self.num_bytes is None or read.num_bytes is None:
            return None
        return self.num_bytes / read.num_bytes / self.over(read)

    def to_json(self) -> dict[str, Any]:
        """A row of a probe file."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Timing:
        """A row of a probe file again; KeyError, TypeError or ValueError for another one."""
        seconds, num_bytes = tuple(map(float, row["seconds"])), row["num_bytes"]
        if not seconds or not all(0 < each < inf for each in seconds):
            raise ValueError(f"{row['case']} took {list(seconds)} seconds")
        return cls(row["case"], int(row["context"]), seconds, None if num_bytes is None else int(num_bytes))
