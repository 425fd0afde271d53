"""What git knows below `results/`: tests and points compare with that, and with none of the user's own runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def files(folder: Path = RESULTS) -> list[Path]:
    """The committed files at or below a folder that are there, by name; all of them where this is no checkout."""
    done = subprocess.run(["git", "ls-files", "--", str(folder)], cwd=ROOT, capture_output=True, text=True)
    known: Iterable[Path] = folder.rglob("*")
    if done.returncode == 0:
        known = (ROOT / line for line in done.stdout.splitlines())
    return sorted(path for path in known if path.is_file())


def runs(model: str) -> list[Path]:
    """The folders of a model's committed runs, the newest last."""
    return [path.parent for path in files() if path.name == "rows.jsonl" and path.parent.parent.name == model]
