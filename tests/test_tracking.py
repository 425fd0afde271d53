"""The W&B mirror, on W&B's own client in its offline mode: what it is told, and that it never costs a run."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

import run as entry
from clasp_core.errors import UserError
from clasp_core.metrics.pairing import pairs
from clasp_core.metrics.speedups import paired_total
from clasp_core.progress import Together
from clasp_core.records import TurnRecord
from clasp_core.report.values import Running
from clasp_core.store import RunStore, read_run
from clasp_core.tracking import WandB, answers, choose_mode

ROOT = Path(__file__).resolve().parents[1]
SECRET = "planted-secret-of-the-environment"
WORDS = ("debug=smoke", "task.subtasks=[qa]", "generation.max_new_tokens=8")
TWO_METHODS = (*WORDS, "limit=3", "method=[clasp,pld]")
OPTIONS = WandB(
    mode="offline", project="p", entity=None, group=None, job_type="j", tags=[], dir=None,
    knock_timeout_s=0.5, init_timeout_s=20.0, finish_timeout_s=20.0,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    """No key, no network, no setting of the user's; what W&B keeps beside a run goes to a temporary folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            patch.delenv(name)
        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR", "WANDB_DIR"):
            patch.setenv(name, str(home))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("PLANTED_TOKEN", SECRET)
        patch.setenv("HYDRA_FULL_ERROR", "1")
        wandb.teardown()  # settings that an earlier test's environment has given it
        yield
        wandb.teardown()


def launch(folder, *words):
    """The command line in this process, from a folder; gives its exit message (None: success) and standard error."""
    errors, message = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["run.py", *words])
        try:
            entry.main()
        except SystemExit as end:
            message = errors.getvalue().splitlines()[-1] if end.code else None
    return message, errors.getvalue()


def run_folders(root):
    return sorted(path.parent for path in Path(root).glob("results/*/*/*/rows.jsonl"))


def offline_runs(run_folder):
    return sorted(run_folder.glob("wandb/offline-run-*"))


