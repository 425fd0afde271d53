"""Figures from hand-made rows: the drawn numbers against numbers worked out by hand, and the files they become."""

import csv
import math
from dataclasses import replace

import matplotlib
import pytest
from stored_runs import manifest
from test_metrics import ar, row, trace

from clasp_core.errors import UserError
from clasp_core.report import figures
from clasp_core.report.__main__ import main
from clasp_core.report.figures import Missing, figure
from clasp_core.report.figures._canvas import styled
from clasp_core.report.figures._choice import main_run
from clasp_core.report.figures.fig3a import expected_of_random
from clasp_core.report.runs import load
from clasp_core.skip import LayerSkip
from clasp_core.store import RunStore

READ_BYTES = {"attn": [1] * 4, "mlp": [1] * 4, "head": 2}
WHERE = {"task": "mt_bench", "category": "writing", "question_id": 1, "turn": 0}


def fast(question=0, task="mt_bench", decode_s=12.0, skipped=(1,), method="clasp", **more):
    """12 tokens after the first in four rounds: of `decode_s`, a third draft, 5/12 verify, 1/12 select, 1/6 host."""
    each_s = decode_s / 48
    rounds = trace([3] * 4, [4] * 4, [2] * 4, draft_s=4 * each_s, verify_s=5 * each_s, select_s=each_s, searches=1)
    rounds.skip = [LayerSkip.layers(4, skipped).code] * 4
    return row(method, question, 13, rounds=rounds, task=task, decode_s=decode_s, **more)


def pool(tasks=("mt_bench",), num=2, **more):
    """The reference at 2 s a token, and CLaSp beside it."""
    keys = [(task, q) for task in tasks for q in range(num)]
    return [ar(q, n=13, step_s=2.0, task=task) for task, q in keys] + [fast(q, task, **more) for task, q in keys]


def stored(root, rows, run_id="run-1", experiment=None, analysis=(), model="m", **clasp):
    """A run folder; `clasp` is the method's configuration."""
    made = manifest(run_id, model, list(dict.fromkeys(each.method for each in rows)))
    config = {**made.config, "experiment": experiment, "method": {"clasp": clasp}}
    described = {**made.model, "num_parameters": 2_000_000_000, "read_bytes": READ_BYTES}
    made = replace(made, config=config, model=described, reference="ar" if rows else None, start=run_id)
    with RunStore.create(root / "runs", "xeon-2c", model, made) as store:
        store.append([replace(each, run_id=run_id, model=model) for each in rows])
        if analysis:
            store.append_analysis(analysis)
    return root / "runs"


def drawn(root, name, out="figures"):
    """The CSV of a figure, after a look at all its files."""
    plot = figure(name, load([root]))
    assert not isinstance(plot, Missing), plot
    pdf, png, table = plot.save(root.parent / out, name)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert min(pdf.stat().st_size, png.stat().st_size) > 5000
    with table.open() as file:
        return list(csv.DictReader(file))


def numbers(line, *keys):
    return [float(line[key]) for key in keys]


def test_figure_3a_is_the_jaccard_similarity_by_distance(tmp_path):
    """Sets {0, 1}, {0, 1}, {1, 2} of four layers in one answer; a lone token of another one pairs with nothing."""
    sets = [(0, (0, 1)), (1, (0, 1)), (2, (1, 2))]
    rows = [
        {"kind": "token_skip_set", **WHERE, "position": at, "skip": LayerSkip.layers(4, layers).code}
        for at, layers in sets
    ]
    rows.append({**rows[0], "question_id": 2, "position": 7})
    near, far = drawn(stored(tmp_path, [], analysis=rows), "fig3a")
    assert numbers(near, "distance", "mean", "num_pairs") == [1, pytest.approx(2 / 3), 2]
    assert numbers(far, "distance", "mean", "num_pairs") == [2, pytest.approx(1 / 3), 1]
    assert numbers(near, "q1", "q3") == [pytest.approx(0.5), pytest.approx(5 / 6)]
    assert float(near["random"]) == pytest.approx((4 / 3 + 1) / 6)  # of 6 sets, 4 share one layer and 1 both


@pytest.mark.parametrize(("num_layers", "size"), [(4, 1), (5, 3), (7, 4), (6, 6)])
def test_the_random_similarity_is_the_mean_over_all_sets(num_layers, size):
    from itertools import combinations

    fixed = set(range(size))
    others = [set(each) for each in combinations(range(num_layers), size)]
    mean = sum(len(fixed & other) / len(fixed | other) for other in others) / len(others)
    assert expected_of_random(num_layers, size) == pytest.approx(mean)


