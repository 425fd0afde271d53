"""`compare`: the methods of two runs, each against its namesake, turn by turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from clasp_core.errors import UserError
from clasp_core.metrics import counting, pairing, speedups
from clasp_core.metrics.pairing import Pair
from clasp_core.provenance import differing, value_at
from clasp_core.report.runs import Run, load
from clasp_core.report.summary import OVERALL
from clasp_core.report.tabulate import Published, add_output, number, provenance, publish, span
from clasp_core.store import read_runs

Datum: TypeAlias = dict[str, Any]

NO_DIFFERENCE = ("run_id", "results_dir", "resume")
"""Keys of the configuration that change no row."""


def add_to(commands: Any) -> None:
    """The command `compare`."""
    command: argparse.ArgumentParser = commands.add_parser("compare", help="two runs, each method with its namesake")
    command.add_argument("a", metavar="RUN_A", help="the run that is the measure")
    command.add_argument("b", metavar="RUN_B", help="the run that is measured against it")
    command.add_argument("--force", action="store_true", help="compare across fingerprints; the output says so")
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write the comparison; refused across fingerprints unless forced."""
    a, b = _single(arguments.a), _single(arguments.b)
    publish([comparison(a, b, forced=arguments.force)], arguments)


def _single(path: str) -> Run:
    found = load([path])
    if len(found) > 1:
        raise UserError(f"{path} holds {len(found)} runs; name the folder of one")
    return found[0]


def comparison(a: Run, b: Run, forced: bool) -> Published:
    """Each method of run B against the same method of run A, per task and overall.

    Raises UserError, naming the fields, for runs whose fingerprints or sampling differ, unless forced; and where
    no turn is in both.
    """
    stamp = _mixture(a, b, forced)
    methods = [method for method in b.manifest.methods if method in a.manifest.methods]
    found = [(method, _pairs(a, b, method)) for method in methods]
    if not any(same.pairs for _, same in found):
        raise UserError(f"{a.folder} and {b.folder} share no finished turn of one method; nothing can be compared")
    greedy = a.greedy and b.greedy
    data = [_datum(method, scope, same, greedy, stamp) for method, same in found for scope in same.scopes]
    _relate(data, a.reference if a.reference == b.reference else None)
    warning = f"FORCED COMPARISON, the settings differ in {stamp}. " if stamp else ""
    return Published(
        title=f"{'FORCED: ' if stamp else ''}{b.manifest.run_id} against {a.manifest.run_id}",
        caption=(
            f"{warning}total: time of the method in A over its time in B, end to end, a ratio above 1 where B is "
            "faster; decode: the same after the first token; each with its 95 % bootstrap interval over questions, on "
            "turns with the same prompt and, if greedy, the same answer. over ref.: total over the reference's total, "
            "which takes a change of the machine out. MAT: emitted tokens per round on these turns; rate: accepted "
            "over drafted; n: questions. "
            f"A: {provenance([a])} B: {provenance([b])}"
        ),
        cells=pd.DataFrame([_texts(datum) for datum in data], columns=list(_HEADINGS)),
        data=pd.DataFrame(data),
        num_labels=2,
        notes=_notes(a, b, found),
    )


# What may be compared


def _mixture(a: Run, b: Run, forced: bool) -> str:
    """The fields that must agree and do not, as text; empty for comparable runs."""
    if not forced:
        read_runs([a.folder, b.folder])
    fields = [(key, a.manifest.fingerprint, b.manifest.fingerprint, key) for key in _fingerprint(a, b)]
    fields += [(f"generation.{key}", *_generation(a, b), key) for key in differing(*_generation(a, b))]
    text = "; ".join(f"{name}: {value_at(x, key)!r} against {value_at(y, key)!r}" for name, x, y, key in fields)
    if text and not forced:
        raise UserError(f"{a.folder} and {b.folder} answered under other settings ({text}); --force compares anyway")
    return text


def _fingerprint(a: Run, b: Run) -> list[str]:
    return differing(a.manifest.fingerprint, b.manifest.fingerprint)


