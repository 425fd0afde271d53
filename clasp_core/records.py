"""What is stored: questions, rounds, turns and manifests, and their JSON form. Raw values only; see `metrics`."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

SCHEMA = 1
"""Version of the row layout; a reader refuses rows of another one."""

LATE = ("first_divergence", "divergence_gap", "divergence_bound")
"""Fields of a row that may be known later than the row is written."""

PLAIN = frozenset({int, str, bool, type(None)})
"""Types of JSON values that fit where exactly their type is wanted."""


@dataclass(frozen=True, slots=True)
class Question:
    """One benchmark item. `task` is the reported subtask; `category` the finer label of the question file."""

    question_id: int
    task: str
    category: str
    turns: tuple[str, ...]


@dataclass(slots=True)
class RoundTrace:
    """Counters and times of every round of one turn, as equally long lists (times in seconds).

    `num_accepted` counts kept draft tokens; the target's own token is not among them. `num_emitted` is what
    the round committed after the cut at the stop token and at the budget. `num_draft_steps` counts forward
    passes of the drafter, which differs from `num_drafted` for trees and for copies. `num_searches` counts
    searches for a skip set (a dynamic programme, a trial); their time is `select_s`, and the search that
    follows the prefill belongs to the first round. `skip` is the skip set in use, as `LayerSkip.code`.

    `drafted_ids` are the proposed tokens, kept or not; `accepted_path` the places among them of the kept ones, null
    where these are simply the first `num_accepted` (a chain). Both are empty in rows that were written before they
    were kept, and no figure depends on them.
    """

    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_emitted: list[int] = field(default_factory=list)
    num_draft_steps: list[int] = field(default_factory=list)
    num_searches: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    select_s: list[float] = field(default_factory=list)
    skip: list[str | None] = field(default_factory=list)
    drafted_ids: list[list[int]] = field(default_factory=list)
    accepted_path: list[list[int] | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.num_emitted)


@dataclass(slots=True)
class TurnRecord:
    """One method's answer to one turn. Null means unknown or not applicable, never zero.

    A failed turn carries `error` and no numbers. `decode_s` is everything after the first token, searches
    included; `select_s` is the part of it spent on searches. `peak_memory_bytes` is the sum of the devices' peaks;
    rows from before `peak_memory_bytes_by_device` have the sum only. `energy_j` is what the model's GPUs drew over
    the whole turn. `position_in_turn` is the method's place in the turn's order; where other methods of the turn
    had their rows before a resume, they did not run right before it.
    """

    run_id: str
    model: str
    method: str
    task: str
    category: str
    question_id: int
    turn: int
    repeat: int
    seed: int
    prompt_sha256: str | None = None
    num_prompt_tokens: int | None = None
    output_ids: list[int] | None = None
    num_new_tokens: int | None = None
    stop_reason: str | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    select_s: float | None = None
    rounds: RoundTrace | None = None
    first_divergence: int | None = None
    divergence_gap: float | None = None
    divergence_bound: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_bytes_by_device: dict[str, int] | None = None
    energy_j: float | None = None
    position_in_turn: int | None = None
    error: str | None = None
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, int, int, int]:
        """What makes a row unique within a run: method, task, question, turn, repeat."""
        return (self.method, self.task, self.question_id, self.turn, self.repeat)

    @property
    def pair(self) -> tuple[str, int, int, int]:
        """What two methods' rows share when they answered the same thing: task, question, turn, repeat."""
        return (self.task, self.question_id, self.turn, self.repeat)

    def late_divergence(self) -> dict[str, Any]:
        """The entry of `Manifest.late_divergences` for this row."""
        return {"key": list(self.key), **{name: getattr(self, name) for name in LATE}}

    @property
    def total_s(self) -> float | None:
        """End-to-end seconds, prefill inside; null where either part is unknown."""
        if self.prefill_s is None or self.decode_s is None:
            return None
        return self.prefill_s + self.decode_s

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the field names as keys."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> TurnRecord:
        """The record of a stored row. Unknown keys are dropped, so that newer rows of one schema stay readable.

        Raises ValueError or TypeError for another schema, values of other types, and numbers that do not add up.
        """
        if row.get("schema") != SCHEMA:
            raise ValueError(f"row has schema {row.get('schema')!r}, this version reads {SCHEMA}")
        values = _known_values(cls, row)
        if values.get("rounds") is not None:
            values["rounds"] = RoundTrace(**values["rounds"])
        record = cls(**values)
        record.check()
        return record

    def check(self) -> None:
        """Raise ValueError where ids, counters and round lists contradict one another."""
        if self.error is not None and self.output_ids is not None:
            raise ValueError("the row has an error and an answer; a failed turn has no numbers")
        num_ids = None if self.output_ids is None else len(self.output_ids)
        if self.num_new_tokens not in (None, num_ids):
            raise ValueError(f"num_new_tokens is {self.num_new_tokens}, but output_ids holds {num_ids} tokens")
        if self.rounds is None:
            return
        lengths = {entry.name: len(getattr(self.rounds, entry.name)) for entry in fields(self.rounds)}
        old = {name for name in ("drafted_ids", "accepted_path") if not lengths[name]}
        if len({length for name, length in lengths.items() if name not in old}) > 1:
            raise ValueError(f"the lists of rounds are not equally long: {lengths}")
        num_emitted = sum(self.rounds.num_emitted)
        if num_ids is None or (len(self.rounds) and num_emitted != num_ids - 1):
            raise ValueError(f"rounds emitted {num_emitted} tokens behind the first, but output_ids holds {num_ids}")


