"""Every figure against rows worked out by hand; the arithmetic stands beside the numbers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from clasp_core.errors import UserError
from clasp_core.metrics import counting, grading, losses, pairing, speedups
from clasp_core.metrics.pairing import Pair
from clasp_core.records import RoundTrace, TurnRecord
from clasp_core.report import paper
from clasp_core.skip import LayerSkip

ESTIMATORS = {
    "paired_total": lambda found: speedups.paired_total(found, greedy=True),
    "paired_decode": lambda found: speedups.paired_decode(found, greedy=True),
    "spec_bench": speedups.spec_bench,
    "geometric": speedups.geometric,
    "mean_of_ratios": speedups.mean_of_ratios,
    "paper_overall": speedups.paper_overall,
}


def trace(emitted, drafted=None, accepted=None, steps=None, draft_s=0.0, verify_s=1.0, select_s=0.0, searches=0):
    """A trace of `emitted` rounds; the other values are the same in every round."""
    n = len(emitted)
    return RoundTrace(
        num_drafted=drafted or [0] * n,
        num_accepted=accepted or [0] * n,
        num_emitted=list(emitted),
        num_draft_steps=(drafted or [0] * n) if steps is None else steps,
        num_searches=[searches] * n,
        draft_s=[draft_s] * n,
        verify_s=[verify_s] * n,
        select_s=[select_s] * n,
        skip=[None] * n,
    )


def row(method="ar", question=0, n=11, decode_s=10.0, prefill_s=0.0, rounds=None, ids=None, task="qa", turn=0, **more):
    return TurnRecord(
        run_id="r", model="m", method=method, task=task, category=task, question_id=question, turn=turn, repeat=0,
        seed=0, output_ids=list(range(n)) if ids is None else ids, prefill_s=prefill_s, decode_s=decode_s,
        rounds=rounds, **more,
    )  # fmt: skip


def failed(**more):
    return replace(row(**more), output_ids=None, prefill_s=None, decode_s=None, rounds=None, error="boom")


def ar(question=0, n=11, step_s=1.0, **more):
    """An autoregressive row: a second per pass, and nothing else."""
    rounds = trace([1] * (n - 1), verify_s=step_s)
    return row("ar", question, n, decode_s=(n - 1) * step_s, rounds=rounds, **more)


def pair_up(reference, method):
    return pairing.pairs(reference, method).pairs


HAND_CHECK = pair_up(
    [row("ar", 0, 100, 10.0), row("ar", 1, 1000, 50.0)],
    [row("m", 0, 100, 4.0), row("m", 1, 1000, 40.0)],
)


# Counting


def test_answers_to_different_prompts_are_never_compared():
    reference, method = ar(0, prompt_sha256="a"), row("m", 0, ids=[9] * 11, prompt_sha256="b")
    same_ids = replace(method, output_ids=reference.output_ids)
    for other in (method, same_ids):
        assert grading.grades([reference], [other], True).worst == "missing"
        assert grading.mismatches([reference], [other], True) == []
        assert speedups.paired_total(pair_up([reference], [other]), True) is None
        assert grading.grades([reference], [other], False).worst == "sampled"
        assert speedups.paired_total(pair_up([reference], [other]), False) is not None
    assert grading.mismatches([reference], [replace(method, prompt_sha256="a")], True)


def test_mean_emitted_counts_committed_tokens_only():
    # P2: rounds commit 4, 4, then 6 of which the second is the stop token: (4 + 4 + 2) / 3, not (4 + 4 + 6) / 3
    rows = [row(rounds=trace([4, 4, 2], drafted=[5, 5, 5], accepted=[3, 3, 2]))]
    assert counting.mean_emitted_per_round(rows, "rounds") == pytest.approx(10 / 3)


def test_means_over_rounds_and_over_questions_differ_and_are_both_named():
    # P33: A = 2 rounds of 6, B = 100 rounds of 2: (12 + 200) / 102 = 2.078 over rounds, (6 + 2) / 2 over questions
    rows = [row(question=0, rounds=trace([6, 6])), row(question=1, rounds=trace([2] * 100), task="mt")]
    assert counting.mean_emitted_per_round(rows, "rounds") == pytest.approx(2.078, abs=5e-4)
    assert counting.mean_emitted_per_round(rows, "questions") == 4.0
    assert counting.mean_emitted_per_round(rows, "tasks") == 4.0


def test_turns_of_a_question_are_pooled_before_questions_are_averaged():
    # question 0: turns of 1 round of 4 and 3 rounds of 2 -> 10 / 4 = 2.5; question 1: 1 round of 1 -> mean 1.75
    rows = [row(rounds=trace([4])), row(turn=1, rounds=trace([2, 2, 2])), row(question=1, rounds=trace([1]))]
    assert counting.mean_emitted_per_round(rows, "questions") == 1.75


@pytest.mark.parametrize(
    ("rounds", "emitted", "accepted", "rate"),
    [
        (trace([5, 5, 5], drafted=[4, 4, 4], accepted=[4, 4, 4]), 5.0, 4.0, 1.0),  # P15 with D2, the identity draft
        (trace([1, 1, 1], drafted=[4, 4, 4], accepted=[0, 0, 0]), 1.0, 0.0, 0.0),  # D3, the hopeless draft
        (trace([1, 1, 1]), 1.0, 0.0, None),  # autoregressive
    ],
)
def test_tokens_per_pass_accepted_and_rate_are_three_numbers(rounds, emitted, accepted, rate):
    rows = [row(rounds=rounds)]
    assert counting.mean_emitted_per_round(rows, "rounds") == emitted
    assert counting.mean_accepted_per_round(rows, "rounds") == accepted
    assert counting.acceptance_rate(rows, "rounds") == rate


@pytest.mark.parametrize("level", ["rounds", "questions", "tasks"])
def test_acceptance_rate_is_unknown_when_nothing_was_drafted(level):
    for rows in ([ar()], [row(n=1, rounds=trace([]))], [row(rounds=None)], []):
        assert counting.acceptance_rate(rows, level) is None


def test_questions_without_drafts_do_not_enter_the_mean_rate():
    # question 0: 3 of 4; question 1 drafted nothing: the mean is 0.75, not (0.75 + 0) / 2
    rows = [row(rounds=trace([4], drafted=[4], accepted=[3])), row(question=1, rounds=trace([1, 1]))]
    assert counting.acceptance_rate(rows, "questions") == 0.75


def test_missing_traces_leave_every_round_figure_unknown():
    for rows in ([row(rounds=None)], [row(n=1, rounds=trace([]))], []):
        assert counting.mean_emitted_per_round(rows, "rounds") is None
        assert counting.mean_accepted_per_round(rows, "questions") is None


def test_failed_rows_enter_no_figure():
    good = ar()
    # a failed row that kept old numbers by mistake must not count either
    bad = replace(ar(question=1, n=101, step_s=9.0), error="boom")
    assert counting.num_tokens([good, bad, failed(question=2)]) == 11
    assert counting.count([good, bad]) == counting.count([good])
    assert counting.shares([good, bad]) == counting.shares([good])
    assert counting.end_to_end_tokens_per_s([good, bad]) == counting.end_to_end_tokens_per_s([good])
    assert counting.time_to_first_token([failed()]) is None


# Time


def test_tokens_are_counted_on_ids_for_every_method():
    # P3: 10 ids in 1 s are 10 tok/s, whatever their text would tokenise to
    assert counting.end_to_end_tokens_per_s([row(n=10, decode_s=0.9, prefill_s=0.1)]) == pytest.approx(10)


def test_prefill_decode_and_end_to_end_are_three_numbers():
    # P54: prefill 10 s, then 10 more tokens at 1 s: 11 / 20 end to end, 10 / 10 decoding
    rows = [row(n=11, prefill_s=10.0, decode_s=10.0)]
    assert counting.time_to_first_token(rows) == 10.0
    assert counting.end_to_end_tokens_per_s(rows) == 11 / 20
    assert counting.decode_tokens_per_s(rows) == 1.0


def test_a_turn_of_one_token_decodes_nothing():
    rows = [row(n=1, prefill_s=2.0, decode_s=0.5, rounds=trace([]))]
    assert counting.decode_tokens_per_s(rows) is None
    assert counting.decode_tokens_per_s([*rows, ar(question=1)]) == 1.0


def test_shares_of_decode_time_sum_to_one():
    # 2 rounds of 1.0 draft, 2.0 verify, 0.5 select in 10 s: 0.2, 0.4, 0.1, rest 0.3; prefill 10 of 20
    rounds = trace([3, 3], drafted=[2, 2], accepted=[2, 2], draft_s=1.0, verify_s=2.0, select_s=0.5)
    found = counting.shares([row(n=7, prefill_s=10.0, decode_s=10.0, rounds=rounds)])
    assert (found.draft, found.verify, found.select, found.prefill) == (0.2, 0.4, 0.1, 0.5)
    assert found.host == pytest.approx(0.3)


def test_shares_without_traces_are_unknown():
    found = counting.shares([row(prefill_s=5.0, decode_s=5.0)])
    assert (found.draft, found.verify, found.select, found.host, found.prefill) == (None, None, None, None, 0.5)


# Pairing


def test_rows_are_joined_by_key_and_never_by_position():
    reference = [ar(question=q) for q in range(5)]
    method = [row("m", q) for q in (4, 2, 0)]
    found = pairing.pairs(reference, method)
    assert [p.question for p in found.pairs] == [("qa", 0), ("qa", 2), ("qa", 4)]
    assert all(p.reference.pair == p.method.pair for p in found.pairs)
    assert found.missing == (("qa", 1, 0, 0), ("qa", 3, 0, 0))
    assert pairing.pairs(method, reference).extra == found.missing


def test_failed_rows_pair_with_nothing():
    assert pairing.pairs([ar()], [failed(method="m")]).missing == (("qa", 0, 0, 0),)
    assert pairing.pairs([failed()], [row("m")]).extra == (("qa", 0, 0, 0),)


def test_a_retried_turn_counts_once_and_a_doubled_one_is_refused():
    assert len(pair_up([ar()], [failed(method="m"), row("m")])) == 1
    with pytest.raises(UserError, match="two finished rows"):
        pairing.pairs([ar()], [row("m"), row("m")])


def test_common_turns_are_those_that_every_method_finished():
    rows = [ar(0), ar(1), ar(2), row("a", 0), failed(method="a", question=1), row("a", 2), row("b", 0), row("b", 1)]
    assert pairing.common_turns(rows, ["ar", "a", "b"]) == {("qa", 0, 0, 0)}
    assert pairing.common_turns(rows, ["ar", "a"]) == {("qa", 0, 0, 0), ("qa", 2, 0, 0)}
    assert pairing.common_turns(rows, ["ar", "never_ran"]) == set()


# Speed-ups


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spec_bench", 50 / 30),  # mean(25, 25) / mean(10, 20) = 1.667
        ("paired_total", 60 / 44),  # 1.364
        ("mean_of_ratios", 1.875),  # (25 / 10 + 25 / 20) / 2
        ("geometric", 3.125**0.5),  # sqrt(2.5 * 1.25) = 1.768
        ("paper_overall", 50 / 30),  # one task
    ],
)
def test_hand_check_of_every_estimator(name, value):
    found = ESTIMATORS[name](HAND_CHECK)
    assert found.value == pytest.approx(value)
    assert found.n == 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_autoregressive_against_itself_is_one(name):
    rng = np.random.default_rng(3)
    rows = [ar(q, n=int(rng.integers(2, 40)), step_s=rng.random(), prefill_s=1.0, task="ab"[q % 2]) for q in range(9)]
    found = ESTIMATORS[name](pair_up(rows, rows))
    assert found.value == pytest.approx(1.0, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((1.0, 1.0), abs=1e-12)
    assert speedups.typical(pair_up(rows, rows), greedy=True) == 1.0


def test_paired_total_includes_the_prefill_and_paired_decode_does_not():
    # total (10 + 10) / (10 + 4) = 1.429, decode 10 / 4
    found = pair_up([row(prefill_s=10.0, decode_s=10.0)], [row("m", prefill_s=10.0, decode_s=4.0)])
    assert speedups.paired_total(found, greedy=True).value == pytest.approx(20 / 14)
    assert speedups.paired_decode(found, greedy=True).value == pytest.approx(2.5)


def test_greedy_speedups_use_equal_answers_only():
    # P13: question 1 parts and runs four times longer; only question 0 (10 / 5) is comparable
    reference = [row(question=0), row(question=1)]
    method = [row("m", 0, decode_s=5.0), row("m", 1, n=44, decode_s=11.0)]
    found = pair_up(reference, method)
    assert speedups.paired_total(found, greedy=True).value == pytest.approx(2.0)
    assert speedups.paired_total(found, greedy=True).n == 1
    assert grading.length_ratio(found) == pytest.approx(55 / 22)


def test_sampled_speedups_compare_the_time_per_token_over_all_pairs():
    # reference 11 tokens in 11 s, method 21 tokens in 10.5 s: 1.0 / 0.5; after the first: (11 / 10) / (10.5 / 20)
    found = pair_up([row(n=11, decode_s=11.0)], [row("m", n=21, decode_s=10.5)])
    assert speedups.paired_total(found, greedy=False).value == pytest.approx(2.0)
    assert speedups.paired_decode(found, greedy=False).value == pytest.approx(1.1 / 0.525)
    assert speedups.paired_total(found, greedy=True) is None


def test_no_qualifying_pair_gives_no_number():
    single = pair_up([row(n=1, decode_s=0.5)], [row("m", n=1, decode_s=0.1)])
    assert speedups.paired_decode(single, greedy=True) is None
    assert speedups.paired_total(single, greedy=True).value == pytest.approx(5.0)
    for estimate in ESTIMATORS.values():
        assert estimate([]) is None
    assert speedups.typical([], greedy=True) is None
    assert grading.length_ratio([]) is None
    assert speedups.slow_share([]) is None


def test_spec_bench_sums_the_turns_of_a_question():
    # question 0: 20 tokens in 40 s against 10 s: 0.5 and 2.0 tok/s; question 1: 1.0 and 1.0. (3 / 2) / (1.5 / 2)
    reference = [row(n=10, decode_s=10.0), row(n=10, decode_s=30.0, turn=1), row(question=1, n=10, decode_s=10.0)]
    method = [row("m", n=10, decode_s=5.0), row("m", n=10, decode_s=5.0, turn=1), row("m", 1, n=10, decode_s=10.0)]
    found = speedups.spec_bench(pair_up(reference, method))
    assert found.value == pytest.approx(2.0)
    assert found.n == 2


def test_paper_overall_weighs_tasks_equally_and_spec_bench_does_not():
    # task a: one question, 1 -> 3 tok/s; task b: three questions, 1 -> 2 tok/s. (3 + 2) / 2; pooled (3 + 3 * 2) / 4
    reference = [row(task="ab"[q > 0], question=q, n=10, decode_s=10.0) for q in range(4)]
    method = [row("m", q, 10, 10 / (3 if q == 0 else 2), task="ab"[q > 0]) for q in range(4)]
    found = pair_up(reference, method)
    assert speedups.paper_overall(found).value == pytest.approx(2.5)
    assert speedups.spec_bench(found).value == pytest.approx(2.25)
    # a task with one question has an unknown spread
    assert (speedups.paper_overall(found).low, speedups.paper_overall(found).n) == (None, 4)


def test_the_interval_of_two_questions_spans_both():
    # a quarter of the resamples hold one question twice: the 2.5 and 97.5 percentiles are 50 / 40 and 10 / 4
    found = speedups.paired_total(HAND_CHECK, greedy=True)
    assert (found.low, found.high) == pytest.approx((1.25, 2.5))


def test_the_interval_is_the_same_every_time_and_absent_for_one_question():
    assert speedups.geometric(HAND_CHECK) == speedups.geometric(HAND_CHECK)
    alone = speedups.spec_bench(HAND_CHECK[:1])
    assert (alone.low, alone.high, alone.n) == (None, None, 1)


def test_questions_are_resampled_and_not_turns():
    # two turns of one question are one unit, however different
    turns = [row(turn=t) for t in (0, 1)]
    found = pair_up(turns, [row("m", turn=0, decode_s=1.0), row("m", turn=1, decode_s=9.0)])
    assert speedups.paired_total(found, greedy=True).low is None


def test_the_interval_covers_the_truth_about_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(speedups, "NUM_DRAWS", 1_000)
    rng, hits = np.random.default_rng(11), 0
    for _ in range(100):
        seconds, ratios = rng.uniform(5, 15, 25), rng.uniform(1.0, 2.0, 25)
        reference = [row(question=q, decode_s=s * r) for q, (s, r) in enumerate(zip(seconds, ratios, strict=True))]
        found = speedups.paired_total(
            pair_up(reference, [row("m", q, decode_s=s) for q, s in enumerate(seconds)]), True
        )
        hits += found.low <= 1.5 <= found.high  # E[s r] / E[s] = E[r]
    assert 86 <= hits <= 100


# Slow spells


def spell(slow_rounds):
    """Ten rounds of 0.5 draft and 1.0 verify, `slow_rounds` of them ten times slower; 3 tokens a round."""
    rounds = trace([3] * 10, drafted=[4] * 10, accepted=[2] * 10, draft_s=0.5)
    for index in range(slow_rounds):
        rounds.draft_s[index], rounds.verify_s[index] = 5.0, 10.0
    return row("m", n=31, decode_s=sum(rounds.draft_s) + sum(rounds.verify_s), rounds=rounds)


@pytest.mark.parametrize(("slow_rounds", "is_disturbed"), [(0, False), (2, True)])
def test_typical_ignores_a_slow_spell_and_marks_the_run(slow_rounds, is_disturbed):
    # 30 tokens at 1 s against ten rounds at 1.5 s
    found = pair_up([ar(n=31)], [spell(slow_rounds)])
    typical = speedups.typical(found, greedy=True)
    assert typical == pytest.approx(2.0)
    assert speedups.disturbed(typical, speedups.paired_total(found, greedy=True)) is is_disturbed


def test_typical_takes_medians_by_width():
    # six rounds of width 5 cost 1.5 each, two of width 1 cost 1.0: 30 + 2 tokens in 9 + 2 s
    rounds = trace([5] * 6 + [1] * 2, drafted=[4] * 6 + [0] * 2, accepted=[4] * 6 + [0] * 2)
    rounds.verify_s = [1.5] * 6 + [1.0] * 2
    assert speedups.typical(pair_up([ar(n=33)], [row("m", n=33, rounds=rounds)]), greedy=True) == pytest.approx(32 / 11)


def test_typical_falls_back_to_the_median_turn_of_an_untraced_reference():
    reference = [row(question=q, n=31, decode_s=s) for q, s in enumerate((30.0, 30.0, 300.0))]
    method = [replace(spell(0), question_id=q) for q in range(3)]
    assert speedups.typical(pair_up(reference, method), greedy=True) == pytest.approx(2.0)


def test_disturbed_is_unknown_without_both_numbers():
    assert speedups.disturbed(None, speedups.Interval(1.0, None, None, 1)) is None
    assert speedups.disturbed(1.0, None) is None


def test_slow_share_counts_pairs_over_twice_the_median():
    # reference steps of 1, 1, 1, 3 seconds: one in four; the single-token turn says nothing
    reference = [ar(q, step_s=s) for q, s in enumerate((1.0, 1.0, 1.0, 3.0))] + [row(question=9, n=1, decode_s=99.0)]
    method = [row("m", q) for q in (*range(4), 9)]
    assert speedups.slow_share(pair_up(reference, method)) == 0.25


# Ladder


def ladder_rows(steps=None):
    """Reference step 1 s. T 12, R 4, D 16, A 8, P 4; draft 8 s, verify 5 s, search 1 s, host 2 s, so 16 s in all."""
    rounds = trace(
        [3] * 4, drafted=[4] * 4, accepted=[2] * 4, steps=steps, draft_s=2.0, verify_s=1.25, select_s=0.25, searches=1
    )
    return pair_up([ar(n=13)], [row("m", n=13, decode_s=16.0, rounds=rounds)])


def test_ladder_of_hand_made_rounds():
    found = losses.ladder(ladder_rows(), greedy=True, c_bytes=0.4)
    assert (found.c, found.v, found.p, found.c_bytes) == (0.5, 1.25, 0.25, 0.4)
    assert found.ceiling == pytest.approx(2.5)
    assert found.oracle == pytest.approx(12 / 8)  # 12 / (4 + 8 * 0.5)
    assert found.draft == pytest.approx(12 / 12)  # 12 / (4 + 16 * 0.5)
    assert found.verify == pytest.approx(12 / 13)  # 12 / (4 * 1.25 + 8)
    assert found.search == pytest.approx(12 / 14)
    assert found.measured == pytest.approx(12 / 16)
    assert found.efficiency == pytest.approx(0.5)
    assert found.predicted == found.search
    assert found.host_loss == pytest.approx(2 / 16)


def test_the_steps_of_the_ladder_multiply_to_what_was_measured():
    found = losses.ladder(ladder_rows(), greedy=True, c_bytes=0.458)
    product = np.prod(list(found.steps.values()))
    assert product == pytest.approx(found.measured / found.ceiling, rel=1e-9)
    assert found.measured == pytest.approx(speedups.paired_decode(ladder_rows(), greedy=True).value, rel=1e-9)


def read_bytes(d, inner, keys, vocab, num_layers, size=2):
    """Weights that one token reads, of LLaMA-3's shape: queries and output d x d, keys and values d x `keys`."""
    attn, mlp = size * (2 * d * d + 2 * d * keys), size * 3 * d * inner
    return {"attn": [attn] * num_layers, "mlp": [mlp] * num_layers, "head": size * d * vocab}


