"""The tables of the command line, from stored runs of hand-made rows."""

import io
from dataclasses import replace

import pandas as pd
import pytest
from stored_runs import FINGERPRINT, TASKS, store
from test_metrics import ar, failed, row, trace

from clasp_core.errors import UserError
from clasp_core.report import check, compare, ladders, losslessness, paper, table1
from clasp_core.report.__main__ import main
from clasp_core.report.runs import load
from clasp_core.report.table1 import Choice


def fast(method="clasp", question=0, task="qa", speedup=2.0, **more):
    """13 tokens in four rounds of 4 drafted and 2 kept; the reference takes 24 s, and this 24 / `speedup`."""
    spent_s = 24 / speedup
    rounds = trace([3] * 4, [4] * 4, [2] * 4, draft_s=spent_s / 12, verify_s=spent_s / 9.6, select_s=0.25, searches=1)
    return row(method, question, 13, rounds=rounds, task=task, **{"decode_s": spent_s, **more})


def questions(tasks=TASKS, num=3):
    return [(task, number) for task in tasks for number in range(num)]


def full(speedups, tasks=TASKS, num=3):
    """The reference at 2 s a token, and each method at its speed-up on every question."""
    keys = questions(tasks, num)
    rows = [ar(q, n=13, step_s=2.0, task=task) for task, q in keys]
    return rows + [fast(m, q, task, speedup) for m, speedup in speedups.items() for task, q in keys]


def tables(module, *paths, **more):
    return module.tables(load(paths), **more)


def only(frame, **values):
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


# The paper


def test_the_papers_table_is_complete_and_every_name_has_one_of_ours():
    published = paper.table1()
    assert len(published) == 2 * 3 * 3 * 7
    assert published[0.0, "llama3-70b", "clasp", "overall"] == paper.Cell(1.67, None)
    assert published[1.0, "llama3-8b", "self_sd", "mt_bench"] == paper.Cell(0.89, 0.98)
    assert tuple(paper.TASKS) == TASKS


def test_a_paper_file_with_a_strange_name_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("temperature,model,method,task,tau,speedup\n0,GPT-2,CLaSp,qa,1,1\n")
    with pytest.raises(UserError, match="'GPT-2', which has no name of ours"):
        paper.table1(path)
    with pytest.raises(UserError, match="from a checkout"):
        paper.table1(tmp_path / "none.csv")


# table1


def table_one(*paths, choice=None):
    return tables(table1, *paths, choice=choice or Choice())


def test_without_runs_table_one_is_the_papers_with_ours_not_run(tmp_path):
    greedy, sampled = table1.tables([], Choice())
    for table, temperature in ((greedy, 0.0), (sampled, 1.0)):
        assert len(table.data) == 63
        assert set(table.data["status"]) == {"not run"}
        for key, cell in paper.table1().items():
            if key[0] == temperature:
                line = only(table.data, model=key[1], method=key[2], task=key[3]).iloc[0]
                assert (line["paper_speedup"], line["paper_tau"]) == (
                    cell.speedup,
                    pytest.approx(float("nan") if cell.tau is None else cell.tau, nan_ok=True),
                )
    clasp = greedy.cells[greedy.cells["method"] == "CLaSp"].iloc[0].tolist()
    assert clasp[:7] == ["LLaMA-3-70B", "CLaSp", "paper", "1.64", "4.55", "1.69", "5.81"]
    assert clasp[-2:] == ["1.67", ""]


def test_our_cell_stands_below_the_papers_with_interval_and_n(tmp_path):
    greedy, _ = table_one(store(tmp_path, full({"clasp": 2.0})))
    start = greedy.cells.index[(greedy.cells["model"] == "LLaMA-3-8B") & (greedy.cells["method"] == "CLaSp")][0]
    lines = greedy.cells.iloc[start : start + 4].to_numpy().tolist()
    assert [line[2] for line in lines] == ["paper", "ours", "95 %", "n"]
    # twice as fast on equal questions: no spread; 2 kept drafts a round; 3 questions a task, 18 in all
    assert lines[1][3:5] == ["2.00", "2.00"]
    assert lines[2][3:5] == ["2.00-2.00", ""]
    assert lines[3][3:5] == ["3", ""]
    assert [line[-2:] for line in lines[1:]] == [["2.00", "2.00"], ["2.00-2.00", "2.00-2.00"], ["18", "18"]]
    assert lines[0][3:5] == ["1.24", "3.68"]


