"""The paper's numbers, and which of our names stand for which of the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pandas as pd

from clasp_core.errors import UserError
from clasp_core.report.summary import OVERALL
from clasp_core.tasks import SUBTASKS

TABLE1 = Path(__file__).resolve().parents[2] / "data" / "paper" / "clasp_table1.csv"

TASKS: Mapping[str, str] = MappingProxyType(
    {
        "mt_bench": "MT-Bench",
        "translation": "WMT14",
        "summarization": "CNN/DM",
        "qa": "NQ",
        "math_reasoning": "GSM8K",
        "rag": "DPR",
    }
)
"""Our subtask -> the data set that Spec-Bench draws it from, in the order of the paper's columns."""

MODELS: Mapping[str, str] = MappingProxyType(
    {"llama3-70b": "LLaMA-3-70B", "llama3-70b-instruct": "LLaMA-3-70B-Chat", "llama3-8b": "LLaMA-3-8B"}
)
"""Our configuration's model -> the paper's."""

METHODS: Mapping[str, str] = MappingProxyType({"self_sd": "Self-SD", "swift": "SWIFT", "clasp": "CLaSp"})
"""Our method -> the paper's, in the order of the paper's lines."""

TEMPERATURES = (0.0, 1.0)

QUESTIONS = "spec_bench"
"""The question file of the paper; numbers from other questions stand beside it for orientation only."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A published cell; tau is the mean number of accepted draft tokens per round (null: not printed)."""

    speedup: float
    tau: float | None


Key = tuple[float, str, str, str]


def table1(path: Path = TABLE1) -> dict[Key, Cell]:
    """Table 1 by temperature and our names of model, method and task (`overall` among them).

    Raises UserError where the file is missing or names something that has no name of ours.
    """
    try:
        frame = pd.read_csv(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; run the report from a checkout") from error
    ours = {theirs: name for names in (MODELS, METHODS) for name, theirs in names.items()}
    if unknown := (set(frame["model"]) | set(frame["method"])) - set(ours) | set(frame["task"]) - {*SUBTASKS, OVERALL}:
        raise UserError(f"{path} names {min(unknown)!r}, which has no name of ours; add it to report/paper.py")
    return {
        (float(line.temperature), ours[line.model], ours[line.method], line.task): Cell(
            float(line.speedup), None if pd.isna(line.tau) else float(line.tau)
        )
        for line in frame.itertuples(index=False)
    }
