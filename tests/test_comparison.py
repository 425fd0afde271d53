"""`report wandb`: runs side by side from their folders alone, and the W&B report that would be saved."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import committed_run

from clasp_core.report.__main__ import main
from clasp_core.store import RunStore, read_run

REAL = committed_run()
"""AR and CLaSp on `smollm2-135m-deep`, all greedy answers equal."""
GROUP = "2026-11-29_20-00-00-abc123"
TRACKER = {
    "mode": "auto", "project": "p", "entity": None, "group": GROUP, "job_type": "j", "tags": [], "dir": None,
    "knock_timeout_s": 0.2, "init_timeout_s": 1.0, "finish_timeout_s": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """From an empty folder, and without a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()  # its settings are this environment's


def twin(name, num_skipped=20, tracker=TRACKER, **changes):
    """A run folder below `results`: the committed run's rows under another id and configuration."""
    manifest, rows = read_run(REAL)
    config = json.loads(json.dumps({**manifest.config, "tracker": tracker}))
    config["method"]["clasp"]["num_skipped"] = num_skipped
    run_id = f"20261129T200000Z-{name}"
    manifest = replace(manifest, **{"run_id": run_id, "config": config, **changes})
    with RunStore.create("results", "machine", "model", manifest) as store:
        store.append([replace(row, run_id=run_id) for row in rows])
    return store.folder


def lines(name):
    (path,) = Path("results/comparisons").glob(f"*/{name}.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_group_is_compared_with_the_numbers_of_each_runs_own_summary(capfd):
    twin("aaaa"), twin("bbbb", num_skipped=30), twin("cccc", tracker={**TRACKER, "group": "other"})
    main(["wandb", GROUP])
    summary = json.loads((REAL / "summary.json").read_text())
    found = {(line["run"], line["task"], line["estimator"]): line for line in lines("estimators")}
    assert {run for run, _, _ in found} == {"aaaa", "bbbb"}
    for (_, task, label), line in found.items():
        interval = summary["cells"]["clasp"][task]["speedup"][label]
        assert [float(line[part]) for part in ("value", "low", "high", "n")] == [
            interval[part] for part in ("value", "low", "high", "n")
        ]
    assert {label for _, _, label in found} == set(summary["cells"]["clasp"]["overall"]["speedup"])
    ladder = next(line for line in lines("ladder") if line["task"] == "overall")
    assert float(ladder["measured"]) == summary["ladders"]["clasp"]["overall"]["measured"]
    graded = summary["cells"]["clasp"]["overall"]["grade"]
    assert int(lines("losslessness")[0]["exact"]) == graded["counts"]["exact"]
    assert lines("config") == [{"key": "method.clasp.num_skipped", "aaaa": "20", "bbbb": "30"}]
    assert Path(capfd.readouterr().out.splitlines()[-1]) == Path("results/comparisons/2026-11-29-20-00-00-abc123")


def test_the_text_shows_intervals_and_what_differs():
    first, second = twin("aaaa"), twin("bbbb", num_skipped=30)
    main(["wandb", str(first), str(second), "--out", "there"])
    text = Path("there/comparison.md").read_text()
    interval = json.loads((REAL / "summary.json").read_text())["cells"]["clasp"]["overall"]["speedup"]["paired_total"]
    assert f"{interval['value']:.2f} [{interval['low']:.2f},{interval['high']:.2f}]" in text
    assert "| method.clasp.num_skipped | 20 | 30 |" in text
    assert "FORCED" not in text


def test_runs_of_other_fingerprints_are_refused_by_the_fields_name_and_stamped_if_forced(capfd):
    fingerprint = read_run(REAL)[0].fingerprint
    twin("aaaa"), twin("bbbb", fingerprint={**fingerprint, "torch": "9.9"})
    with pytest.raises(SystemExit):
        main(["wandb", GROUP])
    assert "torch: '9.9' against" in capfd.readouterr().err
    assert not Path("results/comparisons").exists()
    main(["wandb", GROUP, "--force"])
    (path,) = Path("results/comparisons").glob("*/comparison.md")
    assert "FORCED: the fingerprints of aaaa and bbbb differ in torch" in path.read_text()


def test_a_run_that_did_not_end_well_is_listed_and_not_compared():
    twin("aaaa"), twin("bbbb", status="failed", fingerprint={"torch": "of no matter"})
    main(["wandb", GROUP])
    assert {line["run"] for line in lines("estimators")} == {"aaaa"}
    assert [(line["run"], line["status"], line["ar_tokens_per_s"] == "") for line in lines("runs")] == [
        ("aaaa", "ok", False),
        ("bbbb", "failed", True),
    ]
    (path,) = Path("results/comparisons").glob("*/comparison.md")
    assert "bbbb ended as failed and is not compared" in path.read_text()


def test_runs_that_answered_other_questions_are_stamped():
    config = {**read_run(REAL)[0].config, "questions_sha256": "other"}
    first, second = twin("aaaa"), twin("bbbb", config=config)
    main(["wandb", str(first), str(second), "--out", "there"])
    assert "bbbb answered other questions than aaaa" in Path("there/comparison.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["elsewhere"], f"no run under results is of group 'elsewhere'; groups there: {GROUP}"),
     (["results", "elsewhere"], "'elsewhere' is no folder; name run folders, or one group alone"),
     (["results"], "none of the 1 runs of results ended well")],
)  # fmt: skip
def test_a_mistake_ends_in_one_line(capfd, words, message):
    twin("aaaa", status="interrupted")
    with pytest.raises(SystemExit) as end:
        main(["wandb", *words])
    assert end.value.code == 2
    assert message in capfd.readouterr().err


def test_the_report_is_built_for_exactly_these_runs_and_said_not_to_be_saved(capfd):
    pytest.importorskip("wandb_workspaces", exc_type=ImportError)
    twin("aaaa"), twin("bbbb", num_skipped=30)
    main(["wandb", GROUP])
    assert "W&B report: not saved on a server (WANDB_MODE=offline)" in capfd.readouterr().err
    (path,) = Path("results/comparisons").glob("*/workspace.json")
    report = json.loads(path.read_text())
    assert report["displayName"] == f"CLaSp: {GROUP}"
    text = json.dumps(report)
    for word in (
        "20261129T200000Z-aaaa",
        "20261129T200000Z-bbbb",
        "running/clasp/speedup",
        "overall/clasp/paired_total",
    ):
        assert word in text
    kinds = [block["type"] for block in report["spec"]["blocks"]]
    assert {"markdown-block", "panel-grid"} <= set(kinds)


@pytest.mark.parametrize(
    ("missing", "tracker", "line"),
    [("wandb_workspaces.reports.v2", TRACKER, "is missing; pip install 'clasp-bench[report]'"),
     (None, {}, "none of these runs was tracked")],
)  # fmt: skip
def test_without_the_package_or_a_tracked_run_the_files_are_complete(capfd, monkeypatch, missing, tracker, line):
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    folder = twin("aaaa", tracker=tracker)
    main(["wandb", str(folder), "--out", "there"])
    assert line in capfd.readouterr().err
    assert sorted(path.name for path in Path("there").iterdir()) == [
        "comparison.md", "config.csv", "estimators.csv", "ladder.csv", "losslessness.csv", "runs.csv",
    ]  # fmt: skip
