"""From rows to what the report page shows: one record for the page, and one per question, read when it is opened.

Figures come from the summary and `metrics`; what is made here is their layout, and the rounds in a compact form.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from clasp_core.metrics import counting, grading, pairing, speedups
from clasp_core.positions import acceptance_by_position
from clasp_core.records import Manifest, RoundTrace, TurnRecord
from clasp_core.report.runs import Run
from clasp_core.report.summary import OVERALL
from clasp_core.skip import LayerSkip

Record: TypeAlias = dict[str, Any]
QuestionKey: TypeAlias = tuple[str, int]


def page_record(run: Run, texts: Mapping[str, Any] | None) -> Record:
    """All of the page but the questions' answers, as JSON-able data."""
    methods = _named(run)
    scopes = {**{task: [row for row in run.rows if row.task == task] for task in run.tasks}, OVERALL: list(run.rows)}
    return {
        "run": _identity(run.manifest),
        "summary": run.summary(),
        "positions": {name: {scope: _positions(rows, name) for scope, rows in scopes.items()} for name in methods},
        "skips": {name: {scope: _skip_map(rows, name) for scope, rows in scopes.items()} for name in methods},
        "questions": [_question_line(run, key, rows) for key, rows in by_question(run.rows).items()],
        "failures": [_failure(row) for row in run.rows if row.error is not None],
        "pieces": dict(texts["pieces"]) if texts else {},
        "has_drafted_ids": any(row.rounds is not None and row.rounds.drafted_ids for row in run.rows),
        "provenance": provenance(run.manifest),
    }


def question_record(run: Run, key: QuestionKey, rows: Sequence[TurnRecord], texts: Mapping[str, Any] | None) -> Record:
    """One question: the text of its turns (null if it was not kept) and every answer, turn by turn."""
    task, question_id = key
    turns = texts["questions"].get(task, {}).get(str(question_id)) if texts else None
    reference = {row.pair: row for row in rows if row.method == run.reference}
    order = {name: place for place, name in enumerate(_named(run))}
    ordered = sorted(rows, key=lambda row: (row.turn, row.repeat, order.get(row.method, len(order))))
    return {"turns": turns, "answers": [_answer(run, row, reference.get(row.pair)) for row in ordered]}


def by_question(rows: Iterable[TurnRecord]) -> dict[QuestionKey, list[TurnRecord]]:
    """The rows of each question, in the order of the file."""
    found: dict[QuestionKey, list[TurnRecord]] = defaultdict(list)
    for row in rows:
        found[row.task, row.question_id].append(row)
    return dict(found)


def _named(run: Run) -> list[str]:
    """The methods with the reference first, as the summary orders them."""
    return [name for name in dict.fromkeys((run.reference, *run.manifest.methods)) if name is not None]


# The page's own figures


def _positions(rows: Iterable[TurnRecord], method: str) -> list[Record] | None:
    found = acceptance_by_position([row for row in rows if row.method == method])
    if found is None:
        return None
    return [
        {
            "drafted": each.num_drafted,
            "reached": each.num_reached,
            "accepted": each.num_accepted,
            "rate": each.rate,
            "conditional_rate": each.conditional_rate,
        }
        for each in found
    ]


def _skip_map(rows: Iterable[TurnRecord], method: str) -> Record | None:
    """For each layer, the share of draft steps that left its attention and its MLP out; null without skip sets."""
    steps: Counter[str] = Counter()
    for row in counting.finished(rows):
        if row.method == method and row.rounds is not None:
            for code, num_steps in zip(row.rounds.skip, row.rounds.num_draft_steps, strict=True):
                if code is not None:
                    steps[code] += num_steps
    total = steps.total()
    if not total:
        return None
    sets = {LayerSkip.decode(code): num for code, num in steps.items() if num}
    num_layers = next(iter(sets)).num_layers
    return {
        "num_sets": len(sets),
        "num_steps": total,
        "attn": [sum(num for skip, num in sets.items() if skip.attn[i]) / total for i in range(num_layers)],
        "mlp": [sum(num for skip, num in sets.items() if skip.mlp[i]) / total for i in range(num_layers)],
    }


# Questions


def _question_line(run: Run, key: QuestionKey, rows: Sequence[TurnRecord]) -> Record:
    methods = {name: [row for row in rows if row.method == name] for name in _named(run)}
    return {
        "task": key[0],
        "id": key[1],
        "category": rows[0].category,
        "num_turns": len({row.pair for row in rows}),
        "num_failed": sum(row.error is not None for row in rows),
        "methods": {name: _question_cell(run, name, methods) for name in methods},
    }


def _question_cell(run: Run, name: str, methods: Mapping[str, Sequence[TurnRecord]]) -> Record:
    own = methods[name]
    speedup = None
    if run.reference is not None and name != run.reference:
        found = pairing.pairs(methods[run.reference], own).pairs
        interval = speedups.paired_total(found, run.greedy)
        speedup = interval.value if interval else None
    return {
        "speedup": speedup,
        "tokens_per_s": counting.end_to_end_tokens_per_s(own),
    }


