"""Timed passes of `results/<machine>/bench/*.json`: finding the newest file, its cases by name, whole answers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from clasp_core import costs
from clasp_core.costs import RegimeWord, WidthCost
from clasp_core.errors import UserError
from clasp_core.provenance import commit_of, machine_slug
from clasp_core.timings import READ, STEP, Timing

FOLDER, SCHEMA = "bench", 1
KINDS = ("width", "draft", "dp")
"""Cases that have a number: see `numbered`."""


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What was timed: a model's name, its precision, its engine, and the tokens before a pass."""

    model: str
    dtype: str
    engine: str
    context: int

    @property
    def series(self) -> str:
        """All but the context, as text."""
        return f"{self.model}, {self.dtype}, {self.engine}"


Cases: TypeAlias = Mapping[str, Timing]


@dataclass(frozen=True, slots=True)
class Turns:
    """A few whole answers of one method: their speed, the shares of decode time, and those of all time for prefill."""

    model: str
    dtype: str
    engine: str
    method: str
    num_turns: int
    tokens_per_s: float | None
    draft: float | None
    verify: float | None
    select: float | None
    host: float | None
    prefill: float | None
    peak_memory_bytes: int | None
    """Of the process that ran all methods."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One file: where it lies, when and on what it was made, and the cases of each setting."""

    path: Path
    time: str
    machine: str
    revision: str
    cases: Mapping[Setting, Cases]
    turns: tuple[Turns, ...]

    @property
    def origin(self) -> str:
        """Where its numbers come from, and over how many turns, for a caption."""
        turns = sorted({len(timing.seconds) for cases in self.cases.values() for timing in cases.values()})
        return f"n = {' or '.join(map(str, turns))} turns. Timed passes {self.source}"

    @property
    def source(self) -> str:
        """The file, the machine, the commit and the day."""
        return f"of {self.path.name}, on {self.machine}, commit {self.revision}, {self.time[:10]}."


def newest(path: str | Path) -> Bench | None:
    """The latest file of a `bench` folder at or below a path, or the named file; None where there is none.

    Names start with the time. Raises UserError for a path that does not exist and for a damaged file.
    """
    path = Path(path)
    if path.is_file():
        return read(path)
    if not path.is_dir():
        raise UserError(f"{path} does not exist; name a results folder, or a file that `make bench` wrote")
    found = [each for each in path.rglob("*.json") if each.parent.name == FOLDER]
    return read(max(found, key=lambda each: (each.name, str(each)))) if found else None


def beside(runs: Iterable[Path]) -> Bench | None:
    """The latest file among the machines' folders that these run folders lie in."""
    machines = dict.fromkeys(run.parent.parent for run in runs)
    found = [bench for machine in machines if (machine / FOLDER).is_dir() and (bench := newest(machine / FOLDER))]
    return max(found, key=lambda bench: bench.path.name, default=None)


def read(path: Path) -> Bench:
    """One file; UserError where it cannot be read as such, or lacks the two cases that others are divided by."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise UserError(f"{path} has schema {content['schema']!r}, this version reads {SCHEMA}")
        bench = _bench(path, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no file of timed passes ({type(error).__name__}: {error}); name one") from error
    for setting, cases in bench.cases.items():
        if absent := {STEP, READ} - set(cases):
            raise UserError(f"{path} has no case {min(absent)!r} for {setting.series}; time it again with `make bench`")
        turns = {name: len(timing.seconds) for name, timing in cases.items()}
        if odd := [name for name, num in turns.items() if num != turns[STEP]]:
            raise UserError(
                f"{path} has {turns[odd[0]]} turns of {odd[0]!r} and {turns[STEP]} of {STEP!r} for {setting.series}; "
                "time it again with `make bench`"
            )
    return bench


def _bench(path: Path, content: Mapping[str, Any]) -> Bench:
    cases: dict[Setting, dict[str, Timing]] = defaultdict(dict)
    for row in content["rows"]:
        setting = Setting(row["model"], row["dtype"], row["engine"], int(row["context"]))
        cases[setting][row["case"]] = Timing.from_json(row)
    for timed in cases.values():
        for kind in KINDS:
            numbered(timed, kind)
    found = content["fingerprint"]
    return Bench(
        path=path,
        time=str(content["time"]),
        machine=machine_slug(found["machine"], found.get("accelerators")),
        revision=commit_of(content["git"]),
        cases=dict(sorted(cases.items())),
        turns=tuple(Turns(**row) for row in content.get("turns", ())),
    )


# The cases of one setting


def numbered(cases: Cases, kind: str) -> dict[int, Timing]:
    """The cases `width-5`, `draft-50` or `dp-30` by their number: rows, per cent of layers skipped, layers skipped."""
    found = {name: timing for name, timing in cases.items() if name.rpartition("-")[0] == kind}
    return dict(sorted((int(name.rpartition("-")[2]), timing) for name, timing in found.items()))


def by_width(cases: Cases) -> dict[int, float]:
    """v of each timed width: a pass over so many rows in AR steps, which is 1 at one row."""
    return {1: 1.0} | {width: timing.over(cases[STEP]) for width, timing in numbered(cases, "width").items()}


def c_bytes(timing: Timing, cases: Cases) -> float | None:
    """Bytes of a draft step over those of AR's, keys and values among them; unknown where they were not counted."""
    step = cases[STEP].num_bytes
    return timing.num_bytes / step if timing.num_bytes is not None and step else None


def reading_share(cases: Cases) -> float | None:
    """AR's bytes per second over those of plain reading."""
    return cases[STEP].share_of(cases[READ])


def extra_row(cases: Cases) -> float | None:
    """What one more verified row costs, in AR steps: the mean over the timed widths."""
    return costs.extra_row(_widths(cases))


def regime(cases: Cases) -> RegimeWord:
    """What bounds a step, by the rules of `costs.regime`; the time's unit is one reading of the buffer."""
    step, read = cases[STEP], cases[READ]
    bandwidth = None if read.num_bytes is None else float(read.num_bytes)
    return costs.regime(_widths(cases), step.over(read), step.num_bytes, bandwidth).word


def _widths(cases: Cases) -> list[WidthCost]:
    """Each width once, so that all weigh the same; their seconds are in AR steps."""
    return [WidthCost(width, 1, v, v) for width, v in by_width(cases).items()]
