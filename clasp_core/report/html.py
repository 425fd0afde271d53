"""`report html RUN`: one HTML file of a run that opens anywhere, without a network and without a server."""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from clasp_core.errors import UserError
from clasp_core.report.payload import by_question, page_record, question_record
from clasp_core.report.runs import Run, load
from clasp_core.store import read_texts, replace_file

FILE_NAME = "report.html"
SCRIPTS = ("text.js", "charts.js", "questions.js", "page.js")


def add_to(commands: Any) -> None:
    """The sub-command `html`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "html", help="a page of a run, in one file", description=__doc__
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders that hold them")
    parser.add_argument(
        "--out", metavar="FILE", help=f"the page of a single run; {FILE_NAME} in its folder if not given"
    )
    parser.set_defaults(call=write_pages)


def write_pages(arguments: argparse.Namespace) -> None:
    """Write the page of each run and print where it lies."""
    runs = load(arguments.runs)
    if arguments.out and len(runs) > 1:
        raise UserError(f"--out names one file, and {len(runs)} runs were found; name one run, or leave --out away")
    for run in runs:
        path = Path(arguments.out) if arguments.out else run.folder / FILE_NAME
        write(path, page(run))
        print(os.path.relpath(path))


def write(path: Path, text: str) -> None:
    """Put the page in place whole; raises UserError where it cannot lie there."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"cannot write {path}: it is no file in an existing folder; choose another --out")
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another --out") from error


def page(run: Run) -> str:
    """The whole page. Everything from the run goes in as data; nothing of it is ever read as markup or script."""
    texts = read_texts(run.folder)
    data = [script_data("page-data", page_record(run, texts))]
    for place, (key, rows) in enumerate(by_question(run.rows).items()):
        data.append(script_data(f"question-{place}", question_record(run, key, rows, texts)))
    style = _part("page.css")
    script = "".join(_part(name) for name in SCRIPTS)
    parts = {
        "title": html.escape(f"{run.model}, {run.manifest.run_id}"),
        "policy": f"default-src 'none'; img-src data:; style-src {_allowed(style)}; script-src {_allowed(script)}",
        "style": style,
        "script": script,
        "data": "\n".join(data),
    }
    return _filled(_part("page.html"), parts)


def script_data(name: str, value: Mapping[str, Any]) -> str:
    """A block of data in the page. Angle brackets and ampersands are written as escapes, as is all beyond ASCII."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with its `{{name}}`s replaced in one pass, so that what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _allowed(content: str) -> str:
    """The source expression of a Content-Security-Policy for one inline block: its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return resources.files("clasp_core.report").joinpath("page", name).read_text(encoding="utf-8")
