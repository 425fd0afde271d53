"""The run folder: what was finished is there once, whatever happened, and mixtures are refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clasp_core import store as module
from clasp_core.errors import UserError
from clasp_core.provenance import config_hash
from clasp_core.records import Manifest, RoundTrace, TurnRecord
from clasp_core.store import RunStore, new_run_id, read_run, read_runs

ROOT = Path(__file__).resolve().parents[1]
CONFIG: dict[str, Any] = {"method": {"clasp": {"num_skipped": 4}}, "tracker": {"mode": "offline"}}
FINGERPRINT: dict[str, Any] = {"machine": {"cpu": "xeon", "num_cores": 2}, "torch": "2.13.0"}
IGNORE = ["tracker"]
HASH = config_hash(CONFIG, IGNORE)


def manifest(run_id: str = "run-1", **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "run_id": run_id, "status": "running", "reference": "ar", "methods": ["ar", "clasp"], "config": CONFIG,
        "config_hash": HASH, "command": ["run.py"], "git": {}, "versions": {}, "fingerprint": FINGERPRINT,
        "model": {"label": "tiny"}, "start": "2026-11-29T18:00:00Z",
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def row(question_id: int = 1, method: str = "ar", run_id: str = "run-1", error: str | None = None) -> TurnRecord:
    record = TurnRecord(run_id, "tiny", method, "qa", "qa", question_id, 0, 0, 0, error=error)
    if error is None:
        record.output_ids, record.num_new_tokens, record.prefill_s, record.decode_s = [5, 6, 7], 3, 0.25, 0.5
        record.rounds = RoundTrace([3], [1], [2], [3], [0], [0.1], [0.2], [0.0], ["a:1,2"])
    return record


def create(tmp_path: Path, *rows: TurnRecord, run_id: str = "run-1", **changes: Any) -> Path:
    """A closed run folder with these rows, one append each."""
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest(run_id, **changes)) as store:
        for record in rows:
            store.append([record])
        return store.folder


def resume(folder: Path, **changes: Any) -> RunStore:
    arguments: dict[str, Any] = {"config_hash": HASH, "fingerprint": FINGERPRINT, "config": CONFIG, "ignore": IGNORE}
    return RunStore.resume(folder, **{**arguments, **changes})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_rows_come_back_equal(tmp_path: Path) -> None:
    written = [row(1), row(1, "clasp"), row(2), row(2, "clasp", error="out of memory: \u2028 \udcff")]
    folder = create(tmp_path, *written)
    stored, rows = read_run(folder)
    assert folder == tmp_path / "xeon-2c" / "tiny" / "run-1"
    assert stored == manifest()
    assert rows == written


def test_run_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_run_id() for _ in range(200)]
    assert len(set(ids)) == 200
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}", run_id) for run_id in ids)


def test_folder_is_never_shared_by_two_runs(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1))
    with pytest.raises(UserError, match="run-1 exists"):
        RunStore.create(tmp_path, "xeon-2c", "tiny", manifest())
    assert len(read_run(folder)[1]) == 1


def test_names_with_separators_stay_inside_the_results_folder(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, "a/../../b", "org/Model-7B", manifest()) as store:
        assert store.folder == tmp_path / "a-..-..-b" / "org-model-7b" / "run-1"


def test_results_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make .*set results_dir"):
        RunStore.create(tmp_path / "file", "xeon-2c", "tiny", manifest())


def test_last_manifest_line_counts_and_earlier_ones_stay(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        store.write_manifest(manifest(status="ok", end="2026-11-29T19:00:00Z"))
    assert read_run(store.folder)[0].status == "ok"
    assert [line["status"] for line in lines(store.folder / "manifest.jsonl")] == ["running", "ok"]


def test_rows_of_a_turn_are_one_write_that_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    write, fsync = os.write, os.fsync

    def counted_write(descriptor: int, data: bytes) -> int:
        calls.append("write")
        return write(descriptor, data)

    def counted_fsync(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        monkeypatch.setattr(os, "write", counted_write)
        monkeypatch.setattr(os, "fsync", counted_fsync)
        store.append([row(1), row(1, "clasp"), row(1, "swift")])
        monkeypatch.undo()
        assert calls == ["write", "fsync"]
        assert len(read_run(store.folder)[1]) == 3


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        store.append([row(1), row(1, "clasp")])
        monkeypatch.undo()
    assert read_run(store.folder)[1] == [row(1), row(1, "clasp")]


def test_failed_write_is_taken_back_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full_disk(descriptor: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) - 50])

    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        store.append([row(1)])
        monkeypatch.setattr(os, "write", full_disk)
        with pytest.raises(UserError, match="No space left"):
            store.append([row(2)])
        monkeypatch.undo()
        assert read_run(store.folder) == (manifest(), [row(1)])
        store.append([row(2)])
    assert read_run(store.folder)[1] == [row(1), row(2)]


def test_finished_turn_is_never_written_again(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        store.append([row(1)])
        for again in ([row(1)], [row(2), row(2)], [row(3), row(1, error="late")]):
            with pytest.raises(UserError, match=r"has row .* already"):
                store.append(again)
    assert read_run(store.folder)[1] == [row(1)]


def test_row_or_manifest_of_another_run_is_refused_by_the_writer(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        with pytest.raises(ValueError, match="'run-2'"):
            store.append([row(1, run_id="run-2")])
        with pytest.raises(ValueError, match="'run-2'"):
            store.write_manifest(manifest("run-2"))
    assert read_run(store.folder) == (manifest(), [])


def test_nan_is_never_stored(tmp_path: Path) -> None:
    broken = row(2)
    broken.decode_s = float("nan")
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        store.write_summary({"speedup": 1.5, "rows": [{"mat": None}]})
        with pytest.raises(ValueError, match="JSON"):
            store.append([row(1), broken])
        with pytest.raises(ValueError, match="JSON"):
            store.write_summary({"speedup": float("inf")})
    assert read_run(store.folder)[1] == []
    assert json.loads((store.folder / "summary.json").read_text()) == {"speedup": 1.5, "rows": [{"mat": None}]}
    assert sorted(path.name for path in store.folder.iterdir()) == ["manifest.jsonl", "rows.jsonl", "summary.json"]


def test_interrupted_summary_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, target: object) -> None:
        raise KeyboardInterrupt

    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        store.write_summary({"n": 1})
        monkeypatch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.write_summary({"n": 2})
    assert json.loads((store.folder / "summary.json").read_text()) == {"n": 1}
    assert len(list(store.folder.iterdir())) == 3


def test_resume_knows_what_is_done_and_retries_errors(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1), row(2, error="first"), row(3, error="only"))
    with resume(folder) as store:
        assert store.done == {row(1).key}
        store.append([row(2, error="second")])
        store.append([row(2)])
        with pytest.raises(UserError, match="already"):
            store.append([row(1)])
    assert read_run(folder)[1] == [row(1), row(3, error="only"), row(2)]
    assert len(lines(folder / "rows.jsonl")) == 5


def test_what_was_found_out_late_is_read_with_the_row(tmp_path: Path) -> None:
    found = row(1, "clasp")
    found.first_divergence, found.divergence_gap, found.divergence_bound = 1, 0.5, 0.25
    folder = create(tmp_path, row(1), row(1, "clasp"), late_divergences=[found.late_divergence()])
    assert read_run(folder)[1] == [row(1), found]
    other = create(tmp_path / "b", row(1), late_divergences=[found.late_divergence()])
    with pytest.raises(UserError, match=r"manifest.jsonl: late_divergences is damaged \(KeyError"):
        read_run(other)


def test_last_error_of_a_turn_counts(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1, error="first"), row(1, error="second"))
    assert read_run(folder)[1] == [row(1, error="second")]


def test_resume_ignores_settings_that_do_not_decide_rows(tmp_path: Path) -> None:
    config = {**CONFIG, "tracker": {"mode": "online"}}
    resume(create(tmp_path), config=config, config_hash=config_hash(config, IGNORE)).close()


def test_resume_names_the_setting_that_differs(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1))
    config = {"method": {"clasp": {"num_skipped": 5}}, "tracker": {"mode": "online"}, "limit": 3}
    with pytest.raises(UserError) as caught:
        resume(folder, config=config, config_hash=config_hash(config, IGNORE))
    assert "(limit: None against 3, method.clasp.num_skipped: 4 against 5)" in str(caught.value)
    with pytest.raises(UserError, match=f"hash {HASH}, now v9:0"):
        resume(folder, config=None, config_hash="v9:0")


def test_resume_names_the_part_of_the_machine_that_differs(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1))
    with pytest.raises(UserError, match=r"machine.num_cores: 2 against 64"):
        resume(folder, fingerprint={**FINGERPRINT, "machine": {"cpu": "xeon", "num_cores": 64}})


def test_resume_of_no_run_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*manifest.jsonl"):
        resume(tmp_path / "absent")
    with pytest.raises(UserError, match=r"cannot read .*manifest.jsonl"):
        resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        with pytest.raises(UserError, match="is being written by another process"):
            resume(store.folder)
        store.append([row(1)])
        assert read_run(store.folder)[1] == [row(1)]
    resume(store.folder).close()


def test_second_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from clasp_core.store import RunStore; from clasp_core.errors import UserError\n"
        "try: RunStore.resume(sys.argv[1], sys.argv[2], eval(sys.argv[3]))\n"
        "except UserError as error: sys.exit('refused' if 'another process' in str(error) else str(error))"
    )
    with RunStore.create(tmp_path, "xeon-2c", "tiny", manifest()) as store:
        command = [sys.executable, "-c", code, str(store.folder), HASH, repr(FINGERPRINT)]
        blocked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert blocked.stderr.strip() == "refused"
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def test_failed_resume_gives_up_its_lock(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1))
    content = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").write_bytes(b"garbage\n")
    with pytest.raises(UserError, match="line 1: not JSON"):
        resume(folder)
    (folder / "rows.jsonl").write_bytes(content)
    resume(folder).close()


def test_cut_at_any_byte_loses_the_torn_line_only(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1), row(2))
    content = (folder / "rows.jsonl").read_bytes()
    first = content.index(b"\n") + 1
    for size in range(first, len(content)):
        (folder / "rows.jsonl").write_bytes(content[:size])
        stored, rows = read_run(folder)
        assert rows == [row(1)]
        assert len(stored.notes) == (size > first)
        with resume(folder) as store:
            assert store.done == {row(1).key}
            store.append([row(2)])
        assert (folder / "rows.jsonl").read_bytes() == content


def test_torn_manifest_line_leaves_the_one_before(tmp_path: Path) -> None:
    folder = create(tmp_path)
    with (folder / "manifest.jsonl").open("a") as file:
        file.write('{"run_id": "run-1", "sta')
    stored, _ = read_run(folder)
    assert stored.status == "running"
    assert stored.notes == ["the torn last line of manifest.jsonl (24 bytes) was left out"]
    with resume(folder) as store:
        store.write_manifest(manifest(status="ok"))
    assert read_run(folder)[0] == manifest(status="ok")


KILLED = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from test_store import RunStore, manifest, row
with RunStore.create(Path(sys.argv[1]), "xeon-2c", "tiny", manifest()) as store:
    for number in range(100_000):
        records = [row(number), row(number, "clasp")]
        records[1].output_ids, records[1].num_new_tokens = list(range(3000)), 3000
        records[1].rounds.num_emitted = [2999]
        store.append(records)
        print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7])
def test_killed_writer_leaves_every_finished_turn_readable(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        printed = [int(child.stdout.readline()) for _ in range(after)]
        child.send_signal(signal.SIGKILL)
        printed += [int(text) for text in child.stdout.read().split()]
    folder = tmp_path / "xeon-2c" / "tiny" / "run-1"
    keys = {record.key for record in read_run(folder)[1]}
    assert child.returncode == -signal.SIGKILL
    assert {record.key for number in printed for record in (row(number), row(number, "clasp"))} <= keys
    assert len(keys) <= 2 * (len(printed) + 1)
    with resume(folder) as store:
        assert store.done == keys
        store.append([row(100_001)])
    assert len(read_run(folder)[1]) == len(keys) + 1


def damaged(tmp_path: Path, *more: str) -> Path:
    folder = create(tmp_path, row(1))
    with (folder / "rows.jsonl").open("a") as file:
        file.writelines(text + "\n" for text in more)
    return folder


def test_reader_refuses_a_finished_turn_twice(tmp_path: Path) -> None:
    for index, again in enumerate((row(1), row(1, error="late"))):
        folder = damaged(tmp_path / str(index), json.dumps(again.to_json()))
        with pytest.raises(UserError, match=r"rows.jsonl, line 2: second row of \('ar', 'qa', 1, 0, 0\)"):
            read_run(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(row(2, run_id="run-2").to_json()), "line 2: row of run 'run-2' in the folder of run 'run-1'"),
        (json.dumps({**row(2).to_json(), "schema": 2}), "line 2: row has schema 2, this version reads 1"),
        ("{}", "line 2: row has schema None"),
        ('{"schema": 1}', "line 2: .*missing"),
        ('{"cut', "line 2: not JSON"),
        ("7", "line 2: not an object: 7"),
    ],
)
def test_reader_refuses_a_foreign_or_damaged_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_run(damaged(tmp_path, text, json.dumps(row(3).to_json())))


ROUNDS = row().to_json()["rounds"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_ids": "abc"}, "output_ids is 'abc'; it must be list"),
        ({"output_ids": [5, "6", 7]}, "output_ids is"),
        ({"output_ids": [5, True, 7]}, "output_ids is"),
        ({"question_id": "1"}, "question_id is '1'; it must be int"),
        ({"prefill_s": float("nan")}, "prefill_s is nan"),
        ({"rounds": 3}, "rounds is 3; it must be RoundTrace"),
        ({"rounds": {**ROUNDS, "odd": [1]}}, "rounds is"),
        ({"num_new_tokens": 4}, "num_new_tokens is 4, but output_ids holds 3 tokens"),
        ({"output_ids": None}, "num_new_tokens is 3, but output_ids holds None"),
        (
            {"output_ids": [5, 6], "num_new_tokens": 2},
            "rounds emitted 2 tokens behind the first, but output_ids holds 2",
        ),
        ({"rounds": {**ROUNDS, "draft_s": [0.1, 0.2]}}, "not equally long: .*'draft_s': 2"),
        ({"error": "late"}, "an error and an answer"),
    ],
)
def test_reader_refuses_a_row_whose_values_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = damaged(tmp_path, json.dumps({**row(2).to_json(), **change}))
    for read in (read_run, resume):
        with pytest.raises(UserError, match=f"rows.jsonl, line 2: .*{message}"):
            read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": None}, "fingerprint is None; it must be dict"),
        ({"notes": None}, "notes is None; it must be list"),
        ({"config": 3}, "config is 3; it must be dict"),
        ({"methods": "ar"}, "methods is 'ar'"),
        ({"num_failed": "no"}, "num_failed is 'no'; it must be int"),
    ],
)
def test_reader_refuses_a_damaged_manifest(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = create(tmp_path, row(1))
    (folder / "manifest.jsonl").write_text(json.dumps({**manifest().to_json(), **change}) + "\n")
    for read in (read_run, resume):
        with pytest.raises(UserError, match=f"manifest.jsonl, line 1: .*{message}"):
            read(folder)


def test_resume_refuses_a_row_that_is_not_planned(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1), row(7))
    with pytest.raises(UserError, match=r"rows.jsonl, line 2: row \('ar', 'qa', 7, 0, 0\) answers nothing"):
        resume(folder, planned={row(1).key, row(2).key})
    resume(folder, planned={row(1).key, row(7).key}).close()


def test_reader_refuses_a_manifest_of_another_schema(tmp_path: Path) -> None:
    folder = create(tmp_path, schema=2)
    with pytest.raises(UserError, match="manifest has schema 2"):
        read_run(folder)


def test_run_that_never_started_is_a_user_error(tmp_path: Path) -> None:
    folder = create(tmp_path)
    (folder / "manifest.jsonl").write_text('{"torn')
    with pytest.raises(UserError, match="never started"):
        read_run(folder)


def test_runs_of_one_fingerprint_are_read_together(tmp_path: Path) -> None:
    folders = [create(tmp_path, row(1, run_id=name), run_id=name) for name in ("run-1", "run-2")]
    assert [stored.run_id for stored, _ in read_runs(folders)] == ["run-1", "run-2"]
    assert read_runs([]) == []


def test_runs_of_two_fingerprints_are_refused_by_field(tmp_path: Path) -> None:
    first = create(tmp_path, run_id="run-1")
    second = create(tmp_path, run_id="run-2", fingerprint={**FINGERPRINT, "torch": "2.6.0"})
    with pytest.raises(UserError, match=r"run-2 and .*run-1 cannot be mixed.*\(torch: '2.6.0' against '2.13.0'\)"):
        read_runs([first, second])


def test_run_given_twice_is_not_counted_twice(tmp_path: Path) -> None:
    folder = create(tmp_path, row(1))
    with pytest.raises(UserError, match="given twice"):
        read_runs([folder, str(folder)])


def test_file_names_are_the_documented_ones() -> None:
    assert (module.MANIFEST, module.ROWS, module.SUMMARY) == ("manifest.jsonl", "rows.jsonl", "summary.json")
