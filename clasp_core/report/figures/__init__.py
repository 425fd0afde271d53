"""Figures from stored rows, one module each: `draw(runs)` and `NEEDS`, which says what rows it takes.

A new figure is a new file; modules with a leading underscore are shared parts.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clasp_core.errors import UserError
from clasp_core.report.figures._canvas import Plot, styled
from clasp_core.report.runs import Run, add_paths, chosen


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that is not drawn, and what rows it lacks."""

    name: str
    needs: str

    def __repr__(self) -> str:
        return f"{self.name}: no data, not drawn; it needs {self.needs}"


def names() -> list[str]:
    """All figures, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def figure(name: str, runs: Sequence[Run]) -> Plot | Missing:
    """One figure from the runs that ended well and have rows for it; `Missing` where none has.

    UserError for an unknown name.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names())}"
        raise UserError(f"unknown figure {name!r}; {hint}")
    module = importlib.import_module(f"{__name__}.{name}")
    with styled():
        plot: Plot | None = module.draw([run for run in runs if run.manifest.status == "ok"])
    return plot or Missing(name, module.NEEDS)


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command `figures`."""
    command = commands.add_parser("figures", help="the paper's figures and ours: PDF, PNG and the drawn data as CSV")
    add_paths(command)
    command.add_argument("--only", metavar="NAME", help=f"one of {', '.join(names())}")
    command.add_argument("--out", metavar="DIR", default="results/figures", help="where they go (%(default)s)")
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Draw all figures, or one, and print a line for each."""
    wanted = [arguments.only] if arguments.only else names()
    runs = chosen(arguments)
    for name in wanted:
        plot = figure(name, runs)
        if isinstance(plot, Missing) and arguments.only:
            raise UserError(str(plot))
        if isinstance(plot, Missing):
            print(plot)
        else:
            print(f"{name}: {', '.join(map(str, plot.save(Path(arguments.out), name)))}")