def _answer(run: Run, row: TurnRecord, reference: TurnRecord | None) -> Record:
    against = run.reference is not None and row.method != run.reference
    known = {
        "method": row.method,
        "turn": row.turn,
        "repeat": row.repeat,
        "error": row.error,
        "ids": row.output_ids,
        "stop_reason": row.stop_reason,
        "num_prompt_tokens": row.num_prompt_tokens,
        "prefill_s": row.prefill_s,
        "decode_s": row.decode_s,
        "grade": grading.grade_turn(reference, row, run.greedy) if against else None,
        "first_divergence": row.first_divergence,
        "tokens_per_s": counting.end_to_end_tokens_per_s([row]),
        "emitted_per_round": counting.mean_emitted_per_round([row], "rounds"),
    }
    return {**known, "rounds": None if row.rounds is None else compact(row.rounds)}


def compact(trace: RoundTrace) -> Record:
    """A trace in as few characters as its reader needs: times in whole microseconds, a list of one value as the value.

    `skip` holds places in `skip_sets`, which say in words what is left out.
    """
    codes = list(dict.fromkeys(trace.skip))
    return {
        "num": len(trace),
        "drafted": _packed(trace.num_drafted),
        "accepted": _packed(trace.num_accepted),
        "emitted": _packed(trace.num_emitted),
        "searches": _packed(trace.num_searches),
        "draft_us": _packed(_microseconds(trace.draft_s)),
        "verify_us": _packed(_microseconds(trace.verify_s)),
        "select_us": _packed(_microseconds(trace.select_s)),
        "skip": _packed([codes.index(code) for code in trace.skip]),
        "skip_sets": [None if code is None else skip_in_words(LayerSkip.decode(code)) for code in codes],
        "ids": trace.drafted_ids if any(trace.drafted_ids) else None,
        "path": trace.accepted_path if any(path is not None for path in trace.accepted_path) else None,
    }


def _microseconds(seconds: Iterable[float]) -> list[int]:
    return [round(1e6 * each) for each in seconds]


def _packed(values: Sequence[int]) -> int | Sequence[int]:
    return values[0] if len(set(values)) == 1 else values


def skip_in_words(skip: LayerSkip) -> str:
    """A skip set as a reader wants it: how many of how many, and which."""
    attn, mlp = skip.skipped_attn, skip.skipped_mlp
    if attn == mlp:
        return f"{len(attn)} of {skip.num_layers} layers skipped: {_ranges(attn)}"
    return (
        f"skipped of {skip.num_layers} layers: {len(attn)} attention ({_ranges(attn)}), {len(mlp)} MLP ({_ranges(mlp)})"
    )


def _ranges(indices: Sequence[int]) -> str:
    """Ascending indices with neighbours joined, such as `1, 3-5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def _failure(row: TurnRecord) -> Record:
    names = ("method", "task", "question_id", "turn", "repeat", "error")
    return {name: getattr(row, name) for name in names}


# Provenance


def _identity(manifest: Manifest) -> Record:
    """What the head of the page says of the run."""
    machine = manifest.fingerprint.get("machine")
    return {
        "id": manifest.run_id,
        "status": manifest.status,
        "start": manifest.start,
        "end": manifest.end,
        "model": manifest.model.get("label", manifest.model.get("name", "unknown model")),
        "dtype": manifest.model.get("dtype"),
        "machine": machine if isinstance(machine, dict) else {},
        "accelerators": manifest.fingerprint.get("accelerators"),
        "revision": manifest.git.get("revision"),
        "dirty": manifest.git.get("dirty"),
        "notes": manifest.notes,
    }


def provenance(manifest: Manifest) -> list[Record]:
    """Groups of label and value, all as text: everything that a reader may need before trusting or repeating a run."""
    model = {key: value for key, value in manifest.model.items() if key != "read_bytes"}
    run = {
        "run": manifest.run_id,
        "command": " ".join(manifest.command),
        "status": manifest.status,
        "start": manifest.start,
        "end": manifest.end,
        "failed turns": manifest.num_failed,
        "config hash": manifest.config_hash,
        "offline search, seconds": manifest.offline_search_s,
        "git": manifest.git,
        "notes": manifest.notes,
    }
    groups = {
        "Run": run,
        "Model": model,
        "Machine and kernels": manifest.fingerprint,
        "Conditions at the start": manifest.conditions,
        "Versions": manifest.versions,
        "Configuration": manifest.config,
    }
    return [{"name": name, "pairs": list(_flat(group, ""))} for name, group in groups.items() if group]


def _flat(node: Any, name: str) -> Iterable[tuple[str, str]]:
    """Leaves with their dotted names; lists of plain values are one leaf."""
    if isinstance(node, Mapping) and node:
        for key, child in node.items():
            yield from _flat(child, ".".join(part for part in (name, str(key)) if part))
    elif isinstance(node, list) and node:
        yield name, ", ".join(map(str, node))
    else:
        yield name, "none" if node is None or node in ({}, []) else str(node)