def _generation(a: Run, b: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    return a.manifest.config["generation"], b.manifest.config["generation"]


@dataclass(frozen=True, slots=True)
class Shared:
    """The turns of one method that both runs finished on the same prompt, and how many had another prompt."""

    pairs: tuple[Pair, ...]
    num_other_prompts: int
    num_only_a: int
    num_only_b: int

    @property
    def scopes(self) -> list[str]:
        """The tasks that have a pair, and all of them."""
        return [*dict.fromkeys(pair.method.task for pair in self.pairs), OVERALL] if self.pairs else []


def _pairs(a: Run, b: Run, method: str) -> Shared:
    found = pairing.pairs(a.of(method), b.of(method))
    same = tuple(pair for pair in found.pairs if pair.same_prompt)
    return Shared(same, len(found.pairs) - len(same), len(found.missing), len(found.extra))


# Lines


def _datum(method: str, scope: str, same: Shared, greedy: bool, stamp: str) -> Datum:
    pairs = [pair for pair in same.pairs if scope in (OVERALL, pair.method.task)]
    total, decode = speedups.paired_total(pairs, greedy), speedups.paired_decode(pairs, greedy)
    a_rows, b_rows = [pair.reference for pair in pairs], [pair.method for pair in pairs]
    return {
        "method": method,
        "task": scope,
        "n_questions": total.n if total else 0,
        "n_turns": len(pairs),
        "n_equal_turns": sum(pair.equal for pair in pairs),
        **{f"total_{key}": value for key, value in _ends(total).items()},
        **{f"decode_{key}": value for key, value in _ends(decode).items()},
        "a_mean_emitted_per_round": counting.mean_emitted_per_round(a_rows, "rounds"),
        "b_mean_emitted_per_round": counting.mean_emitted_per_round(b_rows, "rounds"),
        "a_acceptance_rate": counting.acceptance_rate(a_rows, "rounds"),
        "b_acceptance_rate": counting.acceptance_rate(b_rows, "rounds"),
        "forced_across": stamp or None,
    }


def _relate(data: Sequence[Datum], reference: str | None) -> None:
    """Add each total over the reference's total in the same task; unknown where the runs share no reference."""
    totals = {datum["task"]: datum["total_value"] for datum in data if datum["method"] == reference}
    for datum in data:
        total, unit = datum["total_value"], totals.get(datum["task"])
        datum["total_over_reference"] = total / unit if total and unit else None


def _ends(found: speedups.Interval | None) -> dict[str, float | None]:
    return {key: getattr(found, key) if found else None for key in ("value", "low", "high")}


_HEADINGS = (
    "method", "task", "n", "turns", "equal", "total", "95 %", "over ref.", "decode", "95 % of decode", "MAT in A",
    "MAT in B", "rate in A", "rate in B",
)  # fmt: skip


def _texts(datum: Datum) -> list[str]:
    return [
        datum["method"],
        datum["task"],
        *(str(datum[key]) for key in ("n_questions", "n_turns", "n_equal_turns")),
        number(datum["total_value"], 3),
        span(datum["total_low"], datum["total_high"], 3),
        number(datum["total_over_reference"], 3),
        number(datum["decode_value"], 3),
        span(datum["decode_low"], datum["decode_high"], 3),
        *(number(datum[f"{side}_mean_emitted_per_round"]) for side in "ab"),
        *(number(datum[f"{side}_acceptance_rate"], 3) for side in "ab"),
    ]


def _notes(a: Run, b: Run, found: Sequence[tuple[str, Shared]]) -> tuple[str, ...]:
    notes = ["The runs are apart in time: a slow spell in one is in every total and not in its interval; see over ref."]
    keys = differing(a.manifest.config, b.manifest.config, NO_DIFFERENCE)
    if keys:
        changes = (f"{k}: {value_at(a.manifest.config, k)!r} -> {value_at(b.manifest.config, k)!r}" for k in keys)
        notes.append(f"The configurations differ in {'; '.join(changes)}")
    for run, other in ((a, b), (b, a)):
        if alone := [name for name in run.manifest.methods if name not in other.manifest.methods]:
            notes.append(f"Only in {run.manifest.run_id}: {', '.join(alone)}")
    for method, same in found:
        counts = (same.num_other_prompts, same.num_only_a, same.num_only_b)
        if any(counts):
            left_out = "left out {} turns with another prompt, {} only in A, {} only in B".format(*counts)
            notes.append(f"{method}: {left_out}")
    return tuple(notes)
