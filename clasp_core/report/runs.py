"""Finding and reading run folders: what every command of the report starts from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clasp_core.errors import UserError
from clasp_core.metrics import counting, losses, pairing
from clasp_core.provenance import machine_slug
from clasp_core.records import Manifest, TurnRecord
from clasp_core.report.summary import summarise
from clasp_core.store import MANIFEST, read_run


@dataclass(frozen=True, slots=True)
class Run:
    """One stored run: its folder, its manifest and the rows that count."""

    folder: Path
    manifest: Manifest
    rows: tuple[TurnRecord, ...]

    @property
    def model(self) -> str:
        """The model's name in the configuration."""
        return str(self.manifest.model.get("name", "?"))

    @property
    def short_id(self) -> str:
        """The end of the run's name, which tells runs of one table apart."""
        return self.manifest.run_id.rpartition("-")[2]

    @property
    def machine(self) -> str:
        """The machine's short name, such as `xeon-2c`, from the fingerprint; else from where the folder lies."""
        found = self.manifest.fingerprint
        if not isinstance(found.get("machine"), dict):
            return self.folder.parent.parent.name
        return machine_slug(found["machine"], found.get("accelerators"))

    @property
    def temperature(self) -> float:
        """The temperature that every row was generated at."""
        return float(self.manifest.config["generation"]["temperature"])

    @property
    def greedy(self) -> bool:
        """Whether the answers are deterministic, so that ids may be compared."""
        return self.temperature == 0

    @property
    def reference(self) -> str | None:
        """The method that the others are measured against."""
        return self.manifest.reference

    @property
    def methods(self) -> list[str]:
        """The methods beside the reference, in the order of the run."""
        return [name for name in self.manifest.methods if name != self.reference]

    @property
    def tasks(self) -> list[str]:
        """The tasks that have rows, in the order of the run."""
        return list(dict.fromkeys(row.task for row in self.rows))

    def of(self, method: str | None) -> list[TurnRecord]:
        """The rows of one method."""
        return [row for row in self.rows if row.method == method]

    def named(self, method: str) -> dict[str, str]:
        """The names that a table's line about one method begins with."""
        return {"run_id": self.manifest.run_id, "run": self.short_id, "model": self.model, "method": method}

    def used(self, method: str | None, task: str | None = None) -> list[TurnRecord]:
        """The method's finished rows of one task or all, on the turns that every method with an answer finished."""
        rows = [row for row in counting.finished(self.rows) if task in (None, row.task)]
        common = pairing.common_turns(rows, {row.method for row in rows})
        return [row for row in rows if row.method == method and row.pair in common]

    def c_bytes(self, method: str) -> float | None:
        """Bytes of a draft step over bytes of a target token; unknown where the manifest does not say."""
        read_bytes = self.manifest.model.get("read_bytes")
        return losses.c_bytes(self.of(method), read_bytes) if read_bytes else None

    @property
    def question_files(self) -> list[str]:
        """The names of the question files, such as `spec_bench` or `sample`; both have the same subtasks."""
        return [name for name in self.manifest.config.get("task", {}) if name != "subtasks"]

    @property
    def token_bytes(self) -> int | None:
        """Bytes of weights that one target token reads."""
        read_bytes = self.manifest.model.get("read_bytes")
        return losses.token_bytes(read_bytes) if read_bytes else None

    def summary(self) -> dict[str, Any]:
        """The summary of the rows, computed anew (seconds for a long run), as `summary.json` holds it."""
        names = self.manifest.methods
        read_bytes = self.manifest.model.get("read_bytes")
        offline_s = self.manifest.offline_search_s
        return summarise(self.rows, self.reference, names, self.greedy, read_bytes, offline_s)


def run_folders(path: str | Path) -> list[Path]:
    """The run folders at or below a path, known by their manifest and sorted by name, which starts with the time.

    Raises UserError where the path does not exist.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name a run folder or a results folder")
    return sorted({found.parent for found in path.rglob(MANIFEST)}, key=lambda folder: (folder.name, str(folder)))


def load(paths: Iterable[str | Path], at_least: int = 1) -> list[Run]:
    """The runs at or below the paths, each once, in order of time within a path.

    A run found below a path that cannot be read is skipped with a line on standard error; one that is named
    itself is an error. Raises UserError if fewer than `at_least` are readable.
    """
    folders: dict[Path, bool] = {}
    named = [Path(path) for path in paths]
    for path in named:
        for folder in run_folders(path):
            resolved = folder.resolve()
            folders[resolved] = folders.get(resolved, False) or resolved == path.resolve()
    runs = [run for folder, is_named in folders.items() if (run := _read(folder, is_named)) is not None]
    if len(runs) < at_least:
        where = ", ".join(map(str, named))
        raise UserError(
            f"{len(runs)} readable runs under {where}, {at_least} are needed; a run folder holds a {MANIFEST}"
        )
    return runs


def add_paths(command: argparse.ArgumentParser) -> None:
    """The arguments RUN... and --results, which `chosen` reads."""
    command.add_argument("runs", nargs="*", metavar="RUN", help="run folders, or folders that hold them")
    command.add_argument("--results", metavar="DIR", help="a folder with runs; `results` where nothing is named")


def chosen(arguments: argparse.Namespace, at_least: int = 1) -> list[Run]:
    """The runs that a command's arguments name; UserError for fewer than `at_least`."""
    named: Sequence[str] = [*arguments.runs, *([arguments.results] if arguments.results else [])]
    return load(named or ["results"], at_least)


def _read(folder: Path, is_named: bool) -> Run | None:
    try:
        manifest, rows = read_run(folder)
    except UserError as error:
        if is_named:
            raise
        print(f"skipped: {error}", file=sys.stderr)
        return None
    for note in manifest.notes:
        if "torn last line" in note:
            print(f"note: {folder}: {note}", file=sys.stderr)
    return Run(folder, manifest, tuple(rows))
