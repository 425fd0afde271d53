"""Hydra entry: build the target, the methods and the tasks, open the store, run. See `python run.py --help`."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from clasp_core import device, provenance
from clasp_core.analysis import Analysis, Reader
from clasp_core.checkpoint import LoadedModel
from clasp_core.decoding import Generation
from clasp_core.entry.building import build, build_methods, build_questions
from clasp_core.entry.keys import CHOSEN, CONF, REPOSITORY, Schema, explain, known_keys, nearest, register
from clasp_core.entry.manifests import new_manifest, not_in_hash, now, offline_search_s, with_described
from clasp_core.errors import Interrupted, UserError
from clasp_core.metrics.grading import mismatches
from clasp_core.plan import Plan
from clasp_core.probe import bandwidth_bytes_per_s
from clasp_core.progress import Bar, Together
from clasp_core.prompting import Prompter
from clasp_core.records import Manifest, TurnRecord
from clasp_core.report.printing import render
from clasp_core.report.summary import summarise
from clasp_core.runner import Runner
from clasp_core.sampling import Sampling
from clasp_core.settings import check_choices, check_settings
from clasp_core.store import Key, RunStore, read_run
from clasp_core.target import Engine
from clasp_core.texts import texts
from clasp_core.tracking import NoTracker, Tracker


class Shelf:
    """Holds the model that was loaded last, so that the jobs of one sweep need not load it again."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._model: LoadedModel | None = None

    def get(self, config: Mapping[str, Any], engine: Engine) -> LoadedModel:
        """The model of this configuration and engine; any other one is let go of first."""
        key = json.dumps([config, engine], sort_keys=True)
        if self._model is None or self._key != key:
            self._model = None
            gc.collect()
            device.free_memory()
            self._model = build(config, "model").load(engine)
            self._key = key
        assert self._model is not None
        return self._model


def run_job(config: dict[str, Any], shelf: Shelf) -> Path:
    """One run of one configuration, from the checks to the printed table; returns its folder."""
    if unknown := sorted(set(config) - {entry.name for entry in fields(Schema)}):
        raise UserError(f"unknown key {unknown[0]!r}{nearest(unknown[0], list(known_keys()))}")
    if absent := sorted({entry.name for entry in fields(Schema)} - set(config)):
        raise UserError(f"{absent[0]} was deleted, and every run needs it; drop ~{absent[0]}")
    check_settings(config)
    device.set_threads(config["num_threads"])
    if config["search"]:
        return search(config, shelf)
    if config["analysis"]:
        return analyse(config, shelf)
    tracker = build(config["tracker"], "tracker")
    methods, reference = build_methods(config)
    questions = build_questions(config)
    budget = config["generation"]["max_new_tokens"]
    sampling = Sampling(**{key: config["generation"][key] for key in ("temperature", "top_k", "top_p")})
    Generation(budget, frozenset(), sampling)
    model = shelf.get(config["model"], config["engine"])
    prompter = Prompter(model.tokenizer, model.prompt)
    manifest = new_manifest(config, model, prompter, questions, methods, reference)
    plan = Plan(
        model=model.name,
        methods=methods,
        reference=reference,
        questions=questions,
        generation=Generation(budget, frozenset(model.stop_ids), sampling),
        seed=config["seed"],
        repeats=config["repeats"],
        history=config["history"],
        max_positions=model.max_positions,
        warm_up_tokens=config["warm_up_tokens"],
    )
    return measure(plan, model, prompter, manifest, config, tracker)


def search(config: Mapping[str, Any], shelf: Shelf) -> Path:
    """An offline search for a skip set in place of a measurement; returns the file that it wrote."""
    searcher = build(config["search"], "search")
    model = shelf.get(config["model"], config["engine"])
    clock = device.DeviceClock(model.target.devices, model.target.device)
    prompter = Prompter(model.tokenizer, model.prompt)
    path: Path = searcher.run(model, prompter, clock, REPOSITORY / "data" / "skip_sets")
    print(shown(path))
    return path


