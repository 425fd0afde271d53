"""`regenerate`: every figure, table and notebook and the README's table again, from the rows below a results folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clasp_core.errors import UserError
from clasp_core.report import benches, figures, ladders, losslessness, notebooks, probe, readme, table1
from clasp_core.report.figures import Missing
from clasp_core.report.runs import Run, load
from clasp_core.report.tabulate import Published, as_text, write

README = Path("README.md")

TABLES: Mapping[str, Callable[[Sequence[Run]], list[Published]]] = MappingProxyType(
    {
        "table1": lambda runs: table1.tables(runs, table1.Choice()),
        "ladder": ladders.tables,
        "losslessness": losslessness.tables,
    }
)


def add_to(commands: Any) -> None:
    """The command `regenerate`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "regenerate", help="every figure, table and notebook again, from stored rows"
    )
    command.add_argument("results", nargs="?", default="results", help="rows are below it (%(default)s)")
    command.add_argument("--out", metavar="DIR", help="figures/ and tables/ go there; RESULTS where it is not given")
    command.add_argument("--notebooks", metavar="DIR", default="notebooks", help="executed in place (%(default)s)")
    command.add_argument(
        "--readme", metavar="FILE", help="its table and picture are made again too; README.md where --out is not given"
    )
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Make all of them and print a line for each; the first that fails ends it."""
    results, folder = Path(arguments.results), Path(arguments.notebooks)
    if not (paths := sorted(folder.glob("*.ipynb"))):
        raise UserError(f"{folder} holds no notebook; name their folder with --notebooks")
    runs = load([results])
    for line in (*_figures(runs, _out(arguments)), *_tables(runs, _out(arguments))):
        print(line, flush=True)
    for path in paths:
        print(f"{path}: {'changed' if notebooks.execute(path, results) else 'as before'}", flush=True)
    if (file := _readme(arguments)) is not None and (run := readme.demo(runs)) is not None:
        print(", ".join(map(str, readme.rewrite(file, run, _out(arguments)))))


def _readme(arguments: argparse.Namespace) -> Path | None:
    """The file that is named, or the README here where all else goes to its own place too."""
    if arguments.readme is not None:
        return Path(arguments.readme)
    return README if arguments.out is None and README.is_file() else None


def _out(arguments: argparse.Namespace) -> Path:
    return Path(arguments.out or arguments.results)


def _figures(runs: Sequence[Run], out: Path) -> Iterator[str]:
    for name in figures.names():
        plot = figures.figure(name, runs)
        found = [plot] if isinstance(plot, Missing) else plot.save(out / "figures", name)
        yield ", ".join(map(str, found))


def _tables(runs: Sequence[Run], out: Path) -> Iterator[str]:
    """Each as Markdown; that of timed passes where there are some of the runs' machines."""
    made = {name: tables([run for run in runs if run.rows]) for name, tables in TABLES.items()}
    if (bench := benches.beside(run.folder for run in runs)) is not None:
        made["probe"] = probe.tables(bench)
    folder = out / "tables"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}; choose another folder with --out") from error
    for name, tables in made.items():
        write(folder / f"{name}.md", as_text(tables, "markdown"))
        yield str(folder / f"{name}.md")
