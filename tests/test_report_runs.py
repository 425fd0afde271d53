"""Finding and reading run folders."""

import pytest
from stored_runs import store
from test_metrics import ar, row

from clasp_core.errors import UserError
from clasp_core.report.runs import load, run_folders

ROWS = [ar(0), row("clasp", 0)]


def test_run_folders_are_found_below_a_path_and_by_their_own_name(tmp_path):
    late, early = store(tmp_path, ROWS, "run-2"), store(tmp_path, ROWS, "run-1", "other")
    assert run_folders(tmp_path) == [early, late]
    assert run_folders(late) == [late]
    with pytest.raises(UserError, match="nowhere is no folder"):
        run_folders(tmp_path / "nowhere")


def test_a_run_is_loaded_once_however_often_it_is_named(tmp_path):
    folder = store(tmp_path, ROWS)
    (run,) = load([folder, tmp_path, folder / ".." / "run-1"])
    assert (run.folder, run.model, run.machine, run.methods, run.tasks) == (
        folder, "llama3-8b", "xeon-2c", ["clasp"], ["qa"],
    )  # fmt: skip
    assert (run.greedy, run.reference, run.question_files) == (True, "ar", ["spec_bench"])
    assert [each.method for each in run.of("clasp")] == ["clasp"]
    assert run.c_bytes("clasp") is None


def test_an_unreadable_run_is_skipped_with_a_line_unless_it_is_named(tmp_path, capsys):
    good, bad = store(tmp_path, ROWS, "run-1"), store(tmp_path, ROWS, "run-2")
    (bad / "rows.jsonl").write_text("not json\n")
    assert [run.folder for run in load([tmp_path])] == [good]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipped: ")
    assert "run-2/rows.jsonl, line 1" in line
    with pytest.raises(UserError, match="not JSON"):
        load([tmp_path, bad])


def test_too_few_runs_are_an_error_where_some_are_needed(tmp_path):
    assert load([tmp_path], at_least=0) == []
    with pytest.raises(UserError, match="0 readable runs under"):
        load([tmp_path])
