"""What a run's manifest says before the first turn: settings, hashes, machine, and what of it changes no row."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clasp_core import provenance
from clasp_core.checkpoint import LoadedModel
from clasp_core.drafting import Described, SearchedOffline
from clasp_core.entry.keys import REPOSITORY
from clasp_core.plan import Method
from clasp_core.prompting import Prompter
from clasp_core.records import Manifest, Question
from clasp_core.store import new_run_id

BUSY_CORES = 0.4
"""More than that in use by others before a run starts is worth a note."""

PLACES = ("path", "gguf", "cache_dir", "root")
"""Keys that say where a file lies; the questions' and the model's own hashes say what it is."""

SKIP_SET = "skip_set"
"""A method's key that names a file (whose hash then counts, and not its place) or spells the set out."""


def new_manifest(
    config: dict[str, Any],
    model: LoadedModel,
    prompter: Prompter,
    questions: Sequence[Question],
    methods: Mapping[str, Method],
    reference: str | None,
) -> Manifest:
    """Everything a reader needs before trusting or pairing the rows."""
    info = {**model.info, "read_bytes": model.target.read_bytes()}
    asked = hashlib.sha256(json.dumps([asdict(q) for q in questions], sort_keys=True).encode()).hexdigest()
    settings = {**config, "questions_sha256": asked, "template_sha256": prompter.template_sha256}
    settings["skip_sets_sha256"] = skip_sets_sha256(config["method"])
    told = ("fingerprint", "dtype", "device_map", "attention", "engine", "cuda_graphs")
    same = {key: info[key] for key in told if key in info}
    conditions = provenance.conditions()
    return Manifest(
        run_id=new_run_id(),
        status="running",
        reference=reference,
        methods=list(methods),
        config=settings,
        config_hash=provenance.config_hash(settings, not_in_hash(config)),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        git=provenance.git_state(REPOSITORY),
        versions=provenance.package_versions(),
        fingerprint=provenance.fingerprint({"model": same, "template_sha256": prompter.template_sha256}),
        model=info,
        start=now(),
        conditions=conditions,
        notes=[*warnings_about(conditions), *notes_on(model.info)],
    )


def with_described(manifest: Manifest, methods: Mapping[str, Method], ignored: Sequence[str]) -> Manifest:
    """The manifest with what decides the rows beside the configuration (a draft model's weights), hash included."""
    parts = {name: m.describe() for name, m in methods.items() if isinstance(m, Described)}
    if not parts:
        return manifest
    settings = {**manifest.config, "described": parts}
    return replace(manifest, config=settings, config_hash=provenance.config_hash(settings, ignored))


def offline_search_s(methods: Mapping[str, Method]) -> dict[str, float]:
    """What the methods' skip sets took to find, where they come from an offline search."""
    found = {name: m.offline_search_s() for name, m in methods.items() if isinstance(m, SearchedOffline)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def warnings_about(conditions: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the machine's state; two torch threads beside a busy process slow down fiftyfold."""
    busy = conditions["num_busy_cores"]
    if busy < BUSY_CORES:
        return []
    return [f"{busy:.1f} cores were busy with other work at the start: times are disturbed, ratios less so"]


def notes_on(info: Mapping[str, Any]) -> list[str]:
    """What a reader must know of how the model runs."""
    graphs = str(info.get("cuda_graphs", "on"))
    return [] if graphs == "on" else [f"CUDA graphs are {graphs}; small passes wait for the host"]


def skip_sets_sha256(nodes: Mapping[str, Any]) -> dict[str, str | None]:
    """Hashes of the files from which methods read their skip sets, by method; null where one cannot be read."""
    paths = {name: Path(node[SKIP_SET]) for name, node in nodes.items() if isinstance(node.get(SKIP_SET), str)}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if os.access(path, os.R_OK) and path.is_file() else None
        for name, path in paths.items()
    }


def not_in_hash(config: Mapping[str, Any]) -> list[str]:
    """Dotted keys that change no row: where things lie, what is resumed, what is kept beside, and who is told."""

    def places(node: Mapping[str, Any], above: str) -> list[str]:
        below = [
            key
            for name, child in node.items()
            if isinstance(child, Mapping)
            for key in places(child, f"{above}{name}.")
        ]
        here = [name for name in node if name in PLACES or (name == SKIP_SET and isinstance(node[name], str))]
        return below + [f"{above}{name}" for name in here]

    beside = ["search", "analysis", "experiment", "store_text", "tracker"]
    return ["resume", "results_dir", *beside, *places(config, "")]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