def test_overall_is_the_mean_of_tasks_and_pooled_is_beside_it(tmp_path):
    # one question of qa at 3, three of rag at 2: unweighted 2.5; pooled, with equal references, 2.25
    rows = full({"clasp": 3.0}, ("qa",), 1) + full({"clasp": 2.0}, ("rag",), 3)
    greedy, _ = table_one(store(tmp_path, rows))
    ours = greedy.cells[greedy.cells["source"] == "ours"].iloc[-1]
    assert (ours["overall"], ours["pooled"]) == ("2.50", "2.25")
    assert ours["MT-Bench"] == "not run"
    assert any("lacks mt_bench" in note for note in greedy.notes)


def test_another_estimator_mat_and_level_can_be_chosen(tmp_path):
    # question 0 has 3 rounds of 4, question 1 has 6 rounds of 2: MAT 24 / 9 over rounds, 3 over questions
    rows = [ar(q, n=13, step_s=2.0) for q in (0, 1)]
    rows += [row("clasp", q, 13, decode_s=12.0, rounds=trace(emitted)) for q, emitted in ((0, [4] * 3), (1, [2] * 6))]
    folder = store(tmp_path, rows)
    for level, value in (("rounds", 24 / 9), ("questions", 3.0), ("tasks", 24 / 9)):
        greedy, _ = table_one(folder, choice=Choice("paired_total", "mat", level))
        line = only(greedy.data, model="llama3-8b", method="clasp", task="qa").iloc[0]
        assert (line["mat"], line["speedup"], line["estimator"]) == (value, 2.0, "paired_total")


def test_models_and_methods_that_the_paper_lacks_have_a_dash_for_it(tmp_path):
    greedy, _ = table_one(store(tmp_path, full({"pld": 1.5, "clasp": 2.0}), model="smollm2"))
    assert greedy.cells["model"].tolist().count("smollm2") == 2
    lines = greedy.cells[greedy.cells["model"] == "smollm2"]
    assert set(lines.to_numpy().tolist()[0][3:-1]) == {"-"}
    assert lines["method"].tolist() == ["CLaSp", "pld"]
    assert len(only(greedy.data, model="smollm2", status="measured")) == 14


def test_temperatures_are_never_mixed(tmp_path):
    store(tmp_path, full({"clasp": 2.0}), "run-1")
    store(tmp_path, full({"clasp": 3.0}), "run-2", temperature=1.0)
    store(tmp_path, full({"clasp": 4.0}), "run-3", temperature=0.6)
    found = {table.title: only(table.data, status="measured")["speedup"].unique() for table in table_one(tmp_path)}
    assert {title[-6:]: values.tolist() for title, values in found.items()} == {
        " (T=0)": pytest.approx([2.0]), "T=0.6)": pytest.approx([4.0]), " (T=1)": pytest.approx([3.0]),
    }  # fmt: skip


def test_one_run_speaks_for_a_line_and_the_others_are_named(tmp_path):
    store(tmp_path, full({"clasp": 2.0}, num=2), "run-1")
    store(tmp_path, full({"clasp": 3.0}, num=1), "run-2", start="2026-11-30T00:00:00Z")
    store(tmp_path, full({"clasp": 9.0}, num=3), "run-3", questions="sample")
    store(tmp_path, full({"clasp": 9.0}, num=5)[30:], "run-4", reference=None)
    greedy, _ = table_one(tmp_path)
    assert set(only(greedy.data, status="measured")["run_id"]) == {"run-1"}
    assert "clasp on llama3-8b at T=0 is shown from run-1, and not from run-2, run-3, run-4" in greedy.notes


def test_of_runs_on_as_many_questions_the_one_that_compares_most_methods_speaks(tmp_path):
    store(tmp_path, full({"clasp": 2.0, "swift": 1.5}), "run-1")
    store(tmp_path, full({"clasp": 3.0}), "run-2", start="2026-11-30T00:00:00Z")
    greedy, _ = table_one(tmp_path)
    assert set(only(greedy.data, status="measured")["run_id"]) == {"run-1"}


def test_what_spoils_a_number_is_said_below_the_table(tmp_path):
    rows = full({"clasp": 2.0})
    rows[-1] = replace(rows[-1], output_ids=[99] * 13)
    greedy, _ = table_one(store(tmp_path, rows, questions="sample"))
    notes = " ".join(greedy.notes)
    assert "run-1 asked the questions of sample, not Spec-Bench's: no reproduction" in notes
    assert "no tie explains it: not lossless" in notes