def analyse(config: dict[str, Any], shelf: Shelf) -> Path:
    """An analysis in place of a measurement; returns the run folder that holds its rows. No time is measured."""
    if config["resume"] is not None:
        raise UserError(f"resume={config['resume']}: an analysis is not resumed; run it again without resume")
    if not isinstance(build(config["tracker"], "tracker"), NoTracker):
        print("W&B: an analysis is not mirrored; its rows are in the run folder", file=sys.stderr)
    analysis: Analysis = build(config["analysis"], "analysis")
    questions = build_questions(config)
    sampling = Sampling()
    Generation(config["generation"]["max_new_tokens"], frozenset(), sampling)
    model = shelf.get(config["model"], config["engine"])
    analysis.check(model.target)
    prompter = Prompter(model.tokenizer, model.prompt)
    generation = Generation(config["generation"]["max_new_tokens"], frozenset(model.stop_ids), sampling)
    manifest = new_manifest(config, model, prompter, questions, {}, None)
    store, manifest, _ = open_store(manifest, config, ())
    reader = Reader(model.target, prompter, generation, device.DeviceClock(model.target.devices, model.target.device))
    status = "failed"
    with store:
        try:
            reader.run(analysis, questions, store)
            status = "ok"
        except KeyboardInterrupt:
            status = "interrupted"
            raise Interrupted(f"interrupted; what was found so far is in {shown(store.folder)}") from None
        finally:
            store.write_manifest(replace(manifest, status=status, end=now()))
    print(shown(store.folder))
    return store.folder


