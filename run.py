"""Hydra entry: build the target, the methods and the tasks, open the store, run. See `python run.py --help`."""

from __future__ import annotations

import difflib
import gc
import hashlib
import json
import os
import re
import sys
import typing
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
import typeguard
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from clasp_core import device, provenance
from clasp_core.analysis import Analysis, Reader
from clasp_core.checkpoint import LoadedModel
from clasp_core.decoding import Generation
from clasp_core.drafting import Described, SearchedOffline
from clasp_core.errors import UserError
from clasp_core.metrics.grading import mismatches
from clasp_core.plan import Method, Plan
from clasp_core.probe import bandwidth_bytes_per_s
from clasp_core.progress import Bar, Together
from clasp_core.prompting import Prompter
from clasp_core.records import Manifest, Question, TurnRecord
from clasp_core.report.printing import render
from clasp_core.report.summary import summarise
from clasp_core.runner import Runner
from clasp_core.sampling import Sampling
from clasp_core.settings import check_choices, check_settings
from clasp_core.store import Key, RunStore, new_run_id, read_run
from clasp_core.target import Engine
from clasp_core.texts import texts
from clasp_core.tracking import Tracker

REPOSITORY = Path(__file__).resolve().parent
CONF = REPOSITORY / "conf"
OWN_PACKAGES = ("clasp_core.", "baselines.")
GROUPS = ("model", "method", "task", "reference", "search", "analysis", "tracker")
CHOSEN = (*GROUPS, "debug", "experiment")
"""Every group that a command line chooses from."""

BUSY_CORES = 0.4
"""More than that in use by others before a run starts is worth a note."""

PLACES = ("path", "gguf", "cache_dir", "root")
"""Keys that say where a file lies; the questions' and the model's own hashes say what it is."""

SKIP_SET = "skip_set"
"""A method's key that names a file (whose hash then counts, and not its place) or spells the set out."""


@dataclass
class GenerationSchema:
    """Types of `generation.*`."""

    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_k: int = MISSING
    top_p: float = MISSING


@dataclass
class Schema:
    """Types of the keys of every run; their values are in `conf/config.yaml`."""

    model: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    analysis: dict[str, Any] = field(default_factory=dict)
    experiment: str | None = MISSING
    debug: dict[str, Any] = field(default_factory=dict)
    generation: GenerationSchema = field(default_factory=GenerationSchema)
    limit: int | None = MISSING
    history: str = MISSING
    engine: str = MISSING
    seed: int = MISSING
    repeats: int = MISSING
    num_threads: int | None = MISSING
    warm_up_tokens: int = MISSING
    results_dir: str = MISSING
    resume: str | None = MISSING
    store_text: bool = MISSING


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
            raise UserError(f"interrupted; what was found so far is in {shown(store.folder)}") from None
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
            raise UserError(f"interrupted; go on with the same command and resume={shown(store.folder)}") from None
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