def test_figure_3b_holds_the_means_over_tokens(tmp_path):
    values = {"programme": 0.9, "brute_force": 0.95, "random_mean": 0.5, "random_p05": 0.2, "random_p95": 0.8}
    row = {"kind": "selection_quality", **WHERE, "num_free": 4, "num_skipped": 2, "share_better": 0.25, **values}
    rows = [{**row, "position": 0}, {**row, "position": 8, "programme": 0.8, "brute_force": 0.85}]
    rows.append({**row, "position": 0, "num_skipped": 3, "programme": 0.7})
    two, three = drawn(stored(tmp_path, [], analysis=rows), "fig3b")
    assert numbers(two, "num_skipped", "num_tokens", "programme", "brute_force") == pytest.approx([2, 2, 0.85, 0.9])
    assert numbers(three, "num_skipped", "num_tokens", "programme", "random_mean") == pytest.approx([3, 1, 0.7, 0.5])


def test_figure_3c_shares_sum_to_one_with_the_prefill_inside(tmp_path):
    root = stored(tmp_path, pool(("mt_bench", "qa"), prefill_s=3.0))
    lines = drawn(root, "fig3c")
    assert [(line["method"], line["task"]) for line in lines] == [("clasp", t) for t in ("all", "mt_bench", "qa")]
    for line in lines:  # of 15 s
        shares = numbers(line, "select", "draft", "verify", "host", "prefill")
        assert [15 * share for share in shares] == pytest.approx([1, 4, 5, 2, 3])


@pytest.mark.parametrize(
    ("name", "settings", "xs", "paper"),
    [
        ("fig4a", ({"skipped": (1,)}, {"skipped": (1, 3)}), [0.25, 0.5], ("0.55", "1.64")),
        ("fig4b", ({"interval": 1}, {"interval": 8}), [1, 8], ("128.0", "")),
        ("fig4c", ({"exit_threshold": 0.3}, {"exit_threshold": 0.7}), [0.3, 0.7], ("0.7", "")),
    ],
)
def test_a_sweep_has_a_point_per_run_and_the_papers_beside_it(tmp_path, name, settings, xs, paper):
    """AR takes 24 s; the runs 12 s and 8 s, with two kept tokens a round."""
    for index, (setting, decode_s) in enumerate(zip(settings, (12.0, 8.0), strict=True)):
        skipped = setting.pop("skipped", (1,))
        rows = pool(decode_s=decode_s, skipped=skipped)
        stored(tmp_path, rows, f"run-{index}", name, **setting)
    stored(tmp_path, pool(), "run-9", "another", interval=99, exit_threshold=0.99)
    *ours, theirs = drawn(tmp_path / "runs", name)
    assert [numbers(line, "x", "speedup", "mean_accepted", "num_questions") for line in ours] == [
        [xs[0], pytest.approx(2), 2, 2],
        [xs[1], pytest.approx(3), 2, 2],
    ]
    assert (theirs["x"], theirs["speedup"]) == paper
    assert "LLaMA-3-70B" in theirs["model"]


def test_a_later_run_of_a_sweep_replaces_an_equal_earlier_one(tmp_path):
    stored(tmp_path, pool(decode_s=12.0), "run-1", "fig4b", interval=4)
    stored(tmp_path, pool(decode_s=6.0), "run-2", "fig4b", interval=4)
    ours, _ = drawn(tmp_path / "runs", "fig4b")
    assert numbers(ours, "x", "speedup") == [4, pytest.approx(4)]


def test_figure_5_has_ours_and_the_papers_points(tmp_path):
    stored(tmp_path, pool(("mt_bench", "rag")), "run-1")
    stored(tmp_path, pool(decode_s=1.0), "run-2", "fig4a")
    ours, *theirs = drawn(tmp_path / "runs", "fig5")
    assert numbers(ours, "billions", "speedup", "num_questions") == [2, pytest.approx(2), 2]
    assert ours["task"] == "mt_bench"
    assert {line["source"] for line in theirs} == {"paper"}
    points = [(line["task"], *numbers(line, "billions", "speedup")) for line in theirs]
    assert len(points) == 6
    assert ("math_reasoning", 405, 1.81) in points


def test_the_ladder_is_the_one_worked_out_by_hand(tmp_path):
    """Unit 2 s. T 12, R 4, A 8, D 16 steps in 4 s: c 1/8; verification 5 s: v 5/8; 4 searches in 1 s; 12 s in all."""
    (line,) = drawn(stored(tmp_path, pool()), "ladder")
    steps = numbers(line, "ceiling", "oracle", "draft", "verify", "search", "measured")
    assert steps == pytest.approx([10 / 8, 12 / 5, 12 / 6, 12 / 4.5, 12 / 5, 2])
    assert numbers(line, "c", "v", "p", "c_bytes", "num_turns") == pytest.approx([1 / 8, 5 / 8, 1 / 8, 0.8, 2])


def test_predicted_against_measured_has_a_mark_per_run_method_and_task(tmp_path):
    stored(tmp_path, pool(("mt_bench", "qa")), "run-1")
    stored(tmp_path, pool(("qa",)), "run-2")
    lines = drawn(tmp_path / "runs", "predicted")
    assert [(line["run_id"], line["task"]) for line in lines] == [
        ("run-1", "mt_bench"), ("run-1", "qa"), ("run-2", "qa"),
    ]  # fmt: skip
    for line in lines:
        assert numbers(line, "predicted", "measured") == pytest.approx([2.4, 2])