LLAMA3 = {"70b": read_bytes(8192, 28672, 1024, 128256, 80), "8b": read_bytes(4096, 14336, 1024, 128256, 32)}


@pytest.mark.parametrize(("name", "num_skipped", "share"), [("70b", 44, 0.458), ("8b", 16, 0.535)])
def test_bytes_of_a_draft_step_of_llama_3(name, num_skipped, share):
    # 70B: a layer 151.0 M + 704.6 M, the head 1050.7 M: (36 * 855.6 + 1050.7) / (80 * 855.6 + 1050.7) = 0.458
    code = LayerSkip.layers(len(LLAMA3[name]["attn"]), range(num_skipped)).code
    rounds = replace(trace([3] * 5, drafted=[3] * 5, accepted=[2] * 5), skip=[code] * 5)
    c_bytes = losses.c_bytes([row("m", n=16, rounds=rounds)], LLAMA3[name])
    assert c_bytes == pytest.approx(share, abs=5e-4)
    found = losses.ladder(ladder_rows(), greedy=True, c_bytes=c_bytes)
    assert (found.c_bytes, found.ceiling) == (c_bytes, 1 / c_bytes)


@pytest.mark.parametrize(
    ("model", "c", "low", "high"), [("llama3-70b", 0.458, 0.87, 0.96), ("llama3-8b", 0.535, 0.73, 0.83)]
)
def test_the_papers_own_numbers_give_the_efficiencies_that_its_ladder_implies(model, c, low, high):
    """Its tau and speed-up in a ladder whose drafts are all kept and cost their bytes: measured over (tau + 1) / (1 +
    tau c)."""
    efficiencies = []
    for task in paper.TASKS:
        cell, num = paper.table1()[0.0, model, "clasp", task], 100
        accepted = [round(cell.tau * (i + 1)) - round(cell.tau * i) for i in range(num)]
        seconds = [c * each for each in accepted]
        emitted = [each + 1 for each in accepted]
        rounds = replace(trace(emitted, drafted=accepted, accepted=accepted), draft_s=seconds)
        n = sum(emitted) + 1
        method = row("m", n=n, decode_s=(n - 1) / cell.speedup, rounds=rounds)
        efficiencies.append(losses.ladder(pair_up([ar(n=n)], [method]), True, c).efficiency)
        assert efficiencies[-1] == pytest.approx(cell.speedup * (1 + cell.tau * c) / (1 + cell.tau), rel=2e-2)
    assert low <= round(min(efficiencies), 2)
    assert round(max(efficiencies), 2) <= high