def test_a_caption_names_machine_model_commit_and_date(tmp_path):
    folder = store(tmp_path, full({"clasp": 2.0}), git={"revision": "abcdef0123456789", "dirty": True})
    caption = table_one(folder)[0].caption
    for part in (
        "xeon-2c",
        "llama3-8b & co_1 100%",
        "float16",
        "abcdef0123 with changes",
        "2026-11-29",
    ):
        assert part in caption


@pytest.mark.parametrize("status", ["failed", "interrupted", "running"])
def test_a_run_that_did_not_end_well_speaks_for_no_cell_and_is_named(tmp_path, status):
    store(tmp_path, full({"clasp": 2.0}), status=status)
    table = table_one(tmp_path)[0]
    assert "No run of ours is in it." in table.caption
    assert any(note.endswith(f"is in no table: its status is {status}") for note in table.notes)


# check


def checked(*paths):
    agreement, ordering = check.tables(load(paths, at_least=0))
    return agreement.data, ordering.data


def statuses(frame, **values):
    return only(frame, **values)["status"].tolist()


def spread(method, mean, task, num=8):
    """Questions whose speed-ups lie symmetrically around a mean: the interval is not a point."""
    return [fast(method, q, task, mean + 0.1 * (q % 2 - 0.5)) for q in range(num)]


def test_check_counts_every_cell_and_nothing_run_is_no_failure(tmp_path, capsys):
    main(["check", "--results", str(tmp_path)])
    assert "126 speed-ups (ratios): 126 not run" in " ".join(capsys.readouterr().out.split())
    cells, orders = checked(tmp_path)
    assert statuses(cells) == statuses(orders) == ["not run"] * 126


def test_check_says_whether_the_papers_value_lies_in_our_interval(tmp_path):
    # the paper's CLaSp on 8B: qa 1.27, rag 1.22; ours 1.27 and 1.82 with a spread of 0.05
    rows = [ar(q, n=13, step_s=2.0, task=task) for task, q in questions(("qa", "rag"), 8)]
    rows += spread("clasp", 1.27, "qa") + spread("clasp", 1.82, "rag")
    cells, _ = checked(store(tmp_path, rows))
    ours = only(cells, model="llama3-8b", method="clasp", temperature=0.0)
    assert dict(zip(ours["task"], ours["status"], strict=True)) == {
        "mt_bench": "not run", "translation": "not run", "summarization": "not run", "qa": "agrees",
        "math_reasoning": "not run", "rag": "differs", "overall": "not all tasks",
    }  # fmt: skip
    assert only(ours, task="rag")["difference"].item() == pytest.approx(0.60)
    assert set(statuses(cells, temperature=1.0)) == {"not run"}
    agreement, _ = check.tables(load([tmp_path]))
    assert "+0.60" in agreement.cells.to_numpy()


def test_check_takes_the_papers_questions_only_and_needs_an_interval(tmp_path):
    cells, _ = checked(store(tmp_path / "a", full({"clasp": 1.24}), questions="sample"))
    assert set(statuses(cells, model="llama3-8b", method="clasp", temperature=0.0)) == {"other questions"}
    cells, _ = checked(store(tmp_path / "b", full({"clasp": 1.24}, num=1)))
    assert statuses(cells, model="llama3-8b", method="clasp", task="qa", temperature=0.0) == ["no interval"]


def test_printed_values_are_off_by_half_their_last_digit(tmp_path):
    cells, _ = checked(store(tmp_path, full({"clasp": 1.2738})))
    assert statuses(cells, model="llama3-8b", method="clasp", task="qa", temperature=0.0) == ["agrees"]
    cells, _ = checked(store(tmp_path / "b", full({"clasp": 1.2762})))
    assert statuses(cells, model="llama3-8b", method="clasp", task="qa", temperature=0.0) == ["differs"]


