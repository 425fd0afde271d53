"""Runs as flat values, for a tracker and for comparisons: running figures, tables and summary keys, all from rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from clasp_core.metrics import counting, grading, pairing
from clasp_core.records import Manifest, TurnRecord
from clasp_core.report.summary import OVERALL

Columns: TypeAlias = tuple[list[str], list[list[Any]]]
"""The names of a table's columns, and its lines."""

TURN = (
    "task", "category", "question_id", "turn", "repeat", "method", "grade", "num_prompt_tokens", "num_new_tokens",
    "prefill_s", "decode_s", "select_s", "tokens_per_s", "num_rounds", "num_drafted", "num_accepted",
    "acceptance_rate", "mean_emitted_per_round", "stop_reason", "error",
)  # fmt: skip
LEVELS = ("ceiling", "oracle", "draft", "verify", "search", "measured", "efficiency", "host_loss")
COSTS = ("c", "c_bytes", "v", "p")
COUNTS = MappingProxyType(
    {
        "mean_emitted_per_round": "rounds",
        "mean_accepted_per_round": "rounds",
        "acceptance_rate": "rounds",
    }
)


@dataclass
class _Sums:
    """A method's running sums: over rounds, and over the pairs of `paired_total`."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    num_rounds: int = 0
    reference_tokens: int = 0
    reference_s: float = 0.0
    tokens: int = 0
    total_s: float = 0.0

    def add(self, row: TurnRecord, reference: TurnRecord | None, greedy: bool) -> None:
        counts = counting.count([row])
        self.num_drafted += counts.num_drafted
        self.num_accepted += counts.num_accepted
        self.num_emitted += counts.num_emitted
        self.num_rounds += counts.num_rounds
        if reference is None or not reference.total_s or not row.total_s:
            return
        if pairing.Pair(reference, row).equal or not greedy:
            self.reference_tokens += len(reference.output_ids or ())
            self.reference_s += reference.total_s
            self.tokens += len(row.output_ids or ())
            self.total_s += row.total_s

    @property
    def speedup(self) -> float | None:
        if not self.tokens or not self.reference_tokens:
            return None
        return (self.reference_s / self.reference_tokens) / (self.total_s / self.tokens)


class Running:
    """Where each method stands after each turn; the last `speedup` equals the summary's `paired_total`."""

    def __init__(self, reference: str | None, greedy: bool) -> None:
        self._reference = reference
        self._greedy = greedy
        self._references: dict[tuple[str, int, int, int], TurnRecord] = {}
        self._sums: dict[str, _Sums] = defaultdict(_Sums)
        self._num_failed = 0

    def add(self, rows: Sequence[TurnRecord]) -> dict[str, Any]:
        """The values of one history step; unknown ones are null."""
        done = counting.finished(rows)
        self._references |= {row.pair: row for row in done if row.method == self._reference}
        self._num_failed += len(rows) - len(done)
        values: dict[str, Any] = {"running/num_failed": self._num_failed}
        for row in done:
            reference = None if row.method == self._reference else self._references.get(row.pair)
            self._sums[row.method].add(row, reference, self._greedy)
            values |= self._standing(row)
        return values

    def _standing(self, row: TurnRecord) -> dict[str, Any]:
        sums, name = self._sums[row.method], row.method
        return {
            f"running/{name}/speedup": sums.speedup,
            f"running/{name}/acceptance_rate": _ratio(sums.num_accepted, sums.num_drafted),
            f"running/{name}/mean_emitted_per_round": _ratio(sums.num_emitted, sums.num_rounds),
            f"turn/{name}/total_s": row.total_s,
            f"turn/{name}/num_new_tokens": row.num_new_tokens,
            f"turn/{name}/tokens_per_s": _ratio(row.num_new_tokens or 0, row.total_s or 0.0),
        }