def offline_search_s(methods: Mapping[str, Method]) -> dict[str, float]:
    """What the methods' skip sets took to find, where they come from an offline search."""
    found = {name: m.offline_search_s() for name, m in methods.items() if isinstance(m, SearchedOffline)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def with_described(manifest: Manifest, methods: Mapping[str, Method], ignored: Sequence[str]) -> Manifest:
    """The manifest with what decides the rows beside the configuration (a draft model's weights), hash included."""
    parts = {name: m.describe() for name, m in methods.items() if isinstance(m, Described)}
    if not parts:
        return manifest
    settings = {**manifest.config, "described": parts}
    return replace(manifest, config=settings, config_hash=provenance.config_hash(settings, ignored))


def build_methods(config: Mapping[str, Any]) -> tuple[dict[str, Method], str | None]:
    """The reference (named `ar`) and the selected methods; a method of that name gets another one."""
    methods: dict[str, Method] = {}
    reference = None
    if config["reference"]:
        reference = "ar"
        methods[reference] = build(config["reference"], "reference")
    for name, node in config.get("method", {}).items():
        methods["ar_again" if name == reference else name] = build(node, f"method.{name}")
    if not methods:
        raise UserError("nothing to run: method=[] and reference=none; choose at least one method")
    return methods, reference


def build_questions(config: Mapping[str, Any]) -> list[Question]:
    """The questions of all selected tasks."""
    nodes = {name: node for name, node in config["task"].items() if name != "subtasks"}
    only = {"subtasks": config["task"]["subtasks"]} if config["task"]["subtasks"] is not None else {}
    tasks = [build({**node, **only}, f"task.{name}") for name, node in nodes.items()]
    questions = [question for task in tasks for question in task.questions(config["limit"])]
    if not questions:
        raise UserError("no questions: task=[] selects none; choose at least one task")
    keys = [(question.task, question.question_id) for question in questions]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UserError(f"question {min(twice)[1]} is in two of the selected tasks; choose one of them")
    return questions


def build(node: Any, place: str) -> Any:
    """The object of a configuration node; only classes of this project may be named there."""
    for target in targets(node):
        if not target.startswith(OWN_PACKAGES):
            raise UserError(f"{place} names _target_ {target!r}; it must lie in {' or '.join(OWN_PACKAGES)}")
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise UserError(
            f"{place} has options but is not selected: {node!r}; add "
            f"{place.replace('.', '=', 1)} to the command, or drop the option"
        )
    check_types(node, place)
    try:
        return hydra.utils.instantiate(node, _convert_="all")
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{place} cannot be built: {str(error.__cause__ or error).splitlines()[0]}") from error


def check_types(node: Mapping[str, Any], place: str) -> None:
    """Refuse a value whose type is not the one that the constructor of `_target_` declares."""
    try:
        hints = typing.get_type_hints(constructor := hydra.utils.get_object(node["_target_"]))
    except ImportError:
        raise UserError(
            f"{place} names _target_ {node['_target_']!r}, which does not exist; correct its name"
        ) from None
    if isinstance(constructor, type):
        hints = typing.get_type_hints(constructor.__init__)
    for key, value in node.items():
        if isinstance(value, Mapping) and "_target_" in value:
            check_types(value, f"{place}.{key}")
        elif key in hints:
            try:
                typeguard.check_type(value, hints[key])
            except typeguard.TypeCheckError:
                wanted = str(hints[key]).replace("typing.", "").replace("NoneType", "null").replace("None", "null")
                wanted = getattr(hints[key], "__name__", wanted) if isinstance(hints[key], type) else wanted
                raise UserError(f"{place}.{key} is {value!r}; it must be {wanted}") from None


def targets(node: Any) -> list[str]:
    """Every `_target_` at or below a node."""
    if not isinstance(node, Mapping):
        return []
    here = [str(node["_target_"])] if "_target_" in node else []
    return here + [target for child in node.values() for target in targets(child)]


def new_manifest(
    config: dict[str, Any],
    model: LoadedModel,
    prompter: Prompter,
    questions: Sequence[Question],
    methods: Mapping[str, Method],
    reference: str | None,
) -> Manifest:
    """Everything a reader needs before trusting or pairing the rows."""
    info = {**model.info, "read_bytes": model.target.read_bytes()}
    asked = hashlib.sha256(json.dumps([asdict(q) for q in questions], sort_keys=True).encode()).hexdigest()
    settings = {**config, "questions_sha256": asked, "template_sha256": prompter.template_sha256}
    settings["skip_sets_sha256"] = skip_sets_sha256(config["method"])
    same = {key: info[key] for key in ("fingerprint", "dtype", "device_map", "attention", "engine")}
    conditions = provenance.conditions()
    return Manifest(
        run_id=new_run_id(),
        status="running",
        reference=reference,
        methods=list(methods),
        config=settings,
        config_hash=provenance.config_hash(settings, not_in_hash(config)),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        git=provenance.git_state(REPOSITORY),
        versions=provenance.package_versions(),
        fingerprint=provenance.fingerprint({"model": same, "template_sha256": prompter.template_sha256}),
        model=info,
        start=now(),
        conditions=conditions,
        notes=warnings_about(conditions),
    )


def warnings_about(conditions: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the machine's state; two torch threads beside a busy process slow down fiftyfold."""
    busy = conditions["num_busy_cores"]
    if busy < BUSY_CORES:
        return []
    return [f"{busy:.1f} cores were busy with other work at the start: times are disturbed, ratios less so"]


def skip_sets_sha256(nodes: Mapping[str, Any]) -> dict[str, str | None]:
    """Hashes of the files from which methods read their skip sets, by method; null where one cannot be read."""
    paths = {name: Path(node[SKIP_SET]) for name, node in nodes.items() if isinstance(node.get(SKIP_SET), str)}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if os.access(path, os.R_OK) and path.is_file() else None
        for name, path in paths.items()
    }


def not_in_hash(config: Mapping[str, Any]) -> list[str]:
    """Dotted keys that change no row: where things lie, what is resumed, what is kept beside, and who is told."""

    def places(node: Mapping[str, Any], above: str) -> list[str]:
        below = [
            key
            for name, child in node.items()
            if isinstance(child, Mapping)
            for key in places(child, f"{above}{name}.")
        ]
        here = [name for name in node if name in PLACES or (name == SKIP_SET and isinstance(node[name], str))]
        return below + [f"{above}{name}" for name in here]

    beside = ["search", "analysis", "experiment", "store_text", "tracker"]
    return ["resume", "results_dir", *beside, *places(config, "")]


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def shown(folder: Path) -> str:
    """A path as the user would type it."""
    return os.path.relpath(folder)


# Errors of the command line, in one line each


def explain(error: Exception) -> str:
    """One line for a mistake in the command: what is wrong and what is near it."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"unknown {group} {choice!r}{nearest(choice, choices(group) or error.options or [])}"
    text = str(error)
    if key := re.search(r"Could not override '([^']+)'|Key '([^']+)' is not in struct", text):
        return explain_key((key[1] or key[2]).removeprefix("+"))
    if group := re.search(r"Could not find '([^']+)'", text):
        return f"unknown choice {group[1]!r}{nearest(group[1], list(known_keys()))}"
    if override := re.search(r"Error merging override (\S+)", text):
        return f"{override[1]}: {str(error.__cause__).splitlines()[0]}"
    return " ".join(text.split())


def explain_key(name: str) -> str:
    """Which choice an unselected option belongs to, or what is near an unknown one."""
    if name in CHOSEN:
        return f"{name} takes the name of a choice: {', '.join(choices(name))}"
    places = known_keys()
    if choices_of := places.get(name):
        group = name.partition(".")[0]
        return (
            f"{name} belongs to {group}={' or '.join(sorted(choices_of))}, which is not selected; add it to the command"
        )
    return f"unknown key {name!r}{nearest(name, [*places, *CHOSEN])}"


def nearest(value: str, known: Sequence[str]) -> str:
    """The known names closest to a mistyped one, or all of them where none is close."""
    close = difflib.get_close_matches(value, known, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known are {', '.join(known)}" if len(known) <= 30 else "; see python run.py --help"


def choices(group: str) -> list[str]:
    """The files of a configuration group."""
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def known_keys() -> dict[str, set[str]]:
    """Dotted keys as an override names them, and the choices of their group that have them (none: always there)."""
    own = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml"), resolve=False)
    keys = {key: set[str]() for key in flatten(own, "") if not key.startswith(("defaults", "hydra"))}
    for path in (CONF / group / f"{choice}.yaml" for group in GROUPS for choice in choices(group)):
        group = path.parent.name
        prefix = f"{group}.{path.stem}." if group in ("method", "task") else f"{group}."
        for key in flatten(OmegaConf.to_container(OmegaConf.load(path), resolve=False), prefix):
            keys.setdefault(key, set()).add(path.stem)
    return keys


def flatten(node: Any, above: str) -> list[str]:
    """Dotted keys of a nested mapping, inner nodes included."""
    if not isinstance(node, Mapping):
        return []
    return [name for key, child in node.items() for name in (f"{above}{key}", *flatten(child, f"{above}{key}."))]


def register() -> None:
    """What the configuration files rely on: their types, and where the repository lies from the launch folder."""
    OmegaConf.register_new_resolver("token", lambda: uuid.uuid4().hex[:6], use_cache=True, replace=True)
    OmegaConf.register_new_resolver("repository", lambda: os.path.relpath(REPOSITORY), replace=True)
    OmegaConf.register_new_resolver("sweep", sweep, replace=True)
    OmegaConf.register_new_resolver("choices", listed_choices, replace=True)
    ConfigStore.instance().store(name="schema", node=Schema)


def listed_choices() -> str:
    """The groups and their files for `--help`; those that only others include (`_hub`) are left out."""
    return "\n".join(f"{group}: {', '.join(choices(group))}" for group in CHOSEN)


def sweep() -> str | None:
    """What the jobs of this sweep have in common and no other sweep has: the end of its folder's path."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return None
    return "_".join(Path(HydraConfig.get().sweep.dir).parts[-2:])


def main() -> None:
    """Run the job or the sweep; mistakes end in one line and exit code 2, failed turns and jobs likewise.

    Ctrl-C before anything is stored: exit code 130.
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
