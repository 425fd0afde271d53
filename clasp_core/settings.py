"""Values of a run's configuration that its types allow and no run can use; refused before anything is built."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clasp_core.errors import UserError

NO_NAME = re.compile(r"null|true|false|[-+.\d]+", re.IGNORECASE)
"""What Hydra reads as something else than a text."""


def check_settings(config: Mapping[str, Any]) -> None:
    """Refuse numbers that are none (`nan`, `inf`) wherever they stand, and an empty place for results."""
    for key, number in non_finite(config, ""):
        raise UserError(f"{key} is {number}; it must be a finite number")
    if not config["results_dir"].strip():
        raise UserError(f"results_dir is {config['results_dir']!r}; it must name a folder, such as results_dir=results")


def non_finite(node: Any, key: str) -> Iterator[tuple[str, float]]:
    """Dotted keys and values of the floats at or below a node that are infinite or not a number."""
    if isinstance(node, float) and not math.isfinite(node):
        yield key, node
    elif isinstance(node, Mapping):
        for name, child in node.items():
            yield from non_finite(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, Sequence) and not isinstance(node, str):
        for child in node:
            yield from non_finite(child, key)


def check_choices(words: Sequence[str], groups: Sequence[str]) -> None:
    """Refuse a choice that is no name (`model=null`, `model=3`) or is made twice (`method=[clasp,clasp]`).

    A configuration shows neither any more: the first fails while it is composed, the second is merged into one.
    """
    for group, _, value in (word.partition("=") for word in words):
        if group in groups:
            in_list = re.fullmatch(r"\[([^\[\]]*)\]", value)
            names = [name.strip(" '\"") for name in (in_list[1] if in_list else value).split(",")]
            if no_name := [name for name in names if NO_NAME.fullmatch(name)]:
                raise UserError(f"{group}={no_name[0]} is no choice; name a file of conf/{group}/, without its ending")
            if in_list and (twice := [name for name in names if names.count(name) > 1]):
                raise UserError(f"{group}={value} names {twice[0]} twice; name each choice once")
