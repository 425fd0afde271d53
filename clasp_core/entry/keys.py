"""The keys and choices of a command line: their types, where the files lie, and what a mistyped one is near to."""

from __future__ import annotations

import difflib
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf

REPOSITORY = Path(__file__).resolve().parents[2]
CONF = REPOSITORY / "conf"
GROUPS = ("model", "method", "task", "reference", "search", "analysis", "tracker")
CHOSEN = (*GROUPS, "debug", "experiment")
"""Every group that a command line chooses from."""


@dataclass
class GenerationSchema:
    """Types of `generation.*`."""

    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_k: int = MISSING
    top_p: float = MISSING


@dataclass
class Schema:
    """Types of the keys of every run; their values are in `conf/config.yaml`."""

    model: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    analysis: dict[str, Any] = field(default_factory=dict)
    experiment: str | None = MISSING
    debug: dict[str, Any] = field(default_factory=dict)
    generation: GenerationSchema = field(default_factory=GenerationSchema)
    limit: int | None = MISSING
    history: str = MISSING
    engine: str = MISSING
    seed: int = MISSING
    repeats: int = MISSING
    num_threads: int | None = MISSING
    warm_up_tokens: int = MISSING
    results_dir: str = MISSING
    resume: str | None = MISSING
    store_text: bool = MISSING


def register() -> None:
    """What the configuration files rely on: their types, and where the repository lies from the launch folder."""
    OmegaConf.register_new_resolver("token", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
    OmegaConf.register_new_resolver("repository", lambda: os.path.relpath(REPOSITORY), replace=True)
    OmegaConf.register_new_resolver("sweep", sweep, replace=True)
    OmegaConf.register_new_resolver("choices", listed_choices, replace=True)
    ConfigStore.instance().store(name="schema", node=Schema)


def listed_choices() -> str:
    """The groups and their files for `--help`; those that only others include (`_hub`) are left out."""
    return "\n".join(f"{group}: {', '.join(choices(group))}" for group in CHOSEN)


def sweep() -> str | None:
    """What the jobs of this sweep have in common and no other sweep has: the end of its folder's path."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return "_".join(Path(HydraConfig.get().sweep.dir).parts[-2:])


def explain(error: Exception) -> str:
    """One line for a mistake in the command: what is wrong and what is near it."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"unknown {group} {choice!r}{nearest(choice, choices(group) or error.options or [])}"
    text = str(error)
    if key := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        return explain_key((key[1] or key[2]).removeprefix("+"))
    if absent := re.search(r"Could not find '([^']+)'", text):
        return f"unknown choice {absent[1]!r}{nearest(absent[1], list(known_keys()))}"
    if override := re.search(r"Error merging override (\S+)", text):
        return f"{override[1]}: {str(error.__cause__).splitlines()[0]}"
    return " ".join(text.split())


def explain_key(name: str) -> str:
    """Which choice an unselected option belongs to, or what is near an unknown one."""
    if name in CHOSEN:
        return f"{name} takes the name of a choice: {', '.join(choices(name))}"
    places = known_keys()
    if choices_of := places.get(name):
        group = name.partition(".")[0]
        return (
            f"{name} belongs to {group}={' or '.join(sorted(choices_of))}, which is not selected; add it to the command"
        )
    return f"unknown key {name!r}{nearest(name, [*places, *CHOSEN])}"


def nearest(value: str, known: Sequence[str]) -> str:
    """The known names closest to a mistyped one, or all of them where none is close."""
    close = difflib.get_close_matches(value, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known are {', '.join(known)}" if len(known) <= 30 else "; see python run.py --help"


def choices(group: str) -> list[str]:
    """The files of a configuration group."""
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def known_keys() -> dict[str, set[str]]:
    """Dotted keys as an override names them, and the choices of their group that have them (none: always there)."""
    own = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    keys = {key: set[str]() for key in flatten(own, "") if not key.startswith(("defaults", "hydra"))}
    for path in (CONF / group / f"{choice}.yaml" for group in GROUPS for choice in choices(group)):
        group = path.parent.name
        prefix = f"{group}.{path.stem}." if group in ("method", "task") else f"{group}."
        for key in flatten(OmegaConf.to_container(OmegaConf.load(path), resolve=False), prefix):
            keys.setdefault(key, set()).add(path.stem)
    return keys


def flatten(node: Any, above: str) -> list[str]:
    """Dotted keys of a nested mapping, inner nodes included."""
    if not isinstance(node, Mapping):
        return []
    return [name for key, child in node.items() for name in (f"{above}{key}", *flatten(child, f"{above}{key}."))]