def test_the_order_of_methods_holds_is_reversed_or_undecided(tmp_path):
    # the paper's 8B, greedy, on qa: Self-SD 1.13, SWIFT 1.13, CLaSp 1.27
    rows = full({"self_sd": 1.5, "swift": 1.1, "clasp": 1.3}, ("qa",), 8)
    _, orders = checked(store(tmp_path / "a", rows))
    ours = only(orders, model="llama3-8b", task="qa", temperature=0.0)
    assert dict(zip(ours["methods"], ours["status"], strict=True)) == {
        "SWIFT / Self-SD": "a tie there", "CLaSp / Self-SD": "reversed", "CLaSp / SWIFT": "holds",
    }  # fmt: skip
    assert only(ours, methods="CLaSp / SWIFT")["ratio"].item() == pytest.approx(1.3 / 1.1)
    # on maths the paper's SWIFT is slower than its Self-SD (1.10 and 1.15), and so is ours
    slower = store(tmp_path / "c", full({"self_sd": 1.5, "swift": 1.1}, ("math_reasoning",), 8))
    _, orders = checked(slower)
    assert statuses(orders, model="llama3-8b", methods="SWIFT / Self-SD", task="math_reasoning", temperature=0.0) == [
        "holds"
    ]
    rows = [ar(q, n=13, step_s=2.0) for q in range(8)] + full({"swift": 1.3}, ("qa",), 8)[8:]
    _, orders = checked(store(tmp_path / "b", rows + spread("clasp", 1.3, "qa")))
    assert statuses(orders, model="llama3-8b", methods="CLaSp / SWIFT", task="qa", temperature=0.0) == ["undecided"]


def test_methods_of_different_runs_have_no_order(tmp_path):
    store(tmp_path, full({"swift": 1.1}), "run-1")
    store(tmp_path, full({"clasp": 1.3}), "run-2")
    _, orders = checked(tmp_path)
    assert set(statuses(orders, model="llama3-8b", methods="CLaSp / SWIFT", temperature=0.0)) == {"other runs"}


# ladder


def test_the_ladder_prints_prediction_beside_measurement_and_the_hosts_share(tmp_path):
    # in 12 s: draft 4 of 1 s, verify 4 of 1.25 s, search 4 of 0.25 s: 10 s; so 24 / 10 predicted, 24 / 12 measured,
    # and the host has 2 / 12; one step of 16 takes 0.25 s or c = 0.125; v = 0.625, p = 0.125
    ladder, unit_costs, counts, widths, positions = tables(
        ladders, store(tmp_path, full({"clasp": 2.0}, ("qa", "rag")))
    )
    assert set(ladder.data["task"]) == {"qa", "rag", "overall"}
    line = only(ladder.data, task="overall").iloc[0]
    assert (line["search"], line["measured"]) == pytest.approx((2.4, 2.0))
    assert line["predicted_over_measured"] == pytest.approx(0.2)
    assert line["host_share"] == pytest.approx(1 / 6)
    assert line["product_over_measured"] == pytest.approx(1.0)
    cost = only(unit_costs.data, task="overall").iloc[0]
    assert (cost["c"], cost["v"], cost["p"]) == pytest.approx((0.125, 0.625, 0.125))
    assert cost["c_bytes"] is None
    shown = only(ladder.cells, task="overall").iloc[0]
    assert (shown["search"], shown["measured"], shown["pred/meas"], shown["host"]) == (
        "2.40",
        "2.00",
        "+20.0 %",
        "16.7 %",
    )
    assert only(counts.cells, method="clasp").iloc[0].tolist()[5:14] == ["3.00"] * 3 + ["2.00"] * 3 + ["0.50"] * 3
    # 24 rounds of 5 rows at 1.25 s, over a step of 2 s
    assert widths.cells.to_numpy().tolist() == [["1", "llama3-8b", "clasp", "5", "24", "1250.00", "0.62"]]
    assert positions.data["n_accepted"].tolist() == [24, 24, 0, 0]
    assert positions.cells["kept if reached"].tolist() == ["100.0 %", "100.0 %", "0.0 %", "n/a"]


def test_c_by_bytes_stands_beside_c_by_the_clock(tmp_path):
    # two layers of 10 + 20 bytes and a head of 40: skipping layer 1 reads 70 of 100
    rows = full({"clasp": 2.0}, ("qa",))
    for each in rows[3:]:
        each.rounds.skip = ["2:2:2"] * 4
    model = {"name": "llama3-8b", "label": "m", "read_bytes": {"attn": [10, 10], "mlp": [20, 20], "head": 40}}
    conditions = {"bandwidth_bytes_per_s": 60.0}
    folder = store(tmp_path / "b", rows, conditions=conditions)
    run = load([folder])[0]
    run.manifest.model.update(model)
    ladder, unit_costs, *_ = ladders.tables([run])
    line, cost = (only(table.data, task="qa").iloc[0] for table in (ladder, unit_costs))
    assert (cost["c"], cost["c_bytes"], cost["c_over_c_bytes"]) == pytest.approx((0.125, 0.7, 0.125 / 0.7))
    assert line["ceiling"] == pytest.approx(1 / 0.7)
    assert line["product_over_measured"] == pytest.approx(1.0)
    # verification of 5 rows takes 0.625 of a step, so rows are free; 100 bytes in 2 s are 50 of 60 bytes/s
    assert any("regime of clasp in run-1: bandwidth-bound" in note for note in unit_costs.notes)