def test_without_bytes_there_is_no_ceiling_and_the_rest_stands():
    found = losses.ladder(ladder_rows(), greedy=True, c_bytes=None)
    assert found.ceiling is None
    assert found.steps["rejection"] is None
    rest = [step for step in found.steps.values() if step is not None]
    assert np.prod(rest) == pytest.approx(found.efficiency, rel=1e-9)


def test_predicted_speedup_of_a_fake_clock_is_the_measured_one():
    # P63: tau 3, draft step 0.4, verify 1.0, K 4: 3 / (1 + 4 * 0.4) = 1.154, nothing lost to the host
    rounds = trace([3] * 10, drafted=[4] * 10, accepted=[2] * 10, draft_s=1.6)
    found = losses.ladder(pair_up([ar(n=31)], [row("m", n=31, decode_s=26.0, rounds=rounds)]), True, None)
    assert found.predicted == pytest.approx(1.154, abs=5e-4)
    assert found.measured == pytest.approx(found.predicted)
    assert found.host_loss == pytest.approx(0.0, abs=1e-12)


def test_copies_cost_what_they_took_although_they_make_no_passes():
    # no drafter pass: D is the 16 copied tokens, so that D c is still 8 s
    copied = losses.ladder(ladder_rows(steps=[0] * 4), greedy=True, c_bytes=None)
    assert copied == losses.ladder(ladder_rows(), greedy=True, c_bytes=None)