class Told:
    """What an offline run's file holds, by W&B's own reader."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        self.records = [(record["type"], record[record["type"]]) for record in records]
        self.run = self.of("run")[0]
        self.config = self.run["config"]["update"]
        self.history = [item["item"] for item in self.of("history")]
        self.turns = [item for item in self.history if "running/num_failed" in item]
        self.summary = {key: value for each in self.of("summary") for key, value in each.get("update", {}).items()}
        self.exit_codes = [record.get("exit_code", 0) for record in self.of("exit")]

    def of(self, kind):
        return [record for found, record in self.records if found == kind]


def table(folder, name):
    found = json.loads(next(folder.glob(f"files/media/table/{name}_*.table.json")).read_text())
    return [dict(zip(found["columns"], line, strict=True)) for line in found["data"]]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """One tracked run: where it was launched, its folder, what W&B was told, and what was printed."""
    launched = tmp_path_factory.mktemp("tracked")
    message, errors = launch(launched, *TWO_METHODS, "tracker=wandb", "tracker.tags=[mine]")
    assert message is None, errors
    folder = run_folders(launched)[0]
    (offline,) = offline_runs(folder)
    return SimpleNamespace(launched=launched, folder=folder, offline=offline, errors=errors, told=Told(offline))


# What is told


def test_the_run_is_named_by_its_run_id_and_tagged_with_model_methods_and_tasks(tracked):
    manifest, _ = read_run(tracked.folder)
    run = tracked.told.run
    assert run["run_id"] == manifest.run_id
    assert run["tags"] == ["tiny", "clasp", "pld", "sample", "mine"]
    assert run["display_name"] == "clasp+pld/tiny/seed0"
    assert run["job_type"] == "benchmark"
    assert "run_group" not in run
    assert tracked.told.exit_codes == [0]


def test_the_config_is_resolved_and_flat(tracked):
    config = tracked.told.config
    manifest, _ = read_run(tracked.folder)
    assert config["method/clasp/max_draft_len"] == 12
    assert config["generation/temperature"] == 0
    assert config["run/config_hash"] == manifest.config_hash
    assert config["run/fingerprint/machine/num_cores"] == manifest.fingerprint["machine"]["num_cores"]
    assert not [key for key, value in config.items() if isinstance(value, dict) and key != "_wandb"]


def test_one_step_per_turn_ends_at_the_summary_of_the_rows(tracked):
    summary = json.loads((tracked.folder / "summary.json").read_text())
    assert [turn["_step"] for turn in tracked.told.turns] == list(range(summary["num_turns"]))
    for name in ("clasp", "pld"):
        last, cell = tracked.told.turns[-1], summary["cells"][name]["overall"]
        assert last[f"running/{name}/speedup"] == pytest.approx(cell["speedup"]["paired_total"]["value"])
        assert last.get(f"running/{name}/acceptance_rate") == pytest.approx(cell["acceptance_rate"]["rounds"])


def test_the_summary_holds_every_estimator_with_its_interval_and_n(tracked):
    summary, told = json.loads((tracked.folder / "summary.json").read_text()), tracked.told.summary
    for name in ("clasp", "pld"):
        for scope in ("qa", "overall"):
            for label, interval in summary["cells"][name][scope]["speedup"].items():
                found = [told.get(f"{scope}/{name}/{label}{end}") for end in ("", "_low", "_high", "_n")]
                assert found == [pytest.approx(interval[part]) for part in ("value", "low", "high", "n")]
            assert told[f"{scope}/{name}/grade"] == "exact"
    assert told["status"] == "ok"


def test_turns_estimators_and_ladder_are_tables(tracked):
    _, rows = read_run(tracked.folder)
    turns = table(tracked.offline, "turns")
    assert [(line["method"], line["task"], line["question_id"], line["turn"]) for line in turns] == [
        row.key[:4] for row in rows
    ]
    assert [line["decode_s"] for line in turns] == [row.decode_s for row in rows]
    assert {(line["method"], line["grade"]) for line in turns} == {("ar", None), ("clasp", "exact"), ("pld", "exact")}
    summary = json.loads((tracked.folder / "summary.json").read_text())
    ladder = {(line["method"], line["task"]): line for line in table(tracked.offline, "ladder")}
    assert ladder["clasp", "overall"]["measured"] == summary["ladders"]["clasp"]["overall"]["measured"]
    assert len(table(tracked.offline, "estimators")) == 2 * (5 + 6)


def test_the_record_is_uploaded_as_an_artifact(tracked):
    contents = [each["manifest"]["contents"] for each in tracked.told.of("artifact") if each["type"] == "run"]
    assert sorted(file["path"] for file in contents[0]) == ["manifest.jsonl", "rows.jsonl", "summary.json"]


def test_nothing_of_the_machine_or_its_user_is_told(tracked):
    everything = [path for path in tracked.folder.rglob("*") if path.is_file()]
    assert len(everything) > 5
    for path in everything:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert b"def " not in content, path
    assert not [path for path in everything if path.name in ("requirements.txt", "wandb-metadata.json", "output.log")]
    assert tracked.told.run["host"] == tracked.folder.parents[1].name
    assert not [key for key in ("git", "program", "email", "username") if tracked.told.run.get(key)]


def test_all_of_it_lies_in_the_run_folder_and_one_line_says_how_to_upload_it(tracked):
    assert not (tracked.launched / "wandb").exists()
    (line,) = [line for line in tracked.errors.splitlines() if "W&B" in line]
    assert line.startswith("W&B: offline (no API key")
    assert (tracked.launched / line.rpartition("wandb sync ")[2]) == tracked.offline


def test_rows_are_those_of_an_untracked_run(tracked, tmp_path):
    message, errors = launch(tmp_path, *TWO_METHODS)
    assert message is None
    assert "W&B" not in errors
    (plain,) = run_folders(tmp_path)
    assert contents(plain) == contents(tracked.folder)
    assert read_run(plain)[0].config_hash == read_run(tracked.folder)[0].config_hash


def contents(folder):
    return [(row.key, row.output_ids, row.rounds.num_accepted, row.rounds.skip) for row in read_run(folder)[1]]


def test_the_figures_of_the_runs_own_rows_are_uploaded(tracked):
    found = {path.name.rpartition("_")[0].rpartition("_")[0] for path in pictures_of(tracked.folder)}
    assert {"ladder", "acceptance", "predicted", "fig3c"} <= found
    assert not found & {"fig3a", "fig4a"}


def pictures_of(folder):
    return list(offline_runs(folder)[0].glob("files/media/images/figures/*.png"))


# Sweeps


def test_the_jobs_of_a_sweep_are_runs_of_their_own_in_one_group(tmp_path):
    words = ("-m", *WORDS, "method.clasp.skip_ratio=null", "method.clasp.num_skipped=1,3,5", "tracker=wandb")
    message, _ = launch(tmp_path, *words)
    assert message is None
    told = [Told(offline) for folder in run_folders(tmp_path) for offline in offline_runs(folder)]
    assert sorted(each.config["method/clasp/num_skipped"] for each in told) == [1, 3, 5]
    assert len({each.run["run_id"] for each in told}) == 3
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert {each.run["run_group"] for each in told} == {f"{sweep.parent.name}_{sweep.name}"}


# Whatever goes wrong


def broken(*args, **kwargs):
    raise RuntimeError("planted\nsecond line")


@pytest.mark.parametrize(
    ("where", "name", "stage"),
    [(wandb, "init", "init"), (wandb.Run, "log", "log"), (wandb.Run, "log_artifact", "the final tables"),
     (wandb.Run, "finish", "finish")],
)  # fmt: skip
def test_a_failure_of_the_tracker_turns_it_off_and_leaves_the_run_ok(tmp_path, monkeypatch, where, name, stage):
    monkeypatch.setattr(where, name, broken)
    message, errors = launch(tmp_path, *WORDS, "limit=2", "tracker=wandb")
    assert message is None
    (folder,) = run_folders(tmp_path)
    manifest, rows = read_run(folder)
    assert manifest.status == "ok"
    assert len(rows) == 4
    off = [line for line in errors.splitlines() if "W&B: the mirror is off" in line]
    assert off == [
        f"W&B: the mirror is off ({stage}: RuntimeError planted); the run goes on, and its rows are complete"
    ]
    assert "Traceback" not in errors
    if stage not in ("init", "finish"):
        assert Told(offline_runs(folder)[0]).exit_codes == [0]


@pytest.mark.parametrize(("status", "error"), [("failed", None), ("interrupted", UserError("planted"))])
def test_a_run_that_did_not_end_well_is_finished_as_such(tracked, tmp_path, status, error):
    folder = shutil.copytree(tracked.folder, tmp_path / "r/m/x", ignore=shutil.ignore_patterns("wandb"))
    manifest, _ = read_run(folder)
    with contextlib.suppress(UserError), RunStore(folder, manifest.run_id) as store, OPTIONS.watch(folder):
        store.write_manifest(replace(manifest, status=status))
        if error:
            raise error
    told = Told(offline_runs(folder)[0])
    assert told.exit_codes == [1]
    assert told.summary["status"] == status
    assert ("overall/clasp/paired_total" in told.summary) == (error is None)  # an old summary.json is not this run's


def test_an_interrupted_run_is_finished_and_its_resumption_is_complete_by_itself(tmp_path):
    words = ("debug=smoke", "limit=3", "generation.max_new_tokens=24", "results_dir=results", "tracker=wandb")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *words], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_rows(tmp_path, 4, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Traceback" not in errors
    (folder,) = run_folders(tmp_path)
    assert read_run(folder)[0].status == "interrupted"
    first = Told(offline_runs(folder)[0])
    assert first.exit_codes == [1]
    message, _ = launch(tmp_path, *words, f"resume={folder}")
    assert message is None
    second = Told(offline_runs(folder)[1])
    assert second.run["run_id"] == first.run["run_id"]
    assert second.exit_codes == [0]
    num_turns = json.loads((folder / "summary.json").read_text())["num_turns"]
    assert 0 < len(first.turns) < num_turns
    assert [turn["_step"] for turn in second.turns] == list(range(num_turns))
    assert [turn["turn/ar/total_s"] for turn in second.turns[: len(first.turns)]] == [
        turn["turn/ar/total_s"] for turn in first.turns
    ]


def wait_for_rows(tmp_path, num_rows, process):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if any((folder / "rows.jsonl").read_bytes().count(b"\n") >= num_rows for folder in run_folders(tmp_path)):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {num_rows} rows in time: {process.communicate()}")


# Online or offline


def settings(**values):
    found = {"mode": "online", "api_key": None, "identity_token_file": None, "base_url": "http://127.0.0.1:9"}
    return SimpleNamespace(**{**found, **values})


def test_without_a_key_nothing_is_ever_online():
    """W&B would ask for one on a terminal."""
    for mode in ("auto", "online"):
        chosen, why = choose_mode(replace(OPTIONS, mode=mode), settings())
        assert chosen == "offline"
        assert "no API key" in str(why)


def test_a_key_is_found_in_the_settings_the_environment_and_the_netrc_file(monkeypatch, tmp_path):
    online = replace(OPTIONS, mode="online")
    assert choose_mode(online, settings(api_key="k"))[0] == "online"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password k\n")
    assert choose_mode(online, settings())[0] == "online"
    (tmp_path / "netrc").write_text("machine elsewhere login user password k\n")
    assert choose_mode(online, settings())[0] == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert choose_mode(online, settings())[0] == "online"


def test_auto_is_online_only_where_the_server_takes_a_connection(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    auto = replace(OPTIONS, mode="auto", knock_timeout_s=5.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert choose_mode(auto, settings(api_key="k", base_url=url)) == ("online", None)
    assert choose_mode(replace(auto, knock_timeout_s=0.2), settings(api_key="k", base_url=url))[0] == "offline"
    assert not answers("http://name.invalid", 0.2)


def test_the_environments_mode_is_respected_unless_another_is_asked_for():
    auto = replace(OPTIONS, mode="auto")
    assert choose_mode(auto, settings(mode="disabled", api_key="k")) == ("disabled", "WANDB_MODE=disabled")
    assert choose_mode(auto, settings(mode="offline", api_key="k")) == ("offline", "WANDB_MODE=offline")
    assert choose_mode(OPTIONS, settings(api_key="k")) == ("offline", None)
    with pytest.raises(UserError, match=r"tracker.mode is 'on'; it must be auto, online or offline"):
        replace(OPTIONS, mode="on")


def test_a_server_that_fails_at_init_leaves_an_offline_run(tracked, tmp_path, monkeypatch, capsys):
    """P70: what the failed attempt leaves behind does not break the fallback, nor the run after it."""
    folder = shutil.copytree(tracked.folder, tmp_path / "r/m/x", ignore=shutil.ignore_patterns("wandb"))
    wandb.teardown()
    with monkeypatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "a" * 40)
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        with replace(OPTIONS, mode="online", init_timeout_s=1.0).watch(folder):
            pass
        wandb.teardown()
    assert "W&B: offline (" in capsys.readouterr().err
    assert Told(offline_runs(folder)[-1]).exit_codes == [0]


# Around it


def test_without_the_tracker_wandb_is_never_imported():
    code = (
        "import sys, clasp_core.tracking, clasp_core.report.workspace\n"
        "with clasp_core.tracking.NoTracker().watch('nowhere') as watcher: watcher.update([])\n"
        "print('wandb' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_option_of_the_tracker_without_it_is_named_as_such(tmp_path):
    message, _ = launch(tmp_path, *WORDS, "tracker.project=mine")
    assert message == "error: tracker.project belongs to tracker=wandb, which is not selected; add it to the command"


def test_all_who_listen_are_told_of_each_turn_in_their_order():
    told = []
    first, second = (SimpleNamespace(update=lambda rows, n=n: told.append((n, rows))) for n in (1, 2))
    Together(first, second).update(["row"])
    assert told == [(1, ["row"]), (2, ["row"])]


def test_running_figures_leave_out_answers_to_another_prompt_as_the_summary_does():
    """With an own history the ids may be equal and the prompts not; see `metrics.speedups.paired_total`."""

    def row(method, question, seconds, prompt):
        return TurnRecord(
            "run-1", "tiny", method, "qa", "qa", question, 0, 0, 0,
            prompt_sha256=prompt, output_ids=[5, 6], num_new_tokens=2, prefill_s=0.0, decode_s=seconds,
        )  # fmt: skip

    rows = [row("ar", 1, 2.0, "a"), row("m", 1, 1.0, "a"), row("ar", 2, 2.0, "a"), row("m", 2, 8.0, "b")]
    running = Running("ar", greedy=True)
    last = [running.add(turn) for turn in (rows[:2], rows[2:])][-1]
    wanted = paired_total(pairs(rows[::2], rows[1::2]).pairs, greedy=True)
    assert last["running/m/speedup"] == wanted.value == 2.0