def test_trees_have_no_positions_and_say_so(tmp_path):
    rows = full({"swift": 2.0}, ("qa",))
    for each in rows[3:]:
        each.rounds.num_draft_steps = [2] * 4
    *_, positions = tables(ladders, store(tmp_path, rows))
    assert positions.data.empty
    assert positions.notes == ("swift: no positions, since its drafts are trees or its rounds have no trace",)


# losslessness


def test_every_turn_that_is_not_exact_is_listed_with_its_evidence(tmp_path):
    rows = full({"clasp": 2.0}, ("qa",), 4)
    tie, mismatch, gone = rows[4:7]
    parted = [*range(5), 99, *range(6, 13)]
    rows[4] = replace(tie, output_ids=parted, first_divergence=5, divergence_gap=0.001, divergence_bound=0.002)
    rows[5] = replace(mismatch, output_ids=parted, first_divergence=5, divergence_gap=0.5, divergence_bound=0.002)
    rows[6] = failed(method="clasp", question=gone.question_id)
    counts, turns = tables(losslessness, store(tmp_path, rows))
    line = counts.data.iloc[0]
    assert (line["worst"], line["dtype"], line["turns"]) == ("mismatch", "float16", 4)
    assert [line[grade] for grade in ("sampled", "exact", "tie", "missing", "mismatch")] == [0, 1, 1, 1, 1]
    found = turns.data[["question", "grade", "index", "gap", "bound"]].astype(object).to_numpy().tolist()
    assert found[0] == [0, "tie", 5, 0.001, 0.002]
    assert found[1] == [1, "mismatch", 5, 0.5, 0.002]
    assert found[2][:2] == [2, "missing"]
    assert turns.data["reason"].tolist()[2] == "the method failed: boom"


def test_a_row_that_was_never_written_is_missing_and_not_equal(tmp_path):
    counts, turns = tables(losslessness, store(tmp_path, full({"clasp": 2.0}, ("qa",), 2)[:-1]))
    assert counts.data["missing"].item() == 1
    assert turns.data["reason"].tolist() == ["no row of the method"]


def test_runs_without_a_reference_are_left_out_and_alone_refused(tmp_path):
    plain = store(tmp_path, [fast()], "run-2", reference=None)
    with pytest.raises(UserError, match="no run here has a reference"):
        tables(losslessness, plain)
    counts, _ = tables(losslessness, plain, store(tmp_path, full({"clasp": 2.0})))
    assert len(counts.data) == 1
    assert counts.notes == ("run-2 has no reference and is left out",)


# compare


def compared(a, b, forced=False):
    return compare.comparison(*load([a]), *load([b]), forced)


def test_each_method_of_b_is_measured_against_its_namesake_in_a(tmp_path):
    # clasp takes 12 s in A and 8 s in B; the reference 24 s in both
    a = store(tmp_path, full({"clasp": 2.0, "pld": 1.5}, ("qa", "rag")), "run-a")
    b = store(tmp_path, full({"clasp": 3.0, "swift": 1.5}, ("qa", "rag")), "run-b")
    found = compared(a, b)
    line = only(found.data, method="clasp", task="overall").iloc[0]
    assert (line["total_value"], line["total_low"], line["total_high"]) == pytest.approx((1.5, 1.5, 1.5))
    assert (line["n_questions"], line["n_turns"], line["n_equal_turns"]) == (6, 6, 6)
    assert line["total_over_reference"] == pytest.approx(1.5)
    assert only(found.data, method="ar", task="qa")["total_value"].item() == pytest.approx(1.0)
    assert set(found.data["method"]) == {"ar", "clasp"}
    assert {"Only in run-a: pld", "Only in run-b: swift"} <= set(found.notes)


