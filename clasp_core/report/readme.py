"""The measured part of a README: the table and the picture of `make demo`, from the rows of that run."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from clasp_core.errors import UserError
from clasp_core.provenance import commit_of
from clasp_core.report.printing import render
from clasp_core.report.runs import Run
from clasp_core.report.summary import OVERALL
from clasp_core.report.tabulate import number, write

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
METHOD = "clasp"
PICTURE = "demo.svg"
WIDTH = 105
"""Columns of the picture."""


def demo(runs: Sequence[Run]) -> Run | None:
    """The latest whole and greedy run of CLaSp alone beside a reference, on our own questions and in no experiment."""
    found = [
        run
        for run in runs
        if run.manifest.status == "ok"
        and run.greedy
        and run.methods == [METHOD]
        and run.reference is not None
        and run.question_files == ["sample"]
        and all(run.manifest.config.get(key) is None for key in ("experiment", "limit"))
        and run.manifest.config["method"][METHOD]["skip_ratio"] is not None
        and not run.manifest.fingerprint.get("accelerators")
    ]
    return max(found, key=lambda run: run.manifest.start, default=None)


def rewrite(path: Path, run: Run, out: Path) -> list[Path]:
    """Put the run's table between the marks of a README and its picture into `out`; the files that were written.

    Raises UserError for a file without the marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name another --readme") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{path} lacks the lines {BEGIN} and {END}, between which the table goes; add them")
    summary = run.summary()
    picture = out / PICTURE
    write(picture, drawn(run, summary))
    write(path, f"{before}{BEGIN}\n{measured(run, summary, os.path.relpath(picture, path.parent))}{END}{after}")
    return [path, picture]


def drawn(run: Run, summary: Mapping[str, Any]) -> str:
    """The printed summary as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(f"model: {run.manifest.model['label']}", highlight=False)
    render(summary, console)
    return console.export_svg(title=_command(run))


def measured(run: Run, summary: Mapping[str, Any], picture: str) -> str:
    """Picture, caption, table and ladder as Markdown."""
    scopes = [*summary["tasks"], OVERALL]
    reference, method = summary["cells"][run.reference], summary["cells"][METHOD]
    head = "task | n | tokens | emitted per round | acceptance | AR tok/s | CLaSp tok/s | speed-up [95 %] | grade"
    lines = [_line(scope, reference[scope], method[scope]) for scope in scopes]
    rule = "|".join(["---"] * (head.count("|") + 1))
    return (
        f"![The tables of `{_command(run)}`]({picture})\n\n{_caption(run, method[OVERALL])}\n\n"
        f"| {head} |\n|{rule}|\n{''.join(lines)}\n{_where_it_went(summary['ladders'][METHOD][OVERALL])}\n"
    )


def _command(run: Run) -> str:
    return f"make demo TOKENS={run.manifest.config['generation']['max_new_tokens']}"


def _caption(run: Run, overall: Mapping[str, Any]) -> str:
    manifest = run.manifest
    machine = manifest.fingerprint["machine"]
    options, generation = manifest.config["method"][METHOD], manifest.config["generation"]
    return (
        f"CLaSp on `{run.model}` against AR by the same loop: {options['skip_ratio']:.0%} of the layers skipped, "
        f"greedy, {manifest.model['dtype']}, {generation['max_new_tokens']} tokens a turn, our "
        f"{overall['num_questions']} questions. {machine['cpu']}, {machine['num_cores']} cores, no GPU, torch "
        f"{manifest.versions['torch']}, commit {commit_of(manifest.git)}, "
        f"{manifest.start[:10]}; the rows are run `{manifest.run_id}` below `results/`."
    )


def _line(scope: str, reference: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    total = method["speedup"]["paired_total"]
    cells = (
        scope,
        str(method["num_questions"]),
        str(method["num_tokens"]),
        number(method["mean_emitted_per_round"]["rounds"]),
        number(method["acceptance_rate"]["rounds"], 3),
        number(reference["end_to_end_tokens_per_s"], 1),
        number(method["end_to_end_tokens_per_s"], 1),
        f"{number(total['value'])} [{number(total['low'])}, {number(total['high'])}]",
        method["grade"]["worst"],
    )
    return f"| {' | '.join(cells)} |\n"


def _where_it_went(ladder: Mapping[str, Any]) -> str:
    """The ladder in one sentence."""
    return (
        f"Where it went: the bytes would allow {number(ladder['ceiling'])}; not every token can be drafted, "
        f"{number(ladder['oracle'])}; rejected drafts, {number(ladder['draft'])}; verification passes that cost "
        f"{number(ladder['v'])} tokens, {number(ladder['verify'])}; the search for layers, {number(ladder['search'])}; "
        f"the host, {number(ladder['measured'])} measured over decode time."
    )
