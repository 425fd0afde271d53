"""Executing the notebooks on stored rows, so that equal rows give equal files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clasp_core.errors import UserError
from clasp_core.report.tabulate import write

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600


def execute(path: Path, results: Path) -> bool:
    """Run a notebook on the rows below `results` and keep its outputs in it; whether the file has changed.

    Neither the time nor the kernel's version is written, so that what has not changed leaves no difference. Raises
    UserError without nbclient, for a file that is no notebook, and for a cell that fails; the file is as before then.
    """
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError
        from traitlets.config import Config
    except ImportError as error:
        raise UserError(f"{error.name} is not installed; pip install -e '.[dev]' brings what notebooks need") from error
    try:
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"{path} is no notebook ({type(error).__name__}: {why}); restore it") from error
    about = dict(notebook.metadata)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        record_timing=False,
        resources=_in(ROOT),
        config=Config(KernelManager={"transport": "ipc"}),
    )
    try:
        client.execute(env={**os.environ, "CLASP_RESULTS": str(results.resolve())})
    except CellExecutionError as error:
        raise UserError(f"{path} failed: {error.ename}: {error.evalue}; the file is as before") from error
    notebook.metadata = nbformat.from_dict(about)
    after = f"{nbformat.writes(notebook)}\n"
    if after == before:
        return False
    write(path, after)
    return True


def _in(folder: Path) -> Mapping[str, Any]:
    """Where the kernel starts: the checkout, which the notebooks look for from there upwards."""
    return {"metadata": {"path": str(folder)}}