def test_tree_drafts_are_charged_by_passes():
    # 16 drafted tokens in 8 passes of 1 s: c 1.0, D c still 8 s; the 8 kept tokens need the 8 passes
    tree = losses.ladder(ladder_rows(steps=[2] * 4), greedy=True, c_bytes=None)
    assert (tree.c, tree.oracle, tree.draft) == (1.0, 1.0, 1.0)


def test_the_ladder_of_autoregressive_decoding_collapses_to_one():
    # passes of 1 s in steps of 1.25 s: the rest is the host's, and it cancels in what is measured
    rows = [row(n=11, decode_s=12.5, rounds=trace([1] * 10))]
    found = losses.ladder(pair_up(rows, rows), greedy=True, c_bytes=None)
    assert (found.c, found.p, found.v) == (None, None, 0.8)
    assert (found.oracle, found.draft, found.measured) == (1.0, 1.0, 1.0)
    assert found.host_loss == pytest.approx(0.2)


def test_the_ladder_needs_traces_rounds_and_comparable_pairs():
    assert losses.ladder([], True, 0.5) is None
    assert losses.ladder(pair_up([ar()], [row("m")]), True, 0.5) is None
    assert losses.ladder(pair_up([ar()], [row("m", rounds=trace([]))]), True, 0.5) is None
    assert losses.ladder(pair_up([row(n=1)], [row("m", n=1, rounds=trace([]))]), True, 0.5) is None
    assert losses.ladder(pair_up([ar()], [row("m", n=21, rounds=trace([2] * 10))]), True, 0.5) is None


