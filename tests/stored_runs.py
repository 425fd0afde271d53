"""Run folders written from hand-made rows, for the tests of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clasp_core.records import Manifest, TurnRecord
from clasp_core.store import RunStore

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
FINGERPRINT: dict[str, Any] = {"machine": {"cpu": "Xeon", "num_cores": 2}, "accelerators": None, "torch": "2.13.0"}


def manifest(run_id: str, model: str, methods: Sequence[str], **changes: Any) -> Manifest:
    """A finished run's manifest; `temperature` and `questions` go into its configuration."""
    generation = {"max_new_tokens": 64, "temperature": changes.pop("temperature", 0.0), "top_k": 0, "top_p": 1.0}
    config = {"generation": generation, "task": {changes.pop("questions", "spec_bench"): {}, "subtasks": None}}
    values: dict[str, Any] = {
        "run_id": run_id, "status": "ok", "reference": "ar", "methods": list(methods), "config": config,
        "config_hash": "v1:0", "command": ["run.py"], "git": {"revision": "0123456789abcdef", "dirty": False},
        "versions": {}, "fingerprint": FINGERPRINT, "start": "2026-11-29T18:00:00Z",
        "model": {"name": model, "label": f"{model} & co_1 100%", "dtype": "float16"},
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def store(root: Path, rows: Sequence[TurnRecord], run_id: str = "run-1", model: str = "llama3-8b", **more: Any) -> Path:
    """The folder of a run that holds these rows, as a run writes it."""
    methods = list(dict.fromkeys(row.method for row in rows))
    with RunStore.create(root, "xeon-2c", model, manifest(run_id, model, methods, **more)) as folder:
        folder.append([replace(row, run_id=run_id, model=model) for row in rows])
        return folder.folder