def test_acceptance_by_position_by_hand(tmp_path):
    rounds = trace([4, 2, 1], [3, 3, 1], [3, 1, 0], draft_s=1.0)
    rows = [ar(0, n=8), row("clasp", 0, 8, rounds=rounds)]
    lines = drawn(stored(tmp_path, rows), "acceptance")
    counts = [numbers(line, "position", "num_drafted", "num_reached", "num_kept") for line in lines]
    assert counts == [[1, 3, 3, 2], [2, 2, 2, 1], [3, 2, 1, 1]]
    assert numbers(lines[2], "kept", "kept_if_reached") == [0.5, 1]


def test_the_skip_map_takes_the_answer_whose_sets_change_most(tmp_path):
    still, lively = fast(0), fast(1)
    lively.rounds.skip = [LayerSkip.layers(4, each).code for each in ((0,), (1,), (1,), (2, 3))]
    apart = fast(0, method="swift")
    apart.rounds.skip = [None, *[LayerSkip.sublayers(4, attn=[0], mlp=[2]).code] * 3]
    rows = [*(ar(q, n=13, step_s=2.0, task="mt_bench") for q in range(2)), still, lively, apart]
    lines = drawn(stored(tmp_path, rows), "skip_map")
    assert [(line["skipped_attn"], line["skipped_mlp"]) for line in lines] == [
        *(("0", "0"), ("1", "1"), ("1", "1"), ("2 3", "2 3")),
        *[("0", "2")] * 3,
    ]
    assert lines[0]["panel"] == "clasp, mt_bench 1, turn 1"


def test_a_figure_without_data_says_so_in_one_line_and_leaves_nothing(tmp_path, capsys):
    root, out = stored(tmp_path, [ar(0)]), tmp_path / "out"
    for name in figures.names():
        with pytest.raises(SystemExit) as end:
            main(["figures", str(root), "--only", name, "--out", str(out)])
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {name}: no data, not drawn; it needs ")
    assert not out.exists()


def test_the_command_draws_all_that_it_can(tmp_path, capsys):
    root, out = stored(tmp_path, pool()), tmp_path / "out"
    main(["figures", str(root), "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == figures.names()
    there = {path.stem for path in out.iterdir()}
    assert there == {"acceptance", "fig3c", "fig5", "ladder", "predicted", "skip_map"}
    assert {path.suffix for path in out.iterdir()} == {".pdf", ".png", ".csv"}


def test_an_unknown_figure_is_refused_with_the_nearest_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["figures", str(stored(tmp_path, pool())), "--only", "fig4d"])
    assert capsys.readouterr().err == "error: unknown figure 'fig4d'; did you mean fig4c?\n"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    plot = figure("fig3c", load([stored(tmp_path, pool())]))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder with --out"):
        plot.save(tmp_path / "file", "fig3c")


def test_turns_that_a_method_failed_are_in_no_methods_figures(tmp_path):
    """CLaSp failed on the second question, which the other method finished."""
    rows = [*pool(num=2), *(fast(q, method="swift") for q in range(2))]
    rows[3] = replace(rows[3], output_ids=None, prefill_s=None, decode_s=None, rounds=None, error="boom")
    root = stored(tmp_path, rows)
    for name in ("ladder", "fig3c"):
        turns = {line["method"]: float(line["num_turns"]) for line in drawn(root, name)}
        assert turns == {"clasp": 1, "swift": 1}


def test_table_ones_run_speaks_before_others_and_sweeps_last(tmp_path):
    for run_id, experiment in (("run-3", None), ("run-2", "fig4a"), ("run-1", "table1")):
        stored(tmp_path, pool(), run_id, experiment)
    runs = load([tmp_path / "runs"])
    assert main_run(runs).manifest.run_id == "run-1"
    assert main_run([run for run in runs if run.manifest.run_id != "run-1"]).manifest.run_id == "run-3"


def test_captions_name_model_machine_n_and_runs(tmp_path):
    root = stored(tmp_path, pool())
    for name in ("fig3c", "ladder", "acceptance", "fig5"):
        texts = " ".join(text.get_text() for text in figure(name, load([root])).figure.texts).replace("\n", " ")
        for word in ("m & co_1 100%", "float16", "xeon-2c", "greedy", "run-1", "n = 2"):
            assert word in texts, (name, word)


def test_series_differ_in_more_than_colour_and_the_users_style_comes_back():
    before = dict(matplotlib.rcParams)
    with styled():
        cycle = list(matplotlib.rcParams["axes.prop_cycle"])
        assert len({each["marker"] for each in cycle}) == len({each["color"] for each in cycle}) == len(cycle)
    assert dict(matplotlib.rcParams) == before


def test_an_interval_that_does_not_hold_the_value_is_never_drawn_backwards(tmp_path):
    """One question has no interval: its bar has no length."""
    stored(tmp_path, pool(num=1), "run-1", "fig4b", interval=4)
    ours, _ = drawn(tmp_path / "runs", "fig4b")
    assert (ours["low"], ours["high"]) == ("", "")
    assert not math.isnan(float(ours["speedup"]))
