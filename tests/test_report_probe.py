"""Timed passes as tables and a figure: a small hand-made file, whose numbers are worked out by hand."""

import json
from pathlib import Path

import pytest
from stored_runs import FINGERPRINT
from test_figures import drawn, pool, stored

from clasp_core.errors import UserError
from clasp_core.report import benches, probe
from clasp_core.report.__main__ import main
from clasp_core.report.figures import Missing, figure
from clasp_core.report.runs import load

STEP_S = (2.0, 2.0, 4.0)
"""The last turn met a slow spell; every other case did too."""


def case(name, ratios, num_bytes=None, context=128, model="m"):
    """A case that took so many steps in each turn."""
    seconds = [step_s * ratio for step_s, ratio in zip(STEP_S, ratios, strict=True)]
    setting = {"model": model, "dtype": "float32", "engine": "compiled", "context": context}
    return {**setting, "case": name, "seconds": seconds, "num_bytes": num_bytes}


def cases(context=128, model="m", wide=1.2):
    """AR reads 100 bytes in 2 s, and the machine 80 in 1 s: 62.5 %. Each further row costs a twentieth of a step."""
    return [
        case("ar_step", (1, 1, 1), 100, context, model),
        case("read", (0.5, 0.5, 0.5), 80, context, model),
        case("width-2", (1.05, 9, 1.05), 100, context, model),
        case("width-5", (wide,) * 3, 100, context, model),
        case("draft-50", (0.66, 0.66, 0.6), 55, context, model),
        case("dp-2", (3, 3, 2), None, context, model),
        case("prefill", (8, 8, 8), None, context, model),
    ]


def turn(method, tokens_per_s, host=0.01, **more):
    """Two answers of a method that spends half of its decode time in drafts."""
    setting = {"model": "m", "dtype": "float32", "engine": "compiled", "method": method, "num_turns": 2}
    parts = {"draft": 0.5, "verify": 0.4, "select": 0.09, "host": host, "prefill": 0.25}
    return setting | parts | {"tokens_per_s": tokens_per_s, "peak_memory_bytes": 1_500_000_000} | more


def bench(folder, rows, name="20261129T180000Z", **more):
    path = folder / "xeon-2c" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    git = {"revision": "0123456789abcdef", "dirty": False}
    content = {"schema": 1, "time": "2026-11-29T18:00:00Z", "git": git, "fingerprint": FINGERPRINT, "rows": rows}
    path.write_text(json.dumps({**content, **more}))
    return path


def test_every_figure_is_a_median_over_turns_of_a_ratio_within_one(tmp_path):
    bench(tmp_path, cases())
    step, verification, drafts, programmes = probe.tables(benches.newest(tmp_path))
    names = ["m", "float32", "compiled", "128"]
    # neither the slow turn nor the pass of nine steps among those of width 2 moves a median
    assert step.cells.to_numpy().tolist() == [
        [*names, "2000.00", "0.0", "0.0", "62.5 %", "0.050", "8.00", "bandwidth-bound"]
    ]
    assert step.data.iloc[0][["bytes_per_s", "read_bytes_per_s"]].tolist() == [50.0, 80.0]
    assert list(verification.cells.columns[4:]) == ["1", "2", "5"]
    assert verification.cells.to_numpy().tolist() == [[*names, "1.00", "1.05", "1.20"]]
    assert drafts.cells.to_numpy().tolist() == [[*names, "50 %", "0.660", "0.550", "1.20"]]
    assert programmes.cells.to_numpy().tolist() == [[*names, "2", "6000.00", "3.00"]]
    for table in (step, verification, drafts, programmes):
        assert "on xeon-2c, commit 0123456789, 2026-11-29." in table.caption


@pytest.mark.parametrize(
    ("wide", "read_bytes", "word"),
    [
        (1.9, 80, "compute-bound verification"),  # a row costs (0.05 + 0.225) / 2
        (1.5, 80, "bandwidth-bound"),  # (0.05 + 0.125) / 2
        (1.2, 80, "bandwidth-bound"),
        (1.2, 90, "launch-bound"),  # 50 of 90 bytes a second
        (1.2, None, "unknown"),
    ],
)
def test_the_regime_has_a_name(tmp_path, wide, read_bytes, word):
    rows = cases(wide=wide)
    rows[1]["num_bytes"] = read_bytes
    (found,) = benches.read(bench(tmp_path, rows)).cases.values()
    assert benches.extra_row(found) == pytest.approx((0.05 + (wide - 1) / 4) / 2)
    assert benches.regime(found) == word


def test_whole_answers_have_a_line_per_method_and_what_is_unknown_says_so(tmp_path):
    unknown = dict.fromkeys(("draft", "verify", "select", "host"))
    bench(tmp_path, cases(), turns=[turn("clasp", 26.04), turn("hf_generate", 12.0, **unknown)])
    table = probe.tables(benches.newest(tmp_path))[-1]
    names = ["m", "float32", "compiled"]
    assert table.cells.to_numpy().tolist() == [
        [*names, "clasp", "2", "26.0", "50.0 %", "40.0 %", "9.0 %", "1.0 %", "25.0 %", "1.5"],
        [*names, "hf_generate", "2", "12.0", "n/a", "n/a", "n/a", "n/a", "25.0 %", "1.5"],
    ]
    assert table.data["tokens_per_s"].tolist() == [26.04, 12.0]


