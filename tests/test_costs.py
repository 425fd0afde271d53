"""Acceptance by position, costs by width, the regime, memory and energy: against numbers worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_metrics import ar, failed, row, trace

from clasp_core import costs, device, records
from clasp_core.costs import Regime, WidthCost
from clasp_core.positions import Position, acceptance_by_position

# Positions


def test_acceptance_by_position_counts_rounds_that_drafted_reached_and_kept_each_token():
    # drafted 3, 3, 1; kept 2, 0, 1. Position 0: kept in rounds 1 and 3 of 3; position 1: drafted twice, reached
    # once (round 2 stopped at position 0), kept once; position 2: drafted twice, reached once, kept never
    rounds = trace([3, 1, 2], drafted=[3, 3, 1], accepted=[2, 0, 1])
    found = acceptance_by_position([row(rounds=rounds)])
    assert found == (Position(0, 3, 3, 2), Position(1, 2, 1, 1), Position(2, 2, 1, 0))
    assert [each.rate for each in found] == [pytest.approx(2 / 3), 0.5, 0.0]
    assert [each.conditional_rate for each in found] == [pytest.approx(2 / 3), 1.0, 0.0]


def test_a_round_that_the_stop_token_cut_says_nothing_about_the_next_position():
    # 4 drafted; the second kept token is the stop token, so 2 tokens are emitted and position 2 has no verdict
    found = acceptance_by_position([row(rounds=trace([2], drafted=[4], accepted=[2]))])
    assert found == (Position(0, 1, 1, 1), Position(1, 1, 1, 1), Position(2, 1, 0, 0), Position(3, 1, 0, 0))
    assert found[2].conditional_rate is None
    assert found[2].rate == 0.0


def test_positions_are_pooled_over_rows_and_failed_rows_are_left_out():
    one = row(rounds=trace([2], drafted=[1], accepted=[1]))
    other = row(question=1, rounds=trace([1], drafted=[1], accepted=[0]))
    assert acceptance_by_position([one, other, failed(question=2)]) == (Position(0, 2, 2, 1),)


def test_copies_have_positions_and_trees_have_none():
    # a copy makes no forward pass; a tree makes fewer than it has tokens
    assert acceptance_by_position([row(rounds=trace([2], drafted=[2], accepted=[1], steps=[0]))]) is not None
    assert acceptance_by_position([row(rounds=trace([2], drafted=[6], accepted=[1], steps=[3]))]) is None


def test_positions_without_drafts_are_empty_and_without_traces_unknown():
    assert acceptance_by_position([ar()]) == ()
    assert acceptance_by_position([row(rounds=None)]) is None


# Verification by width


def wide(drafted, verify_s):
    rounds = trace([1] * len(drafted), drafted=list(drafted))
    rounds.verify_s = list(verify_s)
    return row("m", rounds=rounds)


def test_verification_is_the_median_of_each_width_over_the_references_median_step():
    # reference 2 s a step; width 1: 2; width 3: 3, 4 and a slow 40 -> median 4, v = 2
    found = costs.verify_by_width([wide([2, 0, 2, 2], [3.0, 2.0, 40.0, 4.0])], costs.reference_step_s([ar(step_s=2.0)]))
    assert found == [WidthCost(1, 1, 2.0, 1.0), WidthCost(3, 3, 4.0, 2.0)]


def test_the_unit_is_the_median_pass_or_the_median_turn_where_there_is_no_trace():
    # passes 1, 1, 9: median 1, not the mean 3.67; without a trace: 10 s over 10 tokens after the first
    assert costs.reference_step_s([row(n=4, rounds=wide([0, 0, 0], [1.0, 9.0, 1.0]).rounds)]) == 1.0
    assert costs.reference_step_s([row(n=11, decode_s=10.0), row(n=1, decode_s=5.0, question=1)]) == 1.0
    assert costs.reference_step_s([failed()]) is None


def test_one_more_row_is_the_round_weighted_mean_of_the_slopes():
    # width 3 at v 1.4: 0.2 a row, three rounds; width 5 at v 1.4: 0.1 a row, one round: (3 * 0.2 + 0.1) / 4
    found = costs.extra_row([WidthCost(1, 9, 1.0, 1.0), WidthCost(3, 3, 1.4, 1.4), WidthCost(5, 1, 1.4, 1.4)])
    assert found == pytest.approx(0.175)
    assert costs.extra_row([WidthCost(1, 9, 1.0, 1.0)]) is None
    assert costs.extra_row([WidthCost(3, 9, 1.0, None)]) is None


# The regime


@pytest.mark.parametrize(
    ("v", "bandwidth", "word"),
    [
        (1.4, None, "compute-bound verification"),  # 0.2 a row
        (1.4, 1e9, "compute-bound verification"),  # costly rows are named first
        (1.02, None, "unknown"),  # cheap rows, and no probe to compare with
        (1.02, 80.0, "bandwidth-bound"),  # 100 bytes in 2 s: 50 of 80 bytes/s
        (1.02, 100.0, "launch-bound"),  # 50 of 100, below 60 %
    ],
)
def test_the_regime_follows_from_the_runs_own_numbers(v, bandwidth, word):
    found = costs.regime([WidthCost(3, 5, 2 * v, v)], 2.0, 100, bandwidth)
    assert found == Regime(word, pytest.approx((v - 1) / 2), 50.0)


def test_the_regime_of_a_run_without_drafts_or_bytes_is_unknown():
    assert costs.regime([], None, None, 100.0) == Regime("unknown", None, None)


# Memory and energy


def test_energy_per_token_counts_the_rows_whose_energy_is_known():
    # 30 J over 11 tokens and 25 J over 11: 55 / 22; the row without a reading is in neither sum
    rows = [row(energy_j=30.0), row(question=1, energy_j=25.0), row(question=2, n=99)]
    assert costs.energy_per_token_j(rows) == 2.5
    assert costs.energy_per_token_j([row()]) is None
    assert costs.energy_per_token_j([replace(failed(), energy_j=5.0)]) is None


def test_peak_memory_is_the_highest_of_each_device():
    rows = [row(peak_memory_bytes_by_device={"cuda:0": 5, "cuda:1": 9}), row(peak_memory_bytes_by_device={"cuda:0": 7})]
    assert costs.peak_memory_bytes(rows) == {"cuda:0": 7, "cuda:1": 9}
    assert costs.peak_memory_bytes([row()]) is None


def test_rows_from_before_the_new_fields_are_readable():
    stored = row(peak_memory_bytes=5).to_json()
    del stored["peak_memory_bytes_by_device"], stored["energy_j"]
    read = records.TurnRecord.from_json(stored)
    assert (read.peak_memory_bytes, read.peak_memory_bytes_by_device, read.energy_j) == (5, None, None)


class FakeNvml:
    """Two GPUs whose counters rise by 1500 and 500 mJ at each reading."""

    def __init__(self, broken=False):
        self.broken = broken
        self.readings = {"GPU-a": 1_000_000, "GPU-b": 2_000_000}

    def nvmlInit(self):
        if self.broken:
            raise RuntimeError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle not in self.readings:
            raise RuntimeError("Not Supported")
        self.readings[handle] += {"GPU-a": 1500, "GPU-b": 500}[handle]
        return self.readings[handle]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="ab"[gpu.index] if gpu.index < 2 else "x")
    )
    return [torch.device("cuda:0"), torch.device("cuda:1")]


def test_energy_is_the_difference_of_the_counters_summed_over_the_gpus(two_gpus):
    meter = device.energy_meter([*two_gpus, torch.device("cpu")], FakeNvml())
    before = meter.joules()
    assert meter.joules() - before == pytest.approx(2.0)  # 1500 + 500 mJ
    single = device.energy_meter(two_gpus[:1], FakeNvml())
    before = single.joules()
    assert single.joules() - before == pytest.approx(1.5)


def test_energy_is_unknown_without_a_gpu_without_nvml_and_without_a_counter(two_gpus):
    assert device.energy_meter([torch.device("cpu")], FakeNvml()) is None
    assert device.energy_meter(two_gpus, FakeNvml(broken=True)) is None
    assert device.energy_meter([torch.device("cuda:2")], FakeNvml()) is None


def test_a_counter_that_fails_later_leaves_the_energy_unknown(two_gpus):
    nvml = FakeNvml()
    meter = device.energy_meter(two_gpus, nvml)
    nvml.readings.clear()
    assert meter.joules() is None


def test_peak_memory_is_given_per_device_and_unknown_on_a_cpu(monkeypatch, two_gpus):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: 10 + gpu.index)
    assert device.peak_memory_bytes([torch.device("cpu"), *two_gpus]) == {"cuda:0": 10, "cuda:1": 11}
    assert device.peak_memory_bytes([torch.device("cpu")]) is None