def test_a_slower_machine_moves_the_total_and_not_what_is_over_the_reference(tmp_path):
    a = store(tmp_path, full({"clasp": 2.0}), "run-a")
    slow = [replace(each, decode_s=2 * each.decode_s) for each in full({"clasp": 2.0})]
    line = only(compared(a, store(tmp_path, slow, "run-b")).data, method="clasp", task="overall").iloc[0]
    assert (line["total_value"], line["total_over_reference"]) == pytest.approx((0.5, 1.0))


def other_machine():
    return {**FINGERPRINT, "machine": {"cpu": "Xeon", "num_cores": 64}}


def test_runs_of_different_fingerprints_are_refused_by_the_name_of_the_field(tmp_path):
    a = store(tmp_path, full({"clasp": 2.0}), "run-a")
    b = store(tmp_path, full({"clasp": 3.0}), "run-b", fingerprint=other_machine())
    with pytest.raises(UserError, match=r"machine\.num_cores: 64 against 2"):
        compared(a, b)


def test_runs_that_sample_differently_are_refused(tmp_path):
    a = store(tmp_path, full({"clasp": 2.0}), "run-a")
    b = store(tmp_path, full({"clasp": 3.0}), "run-b", temperature=1.0)
    with pytest.raises(UserError, match=r"generation\.temperature: 0\.0 against 1\.0"):
        compared(a, b)


@pytest.mark.parametrize("form", ["terminal", "csv", "markdown", "latex"])
def test_a_forced_comparison_is_stamped_in_every_format(tmp_path, capsys, form):
    a = store(tmp_path, full({"clasp": 2.0}), "run-a")
    b = store(tmp_path, full({"clasp": 3.0}), "run-b", fingerprint=other_machine())
    main(["compare", str(a), str(b), "--force", "--format", form])
    text = " ".join(capsys.readouterr().out.replace("\\", "").split())
    assert "FORCED COMPARISON" in text
    assert "num_cores: 2 against 64" in text
    found = compared(a, b, forced=True)
    assert set(found.data["forced_across"]) == {"machine.num_cores: 2 against 64"}


def test_turns_with_another_prompt_are_left_out_and_counted(tmp_path):
    def asked(rows, prompt):
        return [replace(each, prompt_sha256=prompt if each.question_id == 0 else "same") for each in rows]

    a = store(tmp_path, asked(full({"clasp": 2.0}, ("qa",)), "one"), "run-a")
    b = store(tmp_path, asked(full({"clasp": 3.0}, ("qa",)), "two"), "run-b")
    found = compared(a, b)
    assert only(found.data, method="clasp", task="qa")["n_turns"].item() == 2
    assert "clasp: left out 1 turns with another prompt, 0 only in A, 0 only in B" in found.notes


def test_runs_that_share_no_turn_are_refused(tmp_path):
    a = store(tmp_path, full({"clasp": 2.0}, ("qa",)), "run-a")
    b = store(tmp_path, full({"clasp": 2.0}, ("rag",)), "run-b")
    with pytest.raises(UserError, match="share no finished turn"):
        compared(a, b)
    with pytest.raises(UserError, match="holds 2 runs; name the folder of one"):
        compare._single(str(tmp_path))


# The command line


@pytest.mark.parametrize("command", ["table1", "check", "ladder", "losslessness"])
@pytest.mark.parametrize("form", ["terminal", "csv", "markdown", "latex"])
def test_every_command_prints_every_format_and_writes_the_same_to_a_file(tmp_path, capsys, command, form):
    store(tmp_path, full({"clasp": 2.0}))
    main([command, str(tmp_path), "--format", form])
    printed = capsys.readouterr().out
    main([command, "--results", str(tmp_path), "--format", form, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out").read_text() == printed
    assert "run-1" in printed
    assert "nan" not in printed.lower()
    if form == "csv":
        first = printed.split("\n\n")[0]
        assert len(pd.read_csv(io.StringIO(first), comment="#")) > 0


def test_a_mistake_ends_in_one_line_and_exit_code_two(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ladder", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["table1", "check", "ladder", "losslessness"])
@pytest.mark.parametrize("rows", [full({}, ("qa",)), [failed(method="ar"), failed(method="clasp")]])
def test_runs_with_nothing_to_compare_break_no_command(tmp_path, capsys, command, rows):
    store(tmp_path, rows)
    for form in ("terminal", "csv", "markdown", "latex"):
        main([command, str(tmp_path), "--format", form])
        assert capsys.readouterr().out
