"""What all figures share: their style, a page with title and caption, and the files they become."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clasp_core.errors import UserError
from clasp_core.provenance import commit_of
from clasp_core.report.runs import Run

STYLE = Path(__file__).parent / "clasp.mplstyle"
WIDTH = 6.3
"""Inches: the text width of a page."""
LEGEND = 0.3
"""Inches that a legend for all panels takes."""
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F",
)  # fmt: skip
"""Okabe and Ito's colours, and a grey."""


@dataclass(frozen=True, slots=True, repr=False)
class Plot:
    """A drawn figure, and the numbers that are in it, one mapping a line."""

    figure: Figure
    data: list[dict[str, Any]]

    def save(self, folder: Path, name: str) -> list[Path]:
        """`name.pdf`, `.png` and `.csv`; UserError where the folder cannot be written."""
        paths = [folder / f"{name}.{ending}" for ending in ("pdf", "png", "csv")]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with styled():
                self.figure.savefig(paths[0], metadata={"CreationDate": None})
                self.figure.savefig(paths[1])
            paths[2].write_text(self.csv(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}; choose another folder with --out") from error
        return paths

    def csv(self) -> str:
        """The numbers as a table; unknown ones are empty."""
        text = io.StringIO()
        columns = list(dict.fromkeys(key for line in self.data for key in line))
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.data)
        return text.getvalue()

    def __repr__(self) -> str:
        return f"a figure of {len(self.data)} lines of data"

    def _repr_png_(self) -> bytes:
        """How a notebook shows it."""
        image = io.BytesIO()
        with styled():
            self.figure.savefig(image, format="png", dpi=110)
        return image.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Our style over matplotlib's defaults, whatever the user's own settings are; they come back afterwards."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def page(
    title: str, caption: str, height: float, rows: int = 1, columns: int = 1, *, legend: bool = False, **axes: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of text width with its axes, `height` inches without the caption, which stands below, wrapped."""
    lines = textwrap.wrap(caption, 112)
    below = 0.12 * len(lines) + 0.1
    whole, room = height + below, below + (LEGEND if legend else 0.0)
    figure = Figure(figsize=(WIDTH, whole))
    figure.set_layout_engine("constrained", rect=(0, room / whole, 1, 1 - room / whole))
    figure.suptitle(title, x=0.005, ha="left", fontsize=10, fontweight="bold")
    figure.text(0.005, (below - 0.06) / whole, "\n".join(lines), ha="left", va="top", fontsize=7, color="#333333")
    return figure, [list(line) for line in figure.subplots(rows, columns, squeeze=False, **axes)]


def legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend for all panels in the room that `page(legend=True)` has left above the caption."""
    engine = figure.get_layout_engine()
    assert engine is not None
    bottom = engine.get()["rect"][1] - LEGEND / figure.get_figheight()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, bottom), ncols=len(labels))


def origin(runs: Sequence[Run]) -> str:
    """Model, precision, machine and runs of a figure, for its caption."""
    labels = dict.fromkeys(f"{run.manifest.model['label']}, {run.manifest.model['dtype']}" for run in runs)
    machines = dict.fromkeys(run.machine for run in runs)
    temperatures = dict.fromkeys("greedy" if run.greedy else f"temperature {run.temperature:g}" for run in runs)
    commits = dict.fromkeys(commit_of(run.manifest.git) for run in runs)
    ids = sorted({run.manifest.run_id for run in runs})
    which = ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]} ({len(ids)} runs)"
    return (
        f"Model: {'; '.join(labels)}. Machine: {', '.join(machines)}; {', '.join(temperatures)}. Rows: {which}, commit "
        f"{', '.join(commits)}."
    )


def cycle(axes: Axes) -> Iterator[dict[str, Any]]:
    """Colour, line style and marker for one series after the other, and from the start again."""
    styles = list(matplotlib.rcParams["axes.prop_cycle"])
    while True:
        yield from styles
