"""Points of the paper's figures that its text states as numbers (`data/paper/clasp_figures.csv`)."""

from __future__ import annotations

import csv
from pathlib import Path

POINTS = Path(__file__).resolve().parents[3] / "data" / "paper" / "clasp_figures.csv"


def points(figure: str) -> list[dict[str, str]]:
    """The stated points of one figure, as the file has them."""
    with POINTS.open(encoding="utf-8", newline="") as file:
        return [line for line in csv.DictReader(file) if line["figure"] == figure]
