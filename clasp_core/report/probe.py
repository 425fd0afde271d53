"""`probe`: what single passes cost on a machine, from the newest file that `make bench` stored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, TypeAlias

import pandas as pd

from clasp_core.costs import BANDWIDTH_SHARE, COSTLY_ROW
from clasp_core.errors import UserError
from clasp_core.report import benches
from clasp_core.report.benches import Bench, Cases, Setting, numbered
from clasp_core.report.tabulate import Published, add_output, number, percent, publish
from clasp_core.timings import READ, STEP, Timing

Datum: TypeAlias = dict[str, Any]

NAMES = ("model", "dtype", "engine", "context")


def add_to(commands: Any) -> None:
    """The command `probe`."""
    command: argparse.ArgumentParser = commands.add_parser("probe", help="what single passes cost, from `make bench`")
    help_text = "a folder with timed passes somewhere below, or a file of them (%(default)s)"
    command.add_argument("path", nargs="?", metavar="RESULTS", default="results", help=help_text)
    add_output(command)
    command.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> None:
    """Print or write the tables; UserError where nothing was timed."""
    bench = benches.newest(arguments.path)
    if bench is None:
        raise UserError(f"no timed passes below {arguments.path}; `make bench` or `make gpu-check` stores some")
    publish(tables(bench), arguments)


def tables(bench: Bench) -> list[Published]:
    """A step and its regime, verification by width, draft steps by share of skipped layers, the programme; whole
    answers where some were timed."""
    passes = [_steps(bench), _verification(bench), _drafts(bench), _programmes(bench)]
    return [*passes, _answers(bench)] if bench.turns else passes


def _steps(bench: Bench) -> Published:
    data = [_named(setting) | _step(cases) for setting, cases in bench.cases.items()]
    texts = {
        "AR ms": _written("step_s", lambda seconds: number(1e3 * seconds)),
        "AR GB/s": _written("bytes_per_s", _gigabytes),
        "read GB/s": _written("read_bytes_per_s", _gigabytes),
        "of reading": _written("reading_share", percent),
        "row": _written("extra_row", lambda row: number(row, 3)),
        "prefill": _written("prefill", number),
        "regime": _written("regime", str),
    }
    return Published(
        title="A step of the target, and what bounds it",
        caption=(
            "AR: one token by the whole model, behind so many tokens of context; GB/s: bytes of weights, keys and "
            "values that it must read (10^9 a second), beside reading a large buffer; of reading: their ratio, median "
            "over turns; row: one more verified row, prefill: the context once more, both in AR steps. Regime: a row "
            f"of {COSTLY_ROW:g} or more is compute-bound verification; else {BANDWIDTH_SHARE:.0%} of reading or more "
            f"is bandwidth-bound, and less launch-bound. {bench.origin}"
        ),
        cells=_frame(data, texts),
        data=pd.DataFrame(data),
        num_labels=len(NAMES),
    )


def _step(cases: Cases) -> Datum:
    step, read = cases[STEP], cases[READ]
    return {
        "step_s": median(step.seconds),
        "bytes_per_s": _speed(step),
        "read_bytes_per_s": _speed(read),
        "reading_share": benches.reading_share(cases),
        "extra_row": benches.extra_row(cases),
        "prefill": cases["prefill"].over(step) if "prefill" in cases else None,
        "regime": benches.regime(cases),
        "num_turns": len(step.seconds),
    }


def _verification(bench: Bench) -> Published:
    data = [
        _named(setting) | {"width": width, "v": v, "num_turns": len(cases[STEP].seconds)}
        for setting, cases in bench.cases.items()
        for width, v in benches.by_width(cases).items()
    ]
    return Published(
        title="Verification by width: v",
        caption=(
            "A pass over so many rows (the drafted tokens and the one before them), in AR steps; median over turns, "
            f"each pass beside the step of its turn. {bench.origin}"
        ),
        cells=_wide({setting: benches.by_width(cases) for setting, cases in bench.cases.items()}),
        data=pd.DataFrame(data),
        num_labels=len(NAMES),
    )


def _drafts(bench: Bench) -> Published:
    data = [
        _named(setting) | {"skipped_percent": share, **_draft(timing, cases)}
        for setting, cases in bench.cases.items()
        for share, timing in numbered(cases, "draft").items()
    ]
    texts = {
        "skipped": _written("skipped_percent", lambda share: f"{share} %"),
        "c": _written("c", lambda c: number(c, 3)),
        "c_bytes": _written("c_bytes", lambda c: number(c, 3)),
        "c/c_bytes": _written("c_over_c_bytes", number),
    }
    return Published(
        title="A draft step by share of skipped layers: c by the clock beside c by bytes",
        caption=(
            "In AR steps. c: by the clock, median over turns; c_bytes: bytes that it must read, keys and values among "
            f"them, over AR's; c/c_bytes above 1 is the engine's own loss on the draft path. {bench.origin}"
        ),
        cells=_frame(data, texts),
        data=pd.DataFrame(data),
        num_labels=len(NAMES) + 1,
    )


def _draft(timing: Timing, cases: Cases) -> Datum:
    c, c_bytes = timing.over(cases[STEP]), benches.c_bytes(timing, cases)
    return {"c": c, "c_bytes": c_bytes, "c_over_c_bytes": c / c_bytes if c_bytes else None}


def _programmes(bench: Bench) -> Published:
    data = [
        _named(setting) | {"num_skipped": num, "p": timing.over(cases[STEP]), "search_s": median(timing.seconds)}
        for setting, cases in bench.cases.items()
        for num, timing in numbered(cases, "dp").items()
    ]
    texts = {
        "layers": _written("num_skipped", str),
        "ms": _written("search_s", lambda seconds: number(1e3 * seconds)),
        "p": _written("p", number),
    }
    return Published(
        title="CLaSp's dynamic programme: p",
        caption=f"layers: how many it leaves out; p: one search, in AR steps, median over turns. {bench.origin}",
        cells=_frame(data, texts),
        data=pd.DataFrame(data),
        num_labels=len(NAMES) + 1,
    )


def _answers(bench: Bench) -> Published:
    data = [asdict(turns) for turns in bench.turns]
    parts = ("draft", "verify", "select", "host", "prefill")
    texts = {
        "n": _written("num_turns", str),
        "tokens/s": _written("tokens_per_s", lambda speed: number(speed, 1)),
        **{part: _written(part, percent) for part in parts},
        "peak GB": _written("peak_memory_bytes", _gigabytes),
    }
    return Published(
        title="Whole answers: what each method spends where",
        caption=(
            "tokens/s: all tokens over all time, prefill inside. draft, verify, select (searches) and host (all else) "
            "are shares of decode time, prefill of all time. n: turns. peak GB: memory of the process that ran all "
            f"methods of a model and dtype. Answers {bench.source}"
        ),
        cells=_frame(data, texts, ("model", "dtype", "engine", "method")),
        data=pd.DataFrame(data),
        num_labels=4,
    )


# Cells


def _named(setting: Setting) -> Datum:
    return {name: getattr(setting, name) for name in NAMES}


def _written(key: str, write: Callable[[Any], str]) -> Callable[[Datum], str]:
    return lambda datum: "n/a" if datum[key] is None else write(datum[key])


def _frame(
    data: Sequence[Datum], texts: dict[str, Callable[[Datum], str]], names: Sequence[str] = NAMES
) -> pd.DataFrame:
    lines = [[*(str(datum[name]) for name in names), *(write(datum) for write in texts.values())] for datum in data]
    return pd.DataFrame(lines, columns=[*names, *texts])


def _wide(found: Mapping[Setting, Mapping[int, float]]) -> pd.DataFrame:
    """A column per width; a width that a setting was not timed at is left empty."""
    widths = sorted({width for by_width in found.values() for width in by_width})
    lines = [
        [*map(str, _named(setting).values()), *(number(by_width[w]) if w in by_width else "" for w in widths)]
        for setting, by_width in found.items()
    ]
    return pd.DataFrame(lines, columns=[*NAMES, *map(str, widths)])


def _speed(timing: Timing) -> float | None:
    return timing.num_bytes / median(timing.seconds) if timing.num_bytes is not None else None


def _gigabytes(bytes_per_s: float) -> str:
    return number(bytes_per_s / 1e9, 1)
