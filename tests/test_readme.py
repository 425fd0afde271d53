"""What the README shows is true: its commands run and its example method works."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import committed_run

import run as entry
from clasp_core.decoding import Generation, decode
from clasp_core.device import DeviceClock
from clasp_core.drafting import NoDraft
from clasp_core.report import readme, runs
from clasp_core.report.__main__ import main as report
from clasp_core.sampling import Randomness
from clasp_core.tiny import TinyModel

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
RUNS = [command for command in COMMANDS if command.startswith("python run.py")]


def test_the_readme_shows_the_commands_that_users_need():
    assert {"make demo", "make test", "python run.py method=clasp model=llama3-70b"} <= set(COMMANDS)
    assert any(" -m " in command for command in RUNS)


def test_its_table_is_that_of_the_committed_rows():
    (run,) = runs.load([committed_run()])
    assert readme.measured(run, run.summary(), "results/demo.svg") in TEXT
    assert (ROOT / "results/demo.svg").read_text() == readme.drawn(run, run.summary())


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)", TEXT, re.MULTILINE))))
def test_every_make_target_of_the_readme_exists(target):
    """With a rule: make is content with a phony target that has none."""
    assert re.search(rf"^{target}: (?=\S)|^{target}:.*\n\t", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shell_that_expands_brackets_leaves_the_commands_of_the_readme_alone(command):
    assert not any(mark in re.sub(r"'[^']*'", "", command) for mark in "[]*?{}")


def test_another_torch_is_installed_although_the_environment_is_ready(tmp_path):
    """What make would do in a folder whose environment has another torch, or this one, already."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    shown = re.search(r"make setup TORCH='([^']+)'", TEXT)[1]
    assert [shown] != pins
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / f"ready-{pins[0]}").touch()

    def planned(*words):
        done = subprocess.run(["make", "-n", "setup", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    assert "pip install" not in planned()
    assert f"'{shown}'" in planned(f"TORCH={shown}")


@pytest.mark.parametrize("command", RUNS)
def test_every_run_of_the_readme_works_with_the_tiny_model_in_place_of_its_own(command, tmp_path, monkeypatch):
    """Whatever does not fit a six-layer model of 260 tokens or this machine is scaled down; the rest is as shown."""
    model = re.search(r"model=(\S+)", command)
    assert model is None or (ROOT / "conf" / "model" / f"{model[1]}.yaml").is_file()
    small = re.sub(r"model=\S+", "model=tiny", command).replace("spec_bench", "sample").replace("8,15,22", "1,2,3")
    words = shlex.split(re.sub(r"limit=\d+", "", small))[2:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "debug=smoke"])
    entry.main()
    assert list(tmp_path.glob("results/*/tiny/*/summary.json"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m clasp_core.report")])
def test_every_report_of_the_readme_works_on_the_committed_runs(command, tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("figures", "tables", "bench"))
    monkeypatch.chdir(tmp_path)
    report(command.split()[3:])
    assert capsys.readouterr().out


def test_the_example_method_is_lossless_and_drafts():
    scope = {}
    exec(re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], scope)
    node = yaml.safe_load(re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)[1])
    assert node.pop("_target_") == "baselines.every_other.every_other"
    target = TinyModel().load().target
    generation = Generation(24, frozenset())
    answers = []
    for drafter in (NoDraft(), scope["every_other"](**node)):
        drafter.start_stream(target)
        clock = DeviceClock(target.devices, target.device)
        answers.append(decode(target, drafter, [5, 6, 7], generation, Randomness.seeded(0), clock))
    assert answers[0].output_ids == answers[1].output_ids
    assert sum(answers[1].rounds.num_drafted) > 0
