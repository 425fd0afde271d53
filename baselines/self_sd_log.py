"""What is kept of Self-SD's search: every evaluation in a log, and the result in a file that is replaced whole.

Part of Self-SD's search (`baselines.self_sd_search`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baselines.self_sd_replay import Counts
from clasp_core.errors import UserError
from clasp_core.skip import LayerSkip
from clasp_core.store import replace_file

WAY_OUT = "move it away, or add search.replace=true"
"""What to do where a result is in the way."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A decoded set, its value, its counters, and the seconds since the one before it."""

    skip: LayerSkip
    value: float
    counts: Counts
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        by_width = {str(width): n for width, n in sorted(self.counts.num_rounds_by_width.items())}
        counts = {**asdict(self.counts), "num_rounds_by_width": by_width}
        return {"skip": self.skip.code, "value": self.value, "counts": counts, "seconds": self.seconds}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Evaluation:
        """The evaluation of a stored line."""
        by_width = Counter({int(width): n for width, n in row["counts"]["num_rounds_by_width"].items()})
        counts = Counts(**{**row["counts"], "num_rounds_by_width": by_width})
        return cls(LayerSkip.decode(row["skip"]), row["value"], counts, row["seconds"])


class SearchLog:
    """Append-only JSONL of one or several searches; the lines of `key` are this one's.

    The first line of a search holds what was found out before it (`ground`: the answers, the costs); each further
    one holds an evaluation. A line counts when its newline is there.
    """

    def __init__(self, path: Path, key: str):
        self._path = path
        self._key = key
        self.ground: dict[str, Any] | None = None
        self.evaluations: dict[LayerSkip, Evaluation] = {}
        self.seconds = 0.0
        for number, line in enumerate(self._lines(), start=1):
            try:
                row = json.loads(line)
                if row["key"] == key:
                    self._take(row)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number} is damaged ({error}); move the file away") from error

    def lay_ground(self, ground: dict[str, Any], seconds: float) -> None:
        """Keep what was found out before the first evaluation."""
        self._append({"ground": ground, "seconds": seconds})

    def add(self, evaluation: Evaluation) -> None:
        """Keep an evaluation; on the disk when this returns."""
        self._append(evaluation.to_json())

    def best(self, num: int = 1) -> list[Evaluation]:
        """The evaluations with the highest values, best first; of equal ones the earlier."""
        return sorted(self.evaluations.values(), key=lambda each: -each.value)[:num]

    def _take(self, row: dict[str, Any]) -> None:
        self.seconds += row["seconds"]
        if "ground" in row:
            self.ground = row["ground"]
        else:
            evaluation = Evaluation.from_json(row)
            self.evaluations.setdefault(evaluation.skip, evaluation)

    def _append(self, row: dict[str, Any]) -> None:
        row = {"key": self._key, **row}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(row)

    def _lines(self) -> list[bytes]:
        """The complete lines; a torn last one is cut off."""
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        complete = content.rfind(b"\n") + 1
        if complete < len(content):
            os.truncate(self._path, complete)
        return content[:complete].splitlines()


def earlier_search(path: Path) -> dict[str, Any] | None:
    """What the file that is already there says of its search; None where there is none."""
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is there and cannot be read ({error}); {WAY_OUT}") from error
    search = row.get("search") if isinstance(row, dict) else None
    return search if isinstance(search, dict) else {}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write or replace atomically: readers see the old file or the new one."""
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    replace_file(path, text.encode())