@dataclass(slots=True)
class Manifest:
    """Where a run's rows come from; everything a reader needs before trusting or pairing them.

    `fingerprint` holds what must agree before times are compared (machine, devices, model, dtype, ...);
    `config_hash` covers what decides the rows, and is what a resume checks.
    """

    run_id: str
    status: str
    """running | ok | failed | interrupted"""
    reference: str | None
    methods: list[str]
    config: dict[str, Any]
    config_hash: str
    command: list[str]
    git: dict[str, Any]
    versions: dict[str, str]
    fingerprint: dict[str, Any]
    model: dict[str, Any]
    start: str
    end: str | None = None
    num_failed: int = 0
    offline_search_s: dict[str, float] = field(default_factory=dict)
    """Seconds that methods' skip sets took to find before the run; never part of a row's times."""
    conditions: dict[str, Any] = field(default_factory=dict)
    """The machine's state at the start (load, environment), which may differ between comparable runs."""
    notes: list[str] = field(default_factory=list)
    late_divergences: list[dict[str, Any]] = field(default_factory=list)
    """Where rows part from a reference that answered after a resume only: row keys and the fields of `LATE`."""
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """A plain dict with the field names as keys."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Manifest:
        """The manifest of a stored line. Raises TypeError where a value has another type or is missing."""
        return cls(**_known_values(cls, row))


def _known_values(cls: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a class's fields; TypeError for one of another type than the class declares."""
    hints = get_type_hints(cls)
    known = {key: value for key, value in row.items() if key in hints}
    for key, value in known.items():
        if not _fits(value, hints[key]):
            wanted = str(getattr(hints[key], "__name__", hints[key]) if get_origin(hints[key]) is None else hints[key])
            raise TypeError(f"{key} is {value!r:.60}; it must be {wanted.replace('clasp_core.records.', '')}")
    return known


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value may stand in a field of that type; whole numbers are floats too, NaN and True are none."""
    if hint is Any:
        return True
    if get_origin(hint) in (types.UnionType, Union):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and _all_fit(value, get_args(hint)[0])
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return isinstance(value, dict) and all(_fits(item, hints.get(key)) for key, item in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value is None if hint in (None, type(None)) else type(value) is hint


def _all_fit(values: Sequence[Any], hint: Any) -> bool:
    """`_fits` for every item. Round lists hold millions of plain values, which are judged by the set of their types."""
    kinds = set(map(type, values))
    if hint is float:
        return kinds <= {int, float} and all(map(math.isfinite, values))
    options = set(get_args(hint)) if get_origin(hint) in (types.UnionType, Union) else {hint}
    return kinds <= options & PLAIN or all(_fits(value, hint) for value in values)
