"""The entry point as a user meets it: runs, sweeps, mistakes, kills and resumes; on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

import run as entry
from clasp_core.entry import keys
from clasp_core.entry.building import OWN_PACKAGES, build, build_methods
from clasp_core.store import TEXTS, read_run, read_texts

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("debug=smoke", "task.subtasks=[qa]", "generation.max_new_tokens=8")


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, from an empty folder; gives its exit message (None: success) and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        code = 0
        try:
            entry.main()
        except SystemExit as end:
            code = end.code
        assert code in (0, 2)
        out = capfd.readouterr()
        errors = [line for line in out.err.splitlines() if line.startswith("error: ")]
        return (errors[-1] if errors else None), out

    return call


def folders(root):
    return sorted(path.parent for path in Path(root).glob("results/*/*/*/rows.jsonl"))


def test_a_run_ends_with_the_path_of_its_folder_and_stores_table_rows_and_manifest(command, tmp_path):
    message, out = command(*SMALL)
    assert message is None
    folder = Path(out.out.strip().splitlines()[-1])
    manifest, rows = read_run(folder)
    assert [row.method for row in rows] == ["ar", "clasp"]
    assert manifest.status == "ok"
    assert manifest.end is not None
    assert manifest.git["revision"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["cells"]["clasp"]["qa"]["grade"]["worst"] == "exact"
    assert "overall" in out.out
    json.dumps(manifest.to_json(), allow_nan=False)
    status = json.loads(next(tmp_path.glob("outputs/*/*/status.json")).read_text())
    assert status["status"] == "ok"


def test_a_sweep_gives_one_folder_one_table_and_one_status_per_value(command, tmp_path):
    message, out = command("-m", "method.clasp.skip_ratio=null", "method.clasp.num_skipped=1,3,5", *SMALL)
    assert message is None
    runs = [read_run(folder)[0] for folder in folders(tmp_path)]
    assert sorted(m.config["method"]["clasp"]["num_skipped"] for m in runs) == [1, 3, 5]
    assert len({m.run_id for m in runs}) == 3
    assert out.out.count("overall, 1 of 1 turns") == 3
    assert len(list(tmp_path.glob("multirun/*/*/*/status.json"))) == 3


def test_one_failing_job_of_a_sweep_is_named_and_the_others_run(command, tmp_path):
    message, out = command("-m", "method.clasp.skip_ratio=null", "method.clasp.num_skipped=1,6,2", *SMALL)
    assert "num_skipped is 6; a model of 6 layers takes 1 to 5" in str(message)
    assert "error in job 1" in out.err
    assert len(folders(tmp_path)) == 2
    states = [json.loads(path.read_text())["status"] for path in sorted(tmp_path.glob("multirun/*/*/*/status.json"))]
    assert states == ["ok", "failed", "ok"]


MISTAKES = {
    "method=claspp": "unknown method 'claspp'; did you mean clasp?",
    "model=smolm2-135m": "unknown model 'smolm2-135m'; did you mean smollm2-135m",
    "task=spec-bench": "did you mean spec_bench?",
    "method.clasp.num_skiped=3": "unknown key 'method.clasp.num_skiped'; did you mean method.clasp.num_skipped",
    "generation.max_tokens=3": "did you mean generation.max_new_tokens",
    "+foo=3": "unknown key 'foo'",
    "--seed=3": "written key=value, such as seed=3",
    "seed=abc": "seed=abc: Value 'abc' of type 'str' could not be converted to Integer",
    "method.clasp.interval=abc": "method.clasp.interval is 'abc'; it must be int | null",
    "method.clasp.interval=0": "interval is 0; it must be at least 1",
    "method.clasp.exit_threshold=2": "exit_threshold is 2; it is a probability",
    "method.clasp.max_draft_len=0": "max_draft_len is 0; it must be at least 1",
    "method.clasp.num_skipped=3": "set exactly one of them",
    "method.clasp.skip_ratio=2": "skip_ratio is 2; it must satisfy 0 < skip_ratio < 1",
    "method.clasp.skip_ratio=-1": "skip_ratio is -1; it must satisfy 0 < skip_ratio < 1",
    "method.clasp.skip_ratio=nan": "method.clasp.skip_ratio is nan; it must be a finite number",
    "method.clasp.skip_ratio=inf": "method.clasp.skip_ratio is inf; it must be a finite number",
    "method=layerskip method.layerskip.exit_ratio=nan": "method.layerskip.exit_ratio is nan",
    "method=layerskip method.layerskip.exit_ratio=1": "exit_ratio is 1; it must satisfy 0 < exit_ratio < 1",
    "method.clasp.skip_ratio=0.99": "num_skipped is 6; a model of 6 layers takes 1 to 5",
    "method.clasp.reading.reset=never": "method.clasp.reading.reset is 'never'",
    "method.clasp._target_=os.system": "must lie in clasp_core. or baselines.",
    "method.clasp._target_=clasp_core.nope.X": "_target_ 'clasp_core.nope.X', which does not exist",
    "method=[clasp,clasp]": "method=[clasp,clasp] names clasp twice",
    "task=[sample,sample]": "task=[sample,sample] names sample twice",
    "method=null": "method=null is no choice; name a file of conf/method/",
    "model=null": "model=null is no choice; name a file of conf/model/",
    "model=3": "model=3 is no choice",
    "modle=tiny": "unknown key 'modle'; did you mean model",
    "methd=clasp": "unknown key 'methd'; did you mean method",
    "serach=self_sd": "unknown key 'serach'; did you mean search",
    "model.num_layers=0": "model.num_layers is 0; it must be at least 1",
    "method=oracle reference=none": "method oracle replays the reference's answer, and reference=none",
    "method=self_sd method.self_sd.skip_set={attn:[],mlp:[]}": "skips 0 of 12 sub-layers; it must skip 1 to 11",
    "method=self_sd method.self_sd.skip_set={attn:[0,1,2,3,4,5],mlp:[0,1,2,3,4,5]}": "skips 12 of 12 sub-layers",
    "search=self_sd search.seed=-1": "search.seed is -1; it must lie between 0 and",
    "search=self_sd search.seconds=nan": "search.seconds is nan",
    "search=self_sd search.seconds=-1": "search.seconds is -1",
    "num_threads=0": "num_threads is 0; it must lie between 1 and",
    "num_threads=-1": "num_threads is -1; it must lie between 1 and",
    "num_threads=100000000": "num_threads is 100000000; it must lie between 1 and",
    "warm_up_tokens=0": "warm_up_tokens is 0; it must be at least 1",
    "warm_up_tokens=-2": "warm_up_tokens is -2; it must be at least 1",
    "warm_up_tokens=100000": "warm_up_tokens is 100000; behind a prompt",
    "results_dir=": "results_dir is ''; it must name a folder",
    "task.subtasks=[]": "subtasks is an empty list",
    "generation.temperature=1e-46": "temperature is 1e-46; it must be 0 (greedy) or a number from 1e-06 on",
    "generation.temperature=1e-300": "temperature is 1e-300",
    "generation.temperature=nan": "generation.temperature is nan",
    "~generation": "generation was deleted, and every run needs it",
    "model={a:1}": "model takes the name of a choice: llama",
    "method.clasp=3": "method.clasp has options but is not selected: 3",
    "+foo.x=3": "unknown key 'foo'",
    "+method.foo.x=3": "method.foo has options but is not selected",
    "method=[]": "nothing to run",
    "task=[]": "no questions",
    "task.subtasks=[qaa]": "unknown subtask 'qaa'; did you mean qa?",
    "limit=0": "limit is 0",
    "history=mine": "history is 'mine'",
    "repeats=0": "repeats is 0",
    "generation.temperature=-1": "temperature is -1",
    "generation.top_p=0": "top_p is 0",
    "generation.top_k=-1": "top_k is -1",
    "generation.max_new_tokens=0": "max_new_tokens is 0",
    "generation.max_new_tokens=5000": "exceed the model's context of 2048",
    "model.dtype=float8": "unknown dtype 'float8'",
    "model.device=cuda": "no GPU is visible",
    "model.device=tpu": "unknown device 'tpu'",
    "model.prompt=chatty": "unknown prompt format 'chatty'",
    "resume=nowhere": "nowhere",
    "task.sample.path=nowhere.jsonl": "nowhere.jsonl does not exist",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_clear_line_and_leaves_nothing_behind(command, tmp_path, mistake):
    extra = ("reference=none",) if mistake == "method=[]" else ()
    message, out = command(*SMALL, *mistake.split(), *extra)
    assert isinstance(message, str)
    assert message.startswith("error: ")
    assert "\n" not in message
    assert MISTAKES[mistake] in message
    assert "Traceback" not in out.err
    assert folders(tmp_path) == []


SWEPT = {
    "method=[clasp,clasp],[pld]": "names clasp twice",
    "model=tiny,null": "model=null is no choice",
}


@pytest.mark.parametrize("mistake", SWEPT)
def test_a_mistake_in_a_sweep_ends_in_one_clear_line(command, tmp_path, mistake):
    message, _ = command("-m", *SMALL, "limit=0", mistake)
    assert SWEPT[mistake] in message
    assert folders(tmp_path) == []


def test_m_may_stand_behind_the_options(command, tmp_path):
    message, _ = command(*SMALL, "-m", "seed=1,2")
    assert message is None
    assert sorted(read_run(folder)[0].config["seed"] for folder in folders(tmp_path)) == [1, 2]


def test_help_lists_the_choices_and_no_file_that_only_others_include(command):
    message, out = command("--help")
    assert message is None
    assert "method: ar, clasp" in out.out
    assert "smollm2-135m-deep" in out.out
    assert "max_new_tokens" in out.out
    assert "_hub" not in out.out


@pytest.mark.parametrize("where", ["run_job", "main"])
def test_ctrl_c_before_anything_is_stored_ends_in_one_line(tmp_path, monkeypatch, capfd, where):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL])
    monkeypatch.setattr(entry, "build_questions" if where == "run_job" else "check_choices", stop)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
    assert (
        capfd.readouterr().err == "error: interrupted before anything was stored; start again with the same command\n"
    )
    assert folders(tmp_path) == []


def test_ctrl_c_ends_a_sweep_and_not_only_its_job(tmp_path, monkeypatch, capfd):
    begun = []

    def stop(runner, *arguments):
        begun.append(runner)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["run.py", "-m", *SMALL, "seed=1,2,3"])
    monkeypatch.setattr(entry.Runner, "run", stop)
    with pytest.raises(SystemExit) as end:
        entry.main()
    (folder,) = folders(tmp_path)
    assert end.value.code == 130
    assert len(begun) == 1
    assert read_run(folder)[0].status == "interrupted"
    assert f"error: interrupted; go on with the same command and resume={os.path.relpath(folder)}" in (
        capfd.readouterr().err.splitlines()
    )


def test_the_draft_models_weights_are_part_of_what_decides_the_rows(command, tmp_path):
    words = ("method=sps", "method.sps.model._target_=clasp_core.tiny.TinyModel")
    absent = [f"~method.sps.model.{key}" for key in ("gguf", "cache_dir", "sha256")]
    for seed in (1, 2):
        message, _ = command(*SMALL, *words, *absent, f"+method.sps.model.seed={seed}")
        assert message is None
    first, second = (read_run(folder)[0] for folder in folders(tmp_path))
    fingerprints = [m.config["described"]["sps"]["draft_model"] for m in (first, second)]
    assert fingerprints[0] != fingerprints[1]
    assert first.fingerprint == second.fingerprint


def test_an_option_of_a_method_that_is_not_selected_is_named_as_such(command):
    message, _ = command(*SMALL, "method=hf_generate", "method.clasp.interval=3")
    assert (
        message == "error: method.clasp.interval belongs to method=clasp, which is not selected; add it to the command"
    )


def start(tmp_path, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ("debug=smoke", "limit=4", "generation.max_new_tokens=32", "results_dir=results", *words)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_rows(tmp_path, num_rows, process):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if any((folder / "rows.jsonl").read_bytes().count(b"\n") >= num_rows for folder in folders(tmp_path)):
            return
        time.sleep(0.01)
    raise AssertionError(f"no {num_rows} rows in time: {process.communicate()}")


def answers(folder):
    return {row.key: (row.output_ids, row.prompt_sha256, row.rounds.num_accepted) for row in read_run(folder)[1]}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_rows_of_an_uninterrupted_one(command, tmp_path, how):
    process = start(tmp_path)
    seen, turn_in_flight = 6, 2
    wait_for_rows(tmp_path, seen, process)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    stopped = folders(tmp_path)[0]
    num_before = len(read_run(stopped)[1])
    assert seen - turn_in_flight <= num_before < 56  # a Ctrl-C while the rows are synced takes them back
    if how == signal.SIGINT:
        assert f"resume={os.path.relpath(stopped, tmp_path)}" in errors
        assert read_run(stopped)[0].status == "interrupted"
        assert {str(i) for row in read_run(stopped)[1] for i in row.output_ids} <= set(read_texts(stopped)["pieces"])
        assert "Traceback" not in errors
    words = ("debug=smoke", "limit=4", "generation.max_new_tokens=32")
    message, _ = command(*words, f"resume={stopped}")
    assert message is None
    message, _ = command(*words)
    assert message is None
    resumed, whole = stopped, next(folder for folder in folders(tmp_path) if folder != stopped)
    assert answers(resumed) == answers(whole)
    assert read_texts(resumed) == read_texts(whole)
    assert read_texts(whole)
    assert (resumed / "rows.jsonl").read_bytes().count(b"\n") == 56
    assert read_run(resumed)[0].status == "ok"


def test_a_folder_of_another_configuration_is_not_resumed_and_the_difference_is_named(command, tmp_path):
    command(*SMALL)
    folder = folders(tmp_path)[0]
    before = (folder / "rows.jsonl").read_bytes()
    message, _ = command(*SMALL, "method.clasp.max_draft_len=3", f"resume={folder}")
    assert "method.clasp.max_draft_len: 12 against 3" in message
    assert (folder / "rows.jsonl").read_bytes() == before
    message, _ = command(*SMALL, f"resume={folder}", "results_dir=elsewhere")
    assert message is None
    assert (folder / "rows.jsonl").read_bytes() == before


def skip_set_file(path, attn):
    """A stored set for the tiny model, as the search writes it."""
    from clasp_core.skip import LayerSkip
    from clasp_core.tiny import TinyModel

    model = TinyModel().load("compiled")
    row = {
        "schema": 1,
        "model": {
            "name": "tiny", "num_layers": model.target.num_layers, "dtype": model.info["dtype"],
            "fingerprint": model.info["fingerprint"],
        },
        "skip": {
            "attn": attn, "mlp": [2], "code": LayerSkip.sublayers(model.target.num_layers, attn=attn, mlp=[2]).code,
        },
        "search": {"seconds": 1.0, "num_evaluations": 1},
    }  # fmt: skip
    path.write_text(json.dumps(row))


def test_a_resume_asks_what_is_in_the_skip_set_file_and_not_where_it_lies(command, tmp_path, monkeypatch):
    skip_set_file(tmp_path / "set.json", [1, 3])
    words = (*SMALL, "method=[self_sd]")
    message, _ = command(*words, "method.self_sd.skip_set=set.json")
    assert message is None
    folder = folders(tmp_path)[0]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    message, _ = command(*words, "method.self_sd.skip_set=../set.json", f"resume={folder}")
    assert message is None
    before = (folder / "rows.jsonl").read_bytes()
    skip_set_file(tmp_path / "set.json", [1, 4])
    message, _ = command(*words, "method.self_sd.skip_set=../set.json", f"resume={folder}")
    assert "skip_sets_sha256.self_sd" in message
    message, _ = command(*words, "method.self_sd.skip_set={attn: [1], mlp: [2]}", f"resume={folder}")
    assert "was made with another configuration" in message
    assert (folder / "rows.jsonl").read_bytes() == before


def test_failed_turns_make_the_run_fail_loudly(command, tmp_path, monkeypatch):
    from clasp_core.drafting import SelfDrafter

    def broken(self, last_token, position, limit):
        if position > 300 and self._turn.generation.stop_ids:  # the rag prompt, and not in the warm-up
            raise RuntimeError("planted")
        return entry_propose(self, last_token, position, limit)

    entry_propose = SelfDrafter.propose
    monkeypatch.setattr(SelfDrafter, "propose", broken)
    message, out = command("debug=smoke", "task.subtasks=[qa,rag]", "generation.max_new_tokens=8")
    assert "1 turn(s) failed" in message
    assert "planted" in out.out
    assert read_run(folders(tmp_path)[0])[0].status == "failed"


def test_text_is_kept_beside_the_rows_unless_told_otherwise_and_a_resume_may_change_that(command, tmp_path):
    command(*SMALL, "store_text=false")
    folder = folders(tmp_path)[0]
    rows = (folder / "rows.jsonl").read_bytes()
    assert not (folder / TEXTS).exists()
    assert command(*SMALL, f"resume={folder}")[0] is None
    found = read_texts(folder)
    assert (folder / "rows.jsonl").read_bytes() == rows
    row = read_run(folder)[1][1]
    assert {str(i) for i in row.output_ids} <= set(found["pieces"])
    assert {str(i) for drafted in row.rounds.drafted_ids for i in drafted} <= set(found["pieces"])
    assert found["questions"]["qa"][str(row.question_id)][0]


def test_a_lossy_method_makes_the_run_fail_loudly_and_its_table_is_printed(command, tmp_path, monkeypatch):
    from clasp_core import decoding

    cut = decoding._cut

    def lossy(block, output, generation):
        kept = cut(block, output, generation)
        return kept if len(block) == 1 else [(token + 1) % 200 + 4 for token in kept]

    monkeypatch.setattr(decoding, "_cut", lossy)
    message, out = command(*SMALL, "method.clasp.exit_threshold=0")
    row = next(row for row in read_run(folders(tmp_path)[0])[1] if row.method == "clasp")
    assert "clasp is not lossless: its answer differs from ar's on 1 turn(s)" in message
    assert f"the first is qa, question {row.question_id}, turn 0" in message
    assert "\n" not in message
    assert "mismatch" in out.out
    assert read_run(folders(tmp_path)[0])[0].status == "failed"


def test_paths_are_taken_from_the_launch_folder_and_defaults_from_the_repository(command, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["Where?"]}\n')
    message, _ = command("debug=smoke", "task.sample.path=own.jsonl", "generation.max_new_tokens=4")
    assert message is None
    manifest, rows = read_run(folders(tmp_path)[0])
    assert {row.question_id for row in rows} == {1}
    assert str(ROOT) not in json.dumps(manifest.to_json())


@pytest.mark.parametrize("path", sorted(ROOT.glob("conf/*/[!_]*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_yaml_names_a_class_of_this_project_whose_arguments_fit(path):
    def check(node):
        if not isinstance(node, dict):
            return
        if "_target_" in node:
            assert node["_target_"].startswith(OWN_PACKAGES)
            hydra.utils.get_object(node["_target_"])
        for child in node.values():
            check(child)

    check(yaml.safe_load(path.read_text()))
    composed = {"method": f"method={path.stem}", "model": f"model={path.stem}", "task": f"task=[{path.stem}]"}
    if override := composed.get(path.parent.name):
        keys.register()
        with hydra.initialize_config_dir(str(keys.CONF), version_base="1.3"):
            cfg = hydra.compose("config", overrides=[override])
        config = OmegaConf.to_container(cfg, resolve=True)
        if path.parent.name == "method":
            assert path.stem in config["method"]
            build_methods(config)
        elif path.parent.name == "model":
            build(config["model"], "model")
