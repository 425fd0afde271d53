"""The summary as data and as printed, from hand-made rows only."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from test_metrics import ar, failed, row, spell, trace

from clasp_core.errors import UserError
from clasp_core.report.printing import render
from clasp_core.report.summary import OVERALL, summarise

READ_BYTES = {"attn": [271, 271], "mlp": [0, 0], "head": 458}
"""Without both attentions, 0.458 of the bytes are read."""


def fast(question=0, task="qa", **more):
    """12 tokens after the first in four rounds of 1.0 draft, 1.25 verify, 0.25 search and 0.5 host: 12 s."""
    rounds = trace([3] * 4, drafted=[4] * 4, accepted=[2] * 4, draft_s=1.0, verify_s=1.25, select_s=0.25, searches=1)
    rounds.skip = ["2:3:0"] * 4
    more.setdefault("decode_s", 12.0)
    return row("fast", question, 13, rounds=rounds, task=task, **more)


def pool(num_questions=3, tasks=("qa", "mt")):
    """The reference at 2 s a token and a method twice as fast, on every question of every task."""
    keys = [(task, q) for task in tasks for q in range(num_questions)]
    return [ar(q, n=13, step_s=2.0, task=task) for task, q in keys] + [fast(q, task) for task, q in keys]


def summary_of(rows, methods=("fast",), greedy=True, reference="ar", read_bytes=READ_BYTES):
    return summarise(rows, reference, methods, greedy, read_bytes)


def printed(summary, width=120):
    console = Console(width=width, file=io.StringIO(), no_color=True)
    render(summary, console)
    return console.file.getvalue()


def kinds(summary):
    return [(note["kind"], note["method"]) for note in summary["notes"]]


def test_a_cell_holds_every_figure_of_its_method_and_task():
    cell = summary_of(pool())["cells"]["fast"]["qa"]
    assert (cell["num_questions"], cell["num_failed"], cell["num_missing"], cell["num_tokens"]) == (3, 0, 0, 39)
    assert cell["mean_emitted_per_round"] == {"rounds": 3.0, "questions": 3.0, "tasks": 3.0}
    assert (cell["energy_per_token_j"], cell["peak_memory_bytes"]) == (None, None)
    assert cell["mean_accepted_per_round"]["rounds"] == 2.0
    assert cell["acceptance_rate"]["questions"] == 0.5
    # of 12 s: draft 4, verify 5, search 1, so the host has 2
    assert [round(cell["shares"][part] * 12, 9) for part in ("draft", "verify", "select", "host")] == [4, 5, 1, 2]
    assert cell["end_to_end_tokens_per_s"] == pytest.approx(13 / 12)
    assert cell["decode_tokens_per_s"] == 1.0
    assert cell["speedup"]["paired_total"] == {"value": 2.0, "low": 2.0, "high": 2.0, "n": 3}
    assert cell["grade"]["worst"] == "exact"
    assert cell["length_ratio"] == 1.0


def test_overall_gives_the_pooled_and_the_unweighted_figure():
    # qa: one question, 3 times as fast; mt: three, twice. Unweighted 2.5; pooled, since all references are equal, 2.25
    rows = [*pool(1, ("qa",)), *pool(3, ("mt",))]
    rows = [replace(r, decode_s=8.0) if r.method == "fast" and r.task == "qa" else r for r in rows]
    cells = summary_of(rows)["cells"]["fast"]
    assert cells[OVERALL]["speedup"]["paper_overall"]["value"] == pytest.approx(2.5)
    assert cells[OVERALL]["speedup"]["spec_bench"]["value"] == pytest.approx(2.25)
    assert "paper_overall" not in cells["qa"]["speedup"]


def test_the_ladder_is_given_per_task_and_overall_with_the_bytes_passed_through():
    ladders = summary_of(pool())["ladders"]
    assert set(ladders) == {"fast"}
    assert set(ladders["fast"]) == {"qa", "mt", OVERALL}
    # in units of 2 s: draft 2, verify 2.5, search 0.5 a turn: 12 / (4 + 2), 12 / 4.5, 12 / 5, measured 24 / 12
    found = ladders["fast"][OVERALL]
    assert (found["draft"], found["verify"], found["search"]) == pytest.approx((2.0, 12 / 4.5, 2.4))
    assert (found["measured"], found["c_bytes"]) == (2.0, 0.458)
    assert found["host_loss"] == pytest.approx(1 - 2 / 2.4)
    assert summary_of(pool(), read_bytes=None)["ladders"]["fast"]["qa"]["ceiling"] is None


def test_the_bytes_of_a_task_are_those_of_its_own_rows():
    rows = pool()
    for each in rows:
        if each.method == "fast" and each.task == "mt":
            each.rounds.skip = ["2:1:0"] * 4
    ladders = summary_of(rows)["ladders"]["fast"]
    found = {scope: part["c_bytes"] for scope, part in ladders.items()}
    assert found == pytest.approx({"qa": 0.458, "mt": 0.729, "overall": (0.458 + 0.729) / 2})


def test_the_summary_is_plain_json_without_nan():
    rows = [*pool(), *[row("plain", q, 13) for q in range(3)], failed(method="fast", question=7)]
    found = summary_of(rows, ["fast", "plain"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["schema"] == 1
    assert found["cells"]["plain"]["qa"]["num_drafted"] is None


def test_figures_use_turns_that_every_method_finished():
    rows = [
        *pool(3, ("qa",)),
        *[row("other", q, 13, decode_s=6.0) for q in range(2)],
        failed(method="other", question=2),
    ]
    found = summary_of(rows, ["fast", "other"])
    assert [found["cells"][name]["qa"]["num_questions"] for name in found["methods"]] == [2, 2, 2]
    assert (found["num_turns"], found["num_common_turns"]) == (3, 2)
    assert found["cells"]["other"][OVERALL]["num_failed"] == 1
    assert found["cells"]["other"]["qa"]["grade"]["counts"]["missing"] == 1
    assert found["cells"]["fast"]["qa"]["grade"]["counts"]["exact"] == 3
    assert {("turns_left_out", None), ("failed_turns", "other")} <= set(kinds(found))


def test_missing_turns_are_counted_graded_and_noted():
    rows = [r for r in pool(3, ("qa",)) if not (r.method == "fast" and r.question_id == 1)]
    found = summary_of(rows)
    assert found["cells"]["fast"]["qa"]["num_missing"] == 1
    assert found["cells"]["fast"]["qa"]["grade"]["worst"] == "missing"
    assert ("missing_turns", "fast") in kinds(found)


def test_a_method_that_finished_nothing_does_not_blank_the_others():
    rows = [*pool(2, ("qa",)), *[failed(method="broken", question=q) for q in range(2)]]
    found = summary_of(rows, ["fast", "broken"])
    assert found["cells"]["fast"]["qa"]["num_questions"] == 2
    assert found["cells"]["broken"]["qa"]["num_questions"] == 0
    assert found["cells"]["broken"]["qa"]["speedup"]["paired_total"] is None
    assert {("nothing_finished", "broken"), ("failed_turns", "broken")} <= set(kinds(found))
    assert "n/a" in printed(found)


def test_a_run_that_drafted_nothing_says_so():
    # P83: a method on a one-token task has no rounds
    rows = [*pool(1, ("qa",)), ar(5, n=1, task="label"), row("fast", 5, 1, rounds=trace([]), task="label")]
    found = summary_of(rows)
    assert [note["text"] for note in found["notes"] if note["kind"] == "no_drafting"] == [
        "no drafting happened with fast in label; its parameters have no effect there"
    ]
    assert found["cells"]["fast"]["label"]["acceptance_rate"]["rounds"] is None
    assert found["ladders"]["fast"]["label"] is None
    assert ("no_drafting", "fast") not in kinds(summary_of(pool()))


def test_long_repetitive_and_wrong_answers_are_flagged():
    # P13 and P55: four times the tokens, one 4-gram over and over; the agreeing question keeps its figure
    rows = [ar(0, n=13, step_s=2.0), ar(1, n=13, step_s=2.0), fast(0), replace(fast(1), output_ids=[1, 2, 3, 4] * 13)]
    found = summary_of(rows)
    assert {("length", "fast"), ("repetition", "fast"), ("mismatch", "fast")} <= set(kinds(found))
    assert found["cells"]["fast"]["qa"]["num_equal_turns"] == 1
    assert found["cells"]["fast"]["qa"]["speedup"]["paired_total"]["n"] == 1


def test_a_disturbed_run_is_marked_and_a_long_prefill_is_told_apart():
    # 30 s against 8 * 1.5 + 2 * 15 s = 42 s
    shaken = summarise([ar(n=31), spell(2)], "ar", ["m"], True, None)
    assert shaken["cells"]["m"][OVERALL]["disturbed"] is True
    assert [note["text"] for note in shaken["notes"]] == ["m: disturbed run: typical 2.00, paired_total 0.71"]
    # both sides wait 30 s for the first token: (30 + 30) / (30 + 15) = 1.33 in all, 2.00 decoding
    waiting = summarise([ar(n=31, prefill_s=30.0), replace(spell(0), prefill_s=30.0)], "ar", ["m"], True, None)
    assert "paired_decode is 2.00, so prefill (67% of its time)" in waiting["notes"][0]["text"]


def test_sampled_runs_are_compared_per_token_and_not_graded():
    rows = [ar(0, n=13, step_s=2.0), replace(fast(0), output_ids=list(range(50, 76)))]
    found = summary_of(rows, greedy=False)
    # 24 s for 13 tokens against 12 s for 26
    assert found["cells"]["fast"]["qa"]["speedup"]["paired_total"]["value"] == pytest.approx(4.0)
    assert found["cells"]["fast"]["qa"]["grade"]["worst"] == "sampled"
    assert "sampled 1/1" in printed(found)


def test_answers_to_another_prompt_are_noted():
    rows = [replace(each, prompt_sha256=each.method if each.question_id == 0 else "same") for each in pool()]
    for greedy, what in ((True, "graded missing"), (False, "kept in the figures")):
        found = summary_of(rows, greedy=greedy)
        text = next(note["text"] for note in found["notes"] if note["kind"] == "other_prompts")
        assert what in text
        assert "on 2 of 6 turns" in text
    assert ("other_prompts", "fast") not in kinds(summary_of(pool()))


def test_without_a_reference_there_are_figures_but_no_speedups():
    found = summary_of(pool(), reference=None)
    assert found["methods"] == ["fast"]
    assert found["ladders"] == {}
    assert found["cells"]["fast"][OVERALL]["grade"] is None
    assert found["cells"]["fast"][OVERALL]["end_to_end_tokens_per_s"] == pytest.approx(13 / 12)
    assert "n/a" in printed(found)


def test_an_empty_run_can_be_summarised():
    found = summary_of([])
    assert found["cells"]["fast"][OVERALL]["num_questions"] == 0
    assert printed(found)


def test_a_task_may_not_take_the_name_of_the_total():
    with pytest.raises(UserError, match="overall"):
        summary_of([ar(task=OVERALL)])


@pytest.mark.parametrize("width", [100, 120])
def test_the_printed_tables_fit_their_width_and_cut_nothing(width):
    names = ["fast", "prompt_lookup_"]
    rows = pool(12)
    rows += [replace(r, method=names[1], decode_s=r.decode_s * 1.1) for r in rows if r.method == "fast"][1:]
    text = printed(summary_of(rows, names), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert all(name in text for name in names)
    assert "[2.00,2.00]" in text


def test_tables_begin_with_the_reference_and_name_their_estimator():
    text = printed(summary_of(pool()))
    tables = text.split("speed-up by paired_total")[1:]
    assert len(tables) == 3
    for table in tables:
        lines = [line.split() for line in table.splitlines()]
        first, second = [words for words in lines if words and words[0] in ("ar", "fast")][:2]
        assert (first[0], second[0]) == ("ar", "fast")
        assert "reference" in first
    assert "2.00 [2.00,2.00]" in text
    assert "exact 6/6" in text
    assert "paper_overall: unweighted mean" in text
    assert "c_bytes: one draft step by the bytes it reads" in text


def test_brackets_are_printed_and_not_read_as_markup():
    rows = [replace(r, task="[b]qa", method="[i]fast" if r.method == "fast" else "ar") for r in pool(tasks=("qa",))]
    table = printed(summary_of(rows, ["[i]fast"])).split("overall")[0]
    assert all(part in table for part in ("[b]qa", "[95 % interval", "[low,high]", "[i]fast", "[2.00,2.00]"))


def test_the_summary_needs_no_torch():
    code = "import sys, clasp_core.report.printing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0


def test_an_offline_search_is_noted_with_and_without():
    rows = pool()
    summary = summarise(rows, "ar", ["fast"], True, READ_BYTES, {"fast": 36.0})
    # 6 pairs: the method takes 12 s each and 36 s of search on top, the reference twice 12 s
    cost = summary["offline_search"]["fast"]
    assert cost["paired_total_with_search"] == pytest.approx(6 * 24 / (6 * 12 + 36))
    assert "took 36 s to find before the run" in printed(summary).replace("\n", " ")
    assert summary["cells"]["fast"][OVERALL]["speedup"]["paired_total"]["value"] == 2.0
    json.dumps(summary, allow_nan=False)