def turns(rows: Sequence[TurnRecord], reference: str | None, greedy: bool) -> Columns:
    """One line per row; `grade` is null for the reference and without one."""
    answers = {row.pair: row for row in counting.finished(rows) if row.method == reference}
    lines = []
    for row in rows:
        graded = reference is not None and row.method != reference
        values = _turn(row) | {"grade": grading.grade_turn(answers.get(row.pair), row, greedy) if graded else None}
        lines.append([values[name] for name in TURN])
    return list(TURN), lines


def _turn(row: TurnRecord) -> dict[str, Any]:
    counts = counting.count([row]) if row.rounds is not None else None
    derived = {
        "tokens_per_s": _ratio(row.num_new_tokens or 0, row.total_s or 0.0),
        "num_rounds": counts and counts.num_rounds,
        "num_drafted": counts and counts.num_drafted,
        "num_accepted": counts and counts.num_accepted,
        "acceptance_rate": counts and _ratio(counts.num_accepted, counts.num_drafted),
        "mean_emitted_per_round": counts and _ratio(counts.num_emitted, counts.num_rounds),
    }
    return {name: getattr(row, name) for name in TURN if hasattr(row, name)} | derived


def estimators(summary: Mapping[str, Any]) -> Columns:
    """Every speed-up of a summary with its interval and n, per method and task."""
    columns = ["method", "task", "estimator", "value", "low", "high", "n"]
    lines = [
        [name, scope, label, *(interval[part] for part in ("value", "low", "high", "n"))]
        for name, scope, cell in _cells(summary)
        for label, interval in cell["speedup"].items()
        if interval is not None
    ]
    return columns, lines


def ladders(summary: Mapping[str, Any]) -> Columns:
    """The loss ladder per method and task; scopes without one are left out."""
    lines = [
        [name, scope, *(ladder[label] for label in (*LEVELS, *COSTS))]
        for name, by_scope in summary["ladders"].items()
        for scope, ladder in by_scope.items()
        if ladder is not None
    ]
    return ["method", "task", *LEVELS, *COSTS], lines


def summary_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary under flat keys `<task>/<method>/<figure>`; each aggregate stands beside its n (P57)."""
    values = {"num_turns": summary["num_turns"], "num_common_turns": summary["num_common_turns"]}
    for name, scope, cell in _cells(summary):
        place = f"{scope}/{name}"
        values |= {f"{place}/{key}": cell[key] for key in ("num_questions", "num_turns", "num_failed", "num_missing")}
        values |= {f"{place}/{key}": cell[key][level] for key, level in COUNTS.items()}
        values |= {f"{place}/{key}": cell[key] for key in ("end_to_end_tokens_per_s", "decode_tokens_per_s", "typical")}
        values |= {f"{place}/grade": (cell["grade"] or {"worst": None})["worst"]}
        for label, interval in cell["speedup"].items():
            parts = {"": "value", "_low": "low", "_high": "high", "_n": "n"}
            values |= {f"{place}/{label}{end}": interval[part] for end, part in parts.items() if interval is not None}
        ladder = summary["ladders"].get(name, {}).get(scope) or {}
        values |= {f"{place}/ladder/{label}": ladder[label] for label in (*LEVELS, *COSTS) if label in ladder}
    return {key: value for key, value in values.items() if value is not None}


def config_of(manifest: Manifest) -> dict[str, Any]:
    """The resolved configuration under flat keys such as `method/clasp/interval` (W&B cannot filter by dotted ones),
    and beside it what a reader needs: the run's id and hashes, code, versions, machine and model.
    """
    about = {
        "run_id": manifest.run_id,
        "config_hash": manifest.config_hash,
        "reference": manifest.reference,
        "methods": manifest.methods,
        "git": manifest.git,
        "versions": manifest.versions,
        "fingerprint": manifest.fingerprint,
        "model_label": manifest.model["label"],
        "notes": manifest.notes,
    }
    return dict(flat({**manifest.config, "run": about}))


def flat(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping under keys joined by slashes; empty mappings are left out."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


def _cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name in summary["methods"]:
        for scope in (*summary["tasks"], OVERALL):
            yield name, scope, summary["cells"][name][scope]


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