def test_the_sampled_ladder_measures_time_per_token():
    # reference 10 tokens at 1 s; method 20 tokens in ten passes of 1 s: 20 / 10, measured 1.0 / 0.5
    found = losses.ladder(pair_up([ar()], [row("m", n=21, rounds=trace([2] * 10))]), greedy=False, c_bytes=None)
    assert (found.search, found.measured) == (2.0, 2.0)


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.5, 2, 1.75), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.9, 0, 1.0)])
def test_expected_tokens_of_a_chain(alpha, k, tokens):
    # 1 + 0.5 + 0.25
    assert losses.chain_expected_tokens(alpha, k) == pytest.approx(tokens)


def test_a_draft_token_pays_while_its_chance_covers_its_cost():
    # 1.5 * (0.5 + 0.1) = 0.9; with acceptance 0.97: 0.97, 0.94, 0.91, 0.885
    chances = itertools.accumulate([0.97] * 4, lambda a, b: a * b)
    assert [losses.worth_drafting(p, 1.5, 0.5, 0.1) for p in chances] == [True, True, True, False]


# Losslessness


def parted(**more):
    """An answer that leaves the reference's (0, 1, 2, ...) at index 4."""
    return row("m", ids=[0, 1, 2, 3, 99, 5, 6, 7, 8, 9, 10], **more)


