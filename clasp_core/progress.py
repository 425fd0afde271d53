"""A progress bar with the running speed-up and acceptance; it is told of finished turns only, outside the clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from clasp_core.records import TurnRecord
from clasp_core.runner import Progress


class Together:
    """Tells several of each finished turn, in their order."""

    def __init__(self, *listeners: Progress):
        self._listeners = listeners

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """One turn is done by all methods."""
        for listener in self._listeners:
            listener.update(rows)


class Bar:
    """One tick per turn that all methods have answered. Silent where the output is no terminal."""

    def __init__(self, num_turns: int, num_done: int, reference: str | None):
        self._reference = reference
        self._seconds: dict[str, float] = defaultdict(float)
        self._reference_seconds: dict[str, float] = defaultdict(float)
        self._drafted: dict[str, int] = defaultdict(int)
        self._accepted: dict[str, int] = defaultdict(int)
        self._bar = tqdm(total=num_turns, initial=num_done, unit="turn", disable=None, dynamic_ncols=True)

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """Add the rows of one turn and show where each method stands."""
        by_method = {row.method: row for row in rows if row.error is None}
        reference = by_method.get(self._reference or "")
        for name, row in by_method.items():
            self._count(name, row, reference)
        self._bar.set_postfix_str("  ".join(self._standing(name) for name in by_method if name != self._reference))
        self._bar.update()

    def _count(self, name: str, row: TurnRecord, reference: TurnRecord | None) -> None:
        if reference is not None and row.num_new_tokens and reference.num_new_tokens:
            self._seconds[name] += (row.total_s or 0.0) / row.num_new_tokens
            self._reference_seconds[name] += (reference.total_s or 0.0) / reference.num_new_tokens
        if row.rounds is not None:
            self._drafted[name] += sum(row.rounds.num_drafted)
            self._accepted[name] += sum(row.rounds.num_accepted)

    def _standing(self, name: str) -> str:
        seconds, drafted = self._seconds[name], self._drafted[name]
        speedup = f" {self._reference_seconds[name] / seconds:.2f}x" if seconds else ""
        acceptance = f" acc {self._accepted[name] / drafted:.2f}" if drafted else ""
        return f"{name}{speedup}{acceptance}"

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
