"""Mirror of a run on Weights & Biases: made from its rows, told of turns outside the clock, never a table's source.

Chosen by `tracker=wandb`. The run folder is the record and is written first; whatever goes wrong here ends in one line
on standard error and the run goes on. Without a key or a network the mirror is an offline run, which
`wandb sync FOLDER` uploads later. W&B's id is the run's own `run_id`: a resumed run goes on under it, and an offline
one repeats the earlier turns, so that its last folder is complete by itself (a second one replaces the first, P59).

W&B draws only a sample of many runs and averages what it draws (P57): numbers for a paper come from the rows, by
`python -m clasp_core.report`.
"""

from __future__ import annotations

import json
import netrc
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from clasp_core.errors import UserError
from clasp_core.records import Manifest, TurnRecord
from clasp_core.report import figures
from clasp_core.report.runs import load
from clasp_core.report.values import Running, config_of, estimators, ladders, summary_values, turns
from clasp_core.store import MANIFEST, ROWS, SUMMARY, read_run

MODES = ("auto", "online", "offline")
MAX_TAG, MAX_NAME = 64, 128
"""W&B's own limits, in characters."""


class Watcher(Protocol):
    """Who watches one run: entered before the warm-up, told of turns, left when the manifest says how it ended."""

    def __enter__(self) -> Watcher: ...

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """One turn is done by all methods."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracker(Protocol):
    """What the `tracker` group of the configuration names."""

    def watch(self, folder: Path) -> Watcher:
        """A watcher of the run in this folder, whose manifest is written."""


class NoTracker:
    """Watches nothing."""

    def watch(self, folder: Path) -> NoTracker:
        """Itself."""
        return self

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """Nothing."""

    def __enter__(self) -> NoTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@dataclass(frozen=True)
class WandB:
    """The options of the mirror; see `conf/tracker/wandb.yaml`. Raises UserError for an unknown mode."""

    mode: str
    project: str
    entity: str | None
    group: str | None
    job_type: str
    tags: list[str]
    dir: str | None
    knock_timeout_s: float
    init_timeout_s: float
    finish_timeout_s: float

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"tracker.mode is {self.mode!r}; it must be {', '.join(MODES[:-1])} or {MODES[-1]}")

    def watch(self, folder: Path) -> Mirror:
        """The mirror of the run in this folder."""
        return Mirror(self, folder)


class Mirror:
    """One W&B run for one run folder. Every call to W&B is guarded: the first that raises turns the mirror off."""

    def __init__(self, options: WandB, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._run: Any = None
        self._off = False
        self._step = 0

    def __enter__(self) -> Mirror:
        manifest, rows = read_run(self._folder)
        self._running = Running(manifest.reference, manifest.config["generation"]["temperature"] == 0)
        self._guarded("init", lambda: self._open(manifest))
        earlier = sorted((row for row in rows if row.error is None), key=_first_seen(rows))
        for _, turn in groupby(earlier, key=lambda row: row.pair):
            self.update(list(turn))
        return self

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """One history step: the turn's own figures, and where each method stands after it."""
        self._guarded("log", lambda: self._log(self._running.add(rows)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(completed=kind is None)
        except KeyboardInterrupt:
            _say("interrupted while uploading; `wandb sync` sends what is missing")

    def _end(self, completed: bool) -> None:
        """Tables and summary, then the end with the job's status; a completed run has a fresh summary.json."""
        manifest, rows = read_run(self._folder)
        self._guarded("the final tables", lambda: self._close(manifest, rows, completed))
        if self._run is not None:
            self._off = False  # a run that cannot be logged to any more is finished all the same
            ok = completed and manifest.status == "ok"
            self._guarded("finish", lambda: self._run.finish(exit_code=0 if ok else 1))

    def _guarded(self, what: str, call: Callable[[], None]) -> None:
        if self._off:
            return
        try:
            call()
        except Exception as error:
            self._off = True
            _say(f"the mirror is off ({what}: {_first_line(error)}); the run goes on, and its rows are complete")

    def _open(self, manifest: Manifest) -> None:
        import wandb

        mode, why = choose_mode(self._options, wandb.setup().settings)
        try:
            self._run = self._init(wandb, manifest, mode)
        except Exception as error:
            if mode != "online":
                raise
            wandb.teardown()  # what the failed attempt left behind would break the next one
            mode, why = "offline", _first_line(error)
            self._run = self._init(wandb, manifest, mode)
        for name in ("running/*", "turn/*"):
            self._run.define_metric(name, summary="none")
        self._announce(mode, why)

    def _init(self, wandb: Any, manifest: Manifest, mode: str) -> Any:
        root = Path(self._options.dir or self._folder)
        root.mkdir(parents=True, exist_ok=True)
        settings = {**_private(), **self._names(manifest), "mode": mode, "root_dir": str(root.resolve())}
        known = {name: value for name, value in settings.items() if name in wandb.Settings.model_fields}
        return wandb.init(config=config_of(manifest), settings=wandb.Settings(**known))

    def _names(self, manifest: Manifest) -> dict[str, Any]:
        options, methods = self._options, [name for name in manifest.methods if name != manifest.reference]
        model, tasks = manifest.model["name"], [name for name in manifest.config["task"] if name != "subtasks"]
        name = f"{'+'.join(methods) or manifest.reference}/{model}/seed{manifest.config['seed']}"
        return {
            "project": options.project,
            "entity": options.entity,
            "run_id": manifest.run_id,
            "resume": "allow",
            "run_group": options.group and options.group[:MAX_NAME],
            "run_job_type": options.job_type,
            "run_name": name[:MAX_NAME],
            "run_tags": tuple(dict.fromkeys(tag[:MAX_TAG] for tag in (model, *methods, *tasks, *options.tags))),
            "host": self._folder.parents[1].name,
            "init_timeout": options.init_timeout_s,
            "finish_timeout": options.finish_timeout_s,
        }

    def _announce(self, mode: str, why: str | None) -> None:
        if mode == "online":
            _say(self._run.url)
        elif mode == "offline":
            reason = f" ({why})" if why else ""
            _say(f"offline{reason}; upload it after the run with: wandb sync {_shown(Path(self._run.dir).parent)}")

    def _log(self, values: Mapping[str, Any]) -> None:
        """At the turn's own step; steps that a resumed online run has already are not sent again."""
        step, self._step = self._step, self._step + 1
        if step >= self._run.step:
            self._run.log({name: value for name, value in values.items() if value is not None}, step=step)

    def _close(self, manifest: Manifest, rows: Sequence[TurnRecord], has_summary: bool) -> None:
        import wandb

        greedy = manifest.config["generation"]["temperature"] == 0
        tables = {"turns": turns(rows, manifest.reference, greedy)}
        self._run.summary.update({"status": manifest.status, "num_failed": manifest.num_failed})
        if has_summary:
            summary = json.loads((self._folder / SUMMARY).read_text(encoding="utf-8"))
            tables |= {"estimators": estimators(summary), "ladder": ladders(summary)}
            self._run.summary.update(summary_values(summary))
        self._run.log({name: wandb.Table(columns=list(columns), data=data) for name, (columns, data) in tables.items()})
        with tempfile.TemporaryDirectory() as folder:
            pictures = {f"figures/{path.stem}": wandb.Image(str(path)) for path in self._pictures(Path(folder))}
            if pictures:
                self._run.log(pictures)
        self._run.log_artifact(self._artifact(wandb, manifest.run_id))

    def _pictures(self, folder: Path) -> Iterator[Path]:
        """The figures that this run's rows are enough for."""
        runs = load([self._folder])
        for name in figures.names():
            plot = figures.figure(name, runs)
            if not isinstance(plot, figures.Missing):
                yield next(path for path in plot.save(folder, name) if path.suffix == ".png")

    def _artifact(self, wandb: Any, run_id: str) -> Any:
        artifact = wandb.Artifact(f"run-{run_id}", type="run", description="the run folder's record")
        for name in (MANIFEST, ROWS, SUMMARY):
            if (self._folder / name).exists():
                artifact.add_file(str(self._folder / name))
        return artifact


def _private() -> dict[str, Any]:
    """Nothing is sent but what this module sends: no code, console, environment or host, and no sampling of the machine
    (a second process that measures would disturb the one that is measured).
    """
    return {
        "reinit": "create_new",
        "silent": True,
        "console": "off",
        "save_code": False,
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
    }


# Online or offline, decided once and before the first init (P70)


def choose_mode(options: WandB, settings: Any) -> tuple[str, str | None]:
    """online, offline or disabled (only by `WANDB_MODE`), and why not online; `settings` are W&B's global ones.

    Never online without a key: W&B would ask for one on a terminal, and the run would wait for the answer.
    """
    if options.mode == "offline":
        return "offline", None
    if options.mode == "auto" and settings.mode in ("offline", "dryrun", "disabled"):
        return ("disabled" if settings.mode == "disabled" else "offline"), f"WANDB_MODE={settings.mode}"
    if not has_key(settings):
        return "offline", "no API key; `wandb login` stores one"
    if options.mode == "auto" and not answers(settings.base_url, options.knock_timeout_s):
        return "offline", f"{urlsplit(settings.base_url).hostname} does not answer"
    return "online", None


def has_key(settings: Any) -> bool:
    """Whether W&B would find credentials: in its settings or environment, or in the netrc file."""
    if settings.api_key or settings.identity_token_file or os.environ.get("WANDB_API_KEY"):
        return True
    path = os.environ.get("NETRC") or str(Path("~/.netrc").expanduser())
    with suppress(OSError, netrc.NetrcParseError):
        return urlsplit(settings.base_url).hostname in netrc.netrc(path).hosts
    return False


def answers(url: str, timeout_s: float) -> bool:
    """Whether the server, or the proxy on the way to it, takes a connection in time (a name's look-up included)."""
    target = urlsplit(url)
    proxy = None if proxy_bypass(target.hostname or "") else getproxies().get(target.scheme)
    target = urlsplit(proxy) if proxy else target
    address = (target.hostname or "", target.port or {"http": 80}.get(target.scheme, 443))
    heard = threading.Event()

    def knock() -> None:
        with suppress(OSError), socket.create_connection(address, timeout_s):
            heard.set()

    threading.Thread(target=knock, daemon=True).start()
    return heard.wait(timeout_s)


def _first_seen(rows: Sequence[TurnRecord]) -> Callable[[TurnRecord], int]:
    """Sorts the rows of a turn together, in the order in which the turns began."""
    order = {pair: index for index, pair in enumerate(dict.fromkeys(row.pair for row in rows))}
    return lambda row: order[row.pair]


def _first_line(error: Exception) -> str:
    return " ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _say(text: str) -> None:
    print(f"W&B: {text}", file=sys.stderr)