@pytest.mark.parametrize(
    ("method", "grade"),
    [
        (row("m"), "exact"),
        (parted(first_divergence=4, divergence_gap=0.01, divergence_bound=0.02), "tie"),
        (parted(first_divergence=4, divergence_gap=0.03, divergence_bound=0.02), "mismatch"),
        (parted(first_divergence=4, divergence_gap=float("nan"), divergence_bound=0.02), "mismatch"),
        (parted(first_divergence=3, divergence_gap=0.01, divergence_bound=0.02), "mismatch"),
        (parted(first_divergence=4, divergence_gap=0.01), "mismatch"),
        (parted(), "mismatch"),
        (row("m", n=10), "mismatch"),
        (failed(method="m"), "missing"),
        (None, "missing"),
    ],
)
def test_a_turn_is_exact_or_explained_or_wrong(method, grade):
    assert grading.grade_turn(ar(), method, greedy=True) == grade


def test_missing_turns_are_never_equal():
    # P39: 5 reference rows, 3 method rows equal to the first 3, whatever their order; one extra; one failed
    reference = [ar(q) for q in range(5)]
    found = grading.grades(reference, [row("m", q) for q in (2, 1, 0)], greedy=True)
    assert (found.worst, found.counts["exact"], found.counts["missing"]) == ("missing", 3, 2)
    found = grading.grades(reference[:1], [row("m", 0), row("m", 1), failed(method="m", question=2)], greedy=True)
    assert (found.worst, found.counts["exact"], found.counts["missing"]) == ("missing", 1, 2)
    assert grading.grades([failed()], [failed(method="m")], greedy=True).worst == "missing"
    assert grading.grades([], [], greedy=True).worst == "missing"


