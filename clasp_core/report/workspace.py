"""`report wandb GROUP_OR_RUNS...`: the runs of a group side by side, as files and as a report on Weights & Biases.

The files (Markdown and CSV) are made from the run folders alone. The W&B report needs the extra `report`
(`wandb-workspaces`); without a key or a network its specification is written beside the files and saved nowhere else.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clasp_core.errors import UserError
from clasp_core.provenance import slug
from clasp_core.report import comparison
from clasp_core.report.comparison import Comparison
from clasp_core.report.runs import Run, load
from clasp_core.tracking import WandB, choose_mode

SPEC = "workspace.json"


def add_to(commands: Any) -> None:
    """The command `wandb`."""
    command = commands.add_parser("wandb", help="compare the runs of a group: Markdown, CSV and a W&B report")
    command.add_argument("runs", nargs="+", metavar="GROUP_OR_RUN", help="a group's name, or run folders")
    command.add_argument("--results", default="results", metavar="DIR", help="where a group's runs are looked for")
    command.add_argument("--out", metavar="DIR", help="default: DIR/comparisons/<group or number of runs>")
    command.add_argument("--force", action="store_true", help="compare in spite of other fingerprints, and say so")
    command.add_argument("--offline", action="store_true", help="save nothing on the server")
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Write the comparison, then offer it to W&B; the last line printed is the folder."""
    title, runs = found(arguments.runs, arguments.results)
    compared = comparison.compare(title, runs, arguments.force)
    if not compared.entries:
        raise UserError(f"none of the {len(runs)} runs of {title} ended well, so there is nothing to compare")
    text = comparison.markdown(compared)
    folder = Path(arguments.out or Path(arguments.results) / "comparisons" / slug(title))
    write(folder, text, compared)
    print(text)
    print(offered(compared, text, folder, arguments.offline), file=sys.stderr)
    print(folder)


def found(named: Sequence[str], results: str) -> tuple[str, list[Run]]:
    """A title and the runs: folders where they exist, else one group's runs under `results`."""
    paths = [name for name in named if Path(name).is_dir()]
    groups = [name for name in named if name not in paths]
    if not groups:
        runs = load(paths)
        return (Path(paths[0]).resolve().name if len(paths) == 1 else f"{len(runs)} runs"), runs
    if len(named) > 1:
        raise UserError(f"{groups[0]!r} is no folder; name run folders, or one group alone")
    everything = load([results])
    runs = [run for run in everything if group_of(run) == groups[0]]
    if not runs:
        known = sorted({group for run in everything if (group := group_of(run))})
        raise UserError(f"no run under {results} is of group {groups[0]!r}; groups there: {', '.join(known) or 'none'}")
    return groups[0], runs


def group_of(run: Run) -> str | None:
    """The group that a run was tracked under."""
    group = _tracked(run).get("group")
    return None if group is None else str(group)


def write(folder: Path, text: str, compared: Comparison) -> None:
    """`comparison.md` and one CSV per table."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comparison.md").write_text(text, encoding="utf-8")
        for name, table in (
            ("runs", comparison.run_table(compared)),
            ("estimators", comparison.estimator_table(compared)),
            ("ladder", comparison.ladder_table(compared)),
            ("losslessness", comparison.lossless_table(compared)),
            ("config", comparison.config_table(compared)),
        ):
            (folder / f"{name}.csv").write_text(comparison.csv_text(table), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; choose another place with --out") from error


# The report on Weights & Biases


def offered(compared: Comparison, text: str, folder: Path, offline: bool) -> str:
    """Save the report where W&B is reachable, else write what would have been saved; says which, in one line."""
    tracked = next((each for entry in compared.entries if (each := _tracked(entry.run)).get("project")), None)
    if tracked is None:
        return "W&B report: not made, none of these runs was tracked; run with tracker=wandb"
    try:
        return f"W&B report: {_saved(compared, text, folder, _options(tracked, offline))}"
    except ImportError as error:
        return f"W&B report: not made, {error.name} is missing; pip install 'clasp-bench[report]'"
    except Exception as error:
        return f"W&B report: not made ({' '.join(repr(error).split())}); the files are complete"


def _saved(compared: Comparison, text: str, folder: Path, options: WandB) -> str:
    """The report's address, or why there is none and where its specification lies."""
    import wandb

    reports = _reports()
    mode, why = choose_mode(options, wandb.setup().settings) if options.mode == "auto" else ("offline", "as asked")
    if mode == "online":
        report = build(reports, compared, text, options.project, options.entity, online=True)
        report.save()
        return str(report.url)
    spec = specification(build(reports, compared, text, options.project, options.entity, online=False))
    (folder / SPEC).write_text(json.dumps(spec, indent=2) + "\n", encoding="utf-8")
    return f"not saved on a server ({why}); its specification is {folder / SPEC}"


def _reports() -> Any:
    """The package of the extra `report`, whose import warns of its own outdated validators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb_workspaces.reports.v2 as reports
    return reports


def build(reports: Any, compared: Comparison, text: str, project: str, entity: str | None, online: bool) -> Any:
    """The report: our own tables as text, and W&B's live view of the same runs; offline it names no account."""
    ids = ", ".join(f"'{entry.run.manifest.run_id}'" for entry in compared.entries)
    place = {"project": project, **({"entity": entity} if entity else {})} if online else {}
    runset = reports.Runset(name=compared.title, filters=f"Config('run/run_id') in [{ids}]", **place)
    names = list(dict.fromkeys(name for entry in compared.entries for name in entry.summary["ladders"]))
    panels = [
        reports.LinePlot(title="speed-up so far", x="Step", y=[f"running/{name}/speedup" for name in names]),
        reports.LinePlot(title="acceptance so far", x="Step", y=[f"running/{name}/acceptance_rate" for name in names]),
        reports.BarPlot(title="paired_total, all tasks", metrics=[f"overall/{name}/paired_total" for name in names]),
        reports.BarPlot(title="questions (n)", metrics=[f"overall/{name}/paired_total_n" for name in names]),
        reports.RunComparer(diff_only="split"),
    ]
    account = {"entity": entity} if entity else {} if online else {"entity": ""}
    blocks = [reports.MarkdownBlock(text=text), reports.PanelGrid(runsets=[runset], panels=panels)]
    return reports.Report(
        project=project, title=f"CLaSp: {compared.title}"[:128], width="fluid", blocks=blocks, **account
    )


def specification(report: Any) -> dict[str, Any]:
    """What `save` would send, after a round trip through the package's own reader, which refuses a malformed one."""
    model = report._to_model()
    spec: dict[str, Any] = json.loads(model.model_dump_json(by_alias=True, exclude_none=True))
    type(model).model_validate(spec)
    type(report)._from_model(model)
    return spec


def _options(tracked: dict[str, Any], offline: bool) -> WandB:
    known = {name: tracked[name] for name in WandB.__dataclass_fields__}
    return WandB(**{**known, "mode": "offline" if offline else "auto"})


def _tracked(run: Run) -> dict[str, Any]:
    """The options of a run's tracker; those of `tracker=none` and of older runs are empty."""
    options: dict[str, Any] = run.manifest.config.get("tracker") or {}
    return options
