"""A table with its caption as text: for a terminal, CSV, Markdown and LaTeX. Frames in, one string out."""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from clasp_core.errors import UserError
from clasp_core.provenance import commit_of
from clasp_core.report.runs import Run
from clasp_core.store import replace_file

WIDE = 170
"""Columns of a terminal table where the output is no terminal."""
GAP = 2
"""Blanks between two columns of a terminal table."""


@dataclass(frozen=True, slots=True)
class Published:
    """One table as a person reads it and as a program does.

    `cells` holds text in reading order, `data` numbers with one observation a line; CSV is made of `data`, the
    other formats of `cells`. `num_labels` columns on the left are names, the others numbers.
    """

    title: str
    caption: str
    cells: pd.DataFrame
    data: pd.DataFrame
    num_labels: int
    notes: tuple[str, ...] = ()


# The command line


def add_output(command: argparse.ArgumentParser) -> None:
    """The arguments --format and --out, which `publish` reads."""
    command.add_argument("--format", choices=tuple(FORMATS), default="terminal", help="default: %(default)s")
    command.add_argument("--out", metavar="FILE", help="write there, in place of standard output")


def publish(tables: Sequence[Published], arguments: argparse.Namespace) -> None:
    """Print the tables, or write them to a file that holds all of them or is not touched."""
    text = as_text(tables, arguments.format)
    if arguments.out is None:
        sys.stdout.write(text)
        return
    write(Path(arguments.out), text)
    print(arguments.out)


def as_text(tables: Sequence[Published], form: str) -> str:
    """The tables one after the other in one of `FORMATS`, an empty line between them."""
    return "\n".join(FORMATS[form](table) for table in tables)


def write(path: Path, text: str) -> None:
    """Write or replace a file at once; UserError where its folder cannot be written."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another --out") from error


# Captions and cells


def provenance(runs: Iterable[Run]) -> str:
    """Where the numbers of a table come from: run, model, dtype, machine, commit and date of each run."""
    return " ".join(_origin(run) for run in runs) or "No run of ours is in it."


def _origin(run: Run) -> str:
    manifest = run.manifest
    label, dtype = manifest.model.get("label", run.model), manifest.model.get("dtype", "unknown dtype")
    state = "" if manifest.status == "ok" else f", status {manifest.status}"
    return (
        f"Run {manifest.run_id}: {run.model} ({label}), {dtype}, on {run.machine}, "
        f"commit {commit_of(manifest.git)}, {manifest.start[:10]}{state}."
    )


def number(value: float | None, digits: int = 2) -> str:
    """A number, or n/a where it is unknown."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as a percentage with one decimal, or n/a."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def span(low: float | None, high: float | None, digits: int = 2) -> str:
    """The two ends of an interval, or n/a where one question gave none."""
    return "n/a" if low is None or high is None else f"{low:.{digits}f}-{high:.{digits}f}"


# Formats


def _terminal(table: Published) -> str:
    """The table in blocks of columns that fit the width, each with the names on its left."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for index, block in enumerate(_blocks(table, width)):
        console.print(_rich_table(block, table.num_labels, "" if index else table.title))
    for text in (table.caption, *table.notes):
        console.print(Text(text))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def _rich_table(cells: pd.DataFrame, num_labels: int, title: str) -> RichTable:
    shown = RichTable(
        title=Text(title) if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for index, name in enumerate(cells.columns):
        shown.add_column(Text(str(name)), justify="left" if index < num_labels else "right", overflow="fold")
    for line in _lines(cells):
        shown.add_row(*map(Text, line))
    return shown


def _blocks(table: Published, width: int) -> list[pd.DataFrame]:
    """The columns of numbers cut into runs that fit beside the columns of names."""
    texts = [list(map(str, table.cells.columns)), *_lines(table.cells)]
    widths = [max(map(len, column)) + GAP for column in zip(*texts, strict=True)]
    names = list(range(table.num_labels))
    room = width - sum(widths[: table.num_labels])
    blocks: list[list[int]] = [[]]
    for index in range(table.num_labels, len(widths)):
        if blocks[-1] and sum(widths[i] for i in (*blocks[-1], index)) > room:
            blocks.append([])
        blocks[-1].append(index)
    return [table.cells.iloc[:, [*names, *block]] for block in blocks]


def _csv(table: Published) -> str:
    """The caption as `#` lines, then the numbers; read it with `pandas.read_csv(file, comment="#")`."""
    head = "".join(f"# {_one_line(text)}\n" for text in (f"{table.title}. {table.caption}", *table.notes))
    return head + str(table.data.to_csv(index=False, lineterminator="\n"))


def _markdown(table: Published) -> str:
    names = [_markdown_cell(str(name)) for name in table.cells.columns]
    rule = [":---" if index < table.num_labels else "---:" for index in range(len(names))]
    lines = [names, rule, *([_markdown_cell(cell) for cell in line] for line in _lines(table.cells))]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"- {_markdown_cell(note)}\n" for note in table.notes)
    caption = f"**{_markdown_cell(table.title)}.** {_markdown_cell(table.caption)}\n"
    return f"{caption}\n{body}" + (f"\n{notes}" if notes else "")


def _markdown_cell(text: str) -> str:
    marks = MappingProxyType({mark: f"\\{mark}" for mark in "\\|*_<>`"})
    return "".join(marks.get(character, character) for character in _one_line(text))


_LATEX_MARKS = MappingProxyType(
    {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}", "]": "{]}", '"': "''",
        **{mark: f"\\{mark}" for mark in "_%&#${}"},
    }
)  # fmt: skip


def _latex(table: Published) -> str:
    """A table environment that needs no package: brackets are braced, since `\\\\` takes `[...]` as an argument."""
    columns = "l" * table.num_labels + "r" * (len(table.cells.columns) - table.num_labels)
    names = _latex_line(map(str, table.cells.columns))
    body = "".join(_latex_line(line) for line in _lines(table.cells))
    notes = "".join(f"\\par {latex(note)}\n" for note in table.notes)
    return (
        "\\begin{table}[htbp]\n\\centering\n\\scriptsize\n\\setlength{\\tabcolsep}{2pt}\n"
        f"\\caption{{{latex(f'{table.title}. {table.caption}')}}}\n"
        f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{names}\\hline\n{body}\\hline\n\\end{{tabular}}\n"
        f"{notes}\\end{{table}}\n"
    )


def latex(text: str) -> str:
    """A text with every character that LaTeX reads as a command written out."""
    return "".join(_LATEX_MARKS.get(character, character) for character in _one_line(text))


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(map(latex, cells)) + " \\\\\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _lines(cells: pd.DataFrame) -> list[list[str]]:
    return [["" if pd.isna(cell) else str(cell) for cell in line] for line in cells.itertuples(index=False)]


FORMATS: Mapping[str, Callable[[Published], str]] = MappingProxyType(
    {"terminal": _terminal, "csv": _csv, "markdown": _markdown, "latex": _latex}
)