def test_the_worst_grade_is_a_mismatch_even_among_missing_turns():
    method = [row("m", 0), parted(question=1)]
    assert grading.grades([ar(q) for q in range(3)], method, greedy=True).worst == "mismatch"


def test_ids_of_samples_are_not_graded_but_missing_turns_are():
    found = grading.grades([ar(0), ar(1)], [parted(), failed(method="m", question=1)], greedy=False)
    assert (found.worst, found.counts["sampled"], found.counts["missing"]) == ("missing", 1, 1)


@pytest.mark.parametrize(
    ("left", "right", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0)]
)
def test_first_divergence_is_where_the_ids_part(left, right, index):
    assert grading.first_divergence(left, right) == index


def test_degenerate_repetition_is_flagged():
    # P55: a 4-gram repeated 50 times, alone and inside 800 other tokens; a repeated token; a loop of 20
    gram, loop = [7, 8, 9, 10] * 50, list(range(20)) * 12
    for ids in (gram, [*range(100, 900), *gram], [5] * 40, loop):
        assert grading.tokens_repeated(ids)
    for ids in ([], [1, 2], list(range(1000)), [*range(50), *[3, 4, 5, 6] * 3], [4] * 8):
        assert not grading.tokens_repeated(ids)


def test_pairs_compare_ids_and_not_text():
    assert Pair(ar(), row("m")).equal
    assert not Pair(ar(), parted()).equal


def test_an_offline_search_is_charged_once_and_breaks_even_where_savings_equal_it():
    # the reference takes 2 s for each of 13 + 13 tokens' worth of work, see `ar`; the method half of it
    found = pairing.pairs(
        [ar(q, n=13, step_s=2.0) for q in range(2)], [ar(q, n=13, step_s=1.0) for q in range(2)]
    ).pairs
    reference_s = sum(pair.reference.total_s for pair in found)
    method_s = sum(pair.method.total_s for pair in found)
    assert speedups.paired_total_with_search(found, True, 0.0) == pytest.approx(reference_s / method_s)
    assert speedups.paired_total_with_search(found, True, 6.0) == pytest.approx(reference_s / (method_s + 6.0))
    even = speedups.tokens_to_break_even(found, True, 6.0)
    assert even * (reference_s - method_s) / 26 == pytest.approx(6.0)
    assert speedups.tokens_to_break_even(pairing.pairs([ar(0)], [ar(0)]).pairs, True, 6.0) is None
    assert speedups.paired_total_with_search((), True, 6.0) is None