def measure(
    plan: Plan,
    model: LoadedModel,
    prompter: Prompter,
    manifest: Manifest,
    config: Mapping[str, Any],
    tracker: Tracker,
) -> Path:
    """Check and warm up, then run into the store; whatever happens, the manifest's last line says how it ended."""
    clock = device.DeviceClock(model.target.devices, model.target.device)
    runner = Runner(model.target, prompter, plan, clock, device.energy_meter(model.target.devices))
    notes = [*manifest.notes, *runner.check()]
    conditions = {**manifest.conditions, "bandwidth_bytes_per_s": bandwidth_bytes_per_s(model.target, clock)}
    offline_s = offline_search_s(plan.methods)
    manifest = replace(manifest, offline_search_s=offline_s, notes=notes, conditions=conditions)
    manifest = with_described(manifest, plan.methods, not_in_hash(config))
    planned = {slot.key(name) for stream in plan.slots() for slot in stream for name in plan.methods}
    store, manifest, rows = open_store(manifest, config, planned)
    with store, tracker.watch(store.folder) as watcher:
        num_turns = sum(len(stream) for stream in plan.slots())
        status = "failed"
        try:
            runner.warm_up()
            with Bar(num_turns, len(rows) // len(plan.methods), plan.reference) as bar:
                runner.run(store, Together(bar, watcher), rows)
            if runner.late:
                late = [*manifest.late_divergences, *(row.late_divergence() for row in runner.late)]
                store.write_manifest(manifest := replace(manifest, late_divergences=late))
            status = "ok"
        except KeyboardInterrupt:
            status = "interrupted"
            raise Interrupted(f"interrupted; go on with the same command and resume={shown(store.folder)}") from None
        finally:
            rows = read_run(store.folder)[1]
            num_failed = sum(row.error is not None for row in rows)
            faults = faults_of(rows, plan, store.folder)
            status = "failed" if status == "ok" and faults else status
            store.write_manifest(replace(manifest, status=status, end=now(), num_failed=num_failed))
            if config["store_text"]:
                store.write_texts(texts(rows, plan.questions, model.tokenizer))
        report(store, manifest, rows, plan)
    print(shown(store.folder))
    if faults:
        raise UserError("; ".join(faults))
    return store.folder


def faults_of(rows: Sequence[TurnRecord], plan: Plan, folder: Path) -> list[str]:
    """Why a run that came to its end has failed all the same: turns with an error, and answers that no tie explains."""
    num_failed = sum(row.error is not None for row in rows)
    found = [f"{num_failed} turn(s) failed; see the rows with an error in {shown(folder)}"] if num_failed else []
    reference = [row for row in rows if row.method == plan.reference]
    for name in plan.methods:
        own = [row for row in rows if row.method == name and name != plan.reference]
        if wrong := mismatches(reference, own, plan.generation.sampling.greedy):
            first = wrong[0]
            found.append(
                f"{name} is not lossless: its answer differs from {plan.reference}'s on {len(wrong)} turn(s), and "
                f"no tie explains it; the first is {first.task}, question {first.question_id}, turn {first.turn} (see "
                f"{shown(folder)})"
            )
    return found


def open_store(
    manifest: Manifest, config: Mapping[str, Any], planned: Collection[Key]
) -> tuple[RunStore, Manifest, list[TurnRecord]]:
    """A new run folder, or the one to resume with the rows it has."""
    if config["resume"] is None:
        machine = provenance.machine_slug(provenance.machine(), provenance.accelerators())
        return RunStore.create(config["results_dir"], machine, manifest.model["name"], manifest), manifest, []
    ignored = not_in_hash(config)
    store = RunStore.resume(
        config["resume"], manifest.config_hash, manifest.fingerprint, manifest.config, ignored, planned
    )
    earlier, rows = read_run(store.folder)
    resumed = replace(
        manifest,
        run_id=earlier.run_id,
        start=earlier.start,
        notes=[*earlier.notes, f"resumed {now()}"],
        late_divergences=earlier.late_divergences,
    )
    store.write_manifest(resumed)
    return store, resumed, [row for row in rows if row.error is None]


def report(store: RunStore, manifest: Manifest, rows: Sequence[TurnRecord], plan: Plan) -> None:
    """The table, from rows as they are stored: printed, and as `summary.json`."""
    greedy, read_bytes = plan.generation.sampling.greedy, manifest.model["read_bytes"]
    summary = summarise(rows, plan.reference, list(plan.methods), greedy, read_bytes, manifest.offline_search_s)
    store.write_summary({"run_id": manifest.run_id, "model": manifest.model["label"], **summary})
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"model: {manifest.model['label']}", highlight=False)
    render(summary, console)
    for note in manifest.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def shown(folder: Path) -> str:
    """A path as the user would type it."""
    return os.path.relpath(folder)


def main() -> None:
    """Run the job or the sweep; mistakes end in one line and exit code 2, failed turns and jobs likewise.

    Ctrl-C ends all of it: exit code 130.
    """
    if dashed := [word for word in sys.argv[1:] if re.match(r"--[\w.]+=", word)]:
        fail(f"{dashed[0]!r} has dashes; options are written key=value, such as {dashed[0].lstrip('-')}")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # Hydra wants it first
    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    shelf = Shelf()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        status: dict[str, Any] = {"status": "failed", "folder": None, "error": None}
        try:
            check_choices(HydraConfig.get().overrides.task, CHOSEN)
            status["folder"] = str(run_job(config, shelf))
            status["status"] = "ok"
        except Interrupted as error:
            status["error"] = str(error)
            fail(str(error), code=130)  # of a sweep too: its other jobs are not begun
        except UserError as error:
            status["error"] = str(error)
            if HydraConfig.get().mode == RunMode.RUN:
                fail(str(error))
            print(f"error in job {HydraConfig.get().job.num}: {error}", file=sys.stderr)
            raise
        except BaseException as error:
            status["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            Path(HydraConfig.get().runtime.output_dir, "status.json").write_text(json.dumps(status) + "\n")

    try:
        check_choices(sys.argv[1:], CHOSEN)
        job()
    except UserError as error:
        fail(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except KeyboardInterrupt:
        fail("interrupted before anything was stored; start again with the same command", code=130)


def fail(message: str, code: int = 2) -> NoReturn:
    """End with one line on standard error."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
