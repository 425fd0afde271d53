"""The machine's bandwidth as a condition of a run: what it is, when it is unknown, and what it leaves alone."""

import sys
from itertools import count

import pytest
import torch
from conftest import make_target

import run as entry
from clasp_core import probe
from clasp_core.store import read_run
from clasp_core.timings import READ, Timing

SMALL = ("debug=smoke", "task.subtasks=[qa]", "generation.max_new_tokens=8")


class TwoSeconds:
    """A clock that moves by two seconds between any two readings."""

    def __init__(self):
        self.readings = count(0, 2)

    def now(self):
        return float(next(self.readings))


@pytest.fixture
def small_buffer(monkeypatch):
    monkeypatch.setattr(probe, "BUFFER_BYTES", 4096)
    monkeypatch.setattr(probe, "CACHED_BYTES", 0)


def test_the_bandwidth_is_the_buffer_over_a_reading_and_draws_nothing(small_buffer):
    before = torch.get_rng_state()
    assert probe.bandwidth_bytes_per_s(make_target(layers=2), TwoSeconds()) == 4096 / 2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_reading_takes_in_every_number_of_the_buffer(small_buffer, engine):
    read, num_bytes = probe.reading(make_target(layers=2, engine=engine))[READ]
    assert float(read().sum()) == num_bytes / 4 == 1024


def test_it_is_unknown_for_a_model_that_fits_into_a_cache(monkeypatch):
    monkeypatch.setattr(probe, "reading", lambda target: pytest.fail("read all the same"))
    assert probe.bandwidth_bytes_per_s(make_target(layers=2), TwoSeconds()) is None


def test_it_is_unknown_where_the_buffer_has_no_room(small_buffer, monkeypatch):
    def full(target):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(probe, "reading", full)
    assert probe.bandwidth_bytes_per_s(make_target(layers=2), TwoSeconds()) is None


def test_a_run_stores_it_and_another_value_stands_in_no_resumes_way(small_buffer, tmp_path, monkeypatch):
    """It is a condition: no part of the configuration's hash, nor of the fingerprint."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, f"results_dir={tmp_path}", *words])
        entry.main()
        (folder,) = (path.parent for path in tmp_path.glob("*/*/*/rows.jsonl"))
        return folder, read_run(folder)[0]

    monkeypatch.chdir(tmp_path)
    times = iter((1.0, 2.0))
    monkeypatch.setattr(probe, "time_cases", lambda *_, **__: {READ: Timing(READ, 0, (next(times),), 4096)})
    folder, first = run()
    rows = folder / "rows.jsonl"
    rows.write_text(rows.read_text().splitlines(keepends=True)[0])
    _, second = run(f"resume={folder}")
    values = [manifest.conditions["bandwidth_bytes_per_s"] for manifest in (first, second)]
    assert values == [4096, 2048]
    assert (first.config_hash, first.fingerprint) == (second.config_hash, second.fingerprint)


def test_a_run_of_a_tiny_model_says_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *SMALL, f"results_dir={tmp_path}"])
    entry.main()
    (folder,) = (path.parent for path in tmp_path.glob("*/*/*/rows.jsonl"))
    assert read_run(folder)[0].conditions["bandwidth_bytes_per_s"] is None