def test_a_width_that_one_setting_lacks_is_left_empty(tmp_path):
    rows = [*cases(), *(row for row in cases(512) if row["case"] != "width-2")]
    table = probe.tables(benches.read(bench(tmp_path, rows)))[1]
    assert table.cells.to_numpy().tolist()[1][4:] == ["1.00", "", "1.20"]
    assert table.data["width"].tolist() == [1, 2, 5, 1, 5]


def test_the_newest_file_speaks_and_a_named_one_too(tmp_path, capsys):
    old = bench(tmp_path, cases(model="old"), "20261128T180000Z")
    bench(tmp_path, cases(model="new"))
    for place, model in ((tmp_path, "new"), (old, "old")):
        main(["probe", str(place), "--format", "csv"])
        out = capsys.readouterr().out
        assert f"{model},float32,compiled,128," in out
    for form in ("terminal", "markdown", "latex"):
        main(["probe", str(tmp_path), "--format", form])
        assert "62.5" in capsys.readouterr().out


def test_what_is_no_timed_pass_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["probe", str(tmp_path)])
    assert capsys.readouterr().err.endswith("`make bench` or `make gpu-check` stores some\n")
    with pytest.raises(UserError, match="does not exist"):
        benches.newest(tmp_path / "none")
    with pytest.raises(UserError, match="has schema 2, this version reads 1"):
        benches.read(bench(tmp_path, [], schema=2))
    with pytest.raises(UserError, match="has no case 'read' for m, float32, compiled"):
        benches.read(bench(tmp_path, [row for row in cases() if row["case"] != "read"]))
    with pytest.raises(UserError, match="has 2 turns of 'prefill' and 3 of 'ar_step' for m, float32, compiled"):
        benches.read(bench(tmp_path, [*cases()[:-1], cases()[-1] | {"seconds": [1.0, 1.0]}]))
    for more in ({"seconds": []}, {"seconds": [0, 0, 0]}, {"seconds": [1, 1, float("nan")]}, {"num_bytes": "many"}):
        with pytest.raises(UserError, match="is no file of timed passes"):
            benches.read(bench(tmp_path, [*cases()[:-1], cases()[-1] | more]))
    with pytest.raises(UserError, match="is no file of timed passes"):
        benches.read(bench(tmp_path, [*cases(), cases()[2] | {"case": "width-x"}]))
    with pytest.raises(UserError, match="is no file of timed passes"):
        benches.read(bench(tmp_path, cases(), git=None))
    for text in ("", "[]", "{}", '{"schema": 1, "rows": [{"model": "m"}]}'):
        path = bench(tmp_path, [])
        path.write_text(text)
        with pytest.raises(UserError, match="is no file of timed passes"):
            benches.newest(tmp_path)


def test_the_figure_has_a_line_per_context_from_the_folder_beside_the_runs(tmp_path):
    root = stored(tmp_path, pool())
    assert isinstance(figure("verification", load([root])), Missing)
    bench(root, [*cases(), *cases(512, wide=1.6), *cases(model="other")])
    lines = drawn(root, "verification")
    found = [(line["model"], line["context"], line["width"], round(float(line["v"]), 3)) for line in lines]
    assert found == [
        ("m", "128", "1", 1.0), ("m", "128", "2", 1.05), ("m", "128", "5", 1.2),
        ("m", "512", "1", 1.0), ("m", "512", "2", 1.05), ("m", "512", "5", 1.6),
        ("other", "128", "1", 1.0), ("other", "128", "2", 1.05), ("other", "128", "5", 1.2),
    ]  # fmt: skip
    plot = figure("verification", load([root]))
    assert [axes.get_title(loc="left") for axes in plot.figure.axes] == [
        "m, float32, compiled",
        "other, float32, compiled",
    ]


def test_a_model_that_is_not_there_is_one_line_before_anything_is_timed():
    from tests.acceptance import speed

    speed.check_names(["tiny", "smollm2-135m"])
    with pytest.raises(UserError, match="no model 'nope'; conf/model has llama2-13b, "):
        speed.check_names(["tiny", "nope"])


def test_what_the_bench_stores_is_what_the_report_reads(tmp_path, monkeypatch):
    """Through the writer itself, so that neither side can change alone."""
    from tests.acceptance import speed

    monkeypatch.setattr(speed, "ROOT", tmp_path)
    speed.store(cases(), [turn("ar", 20.0)], {"x": 1.0})
    found = benches.newest(tmp_path)
    assert isinstance(found.path, Path)
    assert [setting.model for setting in found.cases] == ["m"]
    assert [turns.method for turns in found.turns] == ["ar"]
