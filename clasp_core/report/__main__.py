"""`python -m clasp_core.report COMMAND ...`: what stored runs say. `--help` lists the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from clasp_core.errors import UserError
from clasp_core.report import (
    check,
    compare,
    figures,
    html,
    ladders,
    losslessness,
    probe,
    regenerate,
    table1,
    workspace,
)

COMMANDS: tuple[ModuleType, ...] = (
    table1, check, ladders, losslessness, compare, probe, figures, html, workspace, regenerate,
)  # fmt: skip
"""Modules with `add_to(commands)`: one argparse sub-command each, whose `call` takes the parsed arguments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake ends in one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m clasp_core.report", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_to(commands)
    chosen = parser.parse_args(arguments)
    try:
        chosen.call(chosen)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
