"""The experiments of `conf/experiment`: each composes and builds, and those of small size run on the tiny model."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

import run as entry
from clasp_core.entry import keys
from clasp_core.entry.building import build, build_methods, build_questions
from clasp_core.entry.manifests import not_in_hash
from clasp_core.errors import UserError
from clasp_core.report.figures import Missing, figure
from clasp_core.report.runs import load
from clasp_core.store import RunStore, read_analysis, read_run

FOLDER = Path(keys.CONF) / "experiment"
NAMES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))
EXPERIMENTS = [name for name in NAMES if name != "none"]


def composed(*words):
    """The configuration, and the sweep that goes with it."""
    keys.register()
    with initialize_config_dir(str(keys.CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(words), return_hydra_config=True)
        sweep = OmegaConf.to_container(cfg.hydra.sweeper.params or OmegaConf.create({}))
        mode = cfg.hydra.mode
        job = compose("config", overrides=list(words))
    return OmegaConf.to_container(job, resolve=True, throw_on_missing=True), sweep, mode


def build_all(config):
    """Everything that a run of it would build before it loads a model."""
    if config["analysis"]:
        return build(config["analysis"], "analysis")
    return build_methods(config)


def test_every_table_and_figure_of_the_paper_has_both_sizes():
    figures = {"table1", "fig3a", "fig3b", "fig4a", "fig4b", "fig4c", "fig5"}
    assert {name for name in EXPERIMENTS if "/" not in name} == {*figures, "fig3c"}
    assert {name for name in EXPERIMENTS if "/" in name} == {f"laptop/{name}" for name in figures}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_builds_and_names_itself(name):
    config, sweep, mode = composed(f"experiment={name}")
    assert config["experiment"] == name.split("/")[-1]
    build(config["model"], "model")
    build_all(config)
    assert (mode is not None) == bool(sweep) == (config["experiment"] in ("fig4a", "fig4b", "fig4c", "fig5"))
    if name.startswith("laptop/"):
        assert build_questions(config)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_and_every_point_of_its_sweep_takes_the_tiny_model(name):
    words = (f"experiment={name}", "model=tiny", "task=[sample]")
    config, sweep, _ = composed(*words)
    assert config["model"]["name"] == "tiny"
    points = [f"{key}={value}" for key, values in sweep.items() if key != "model" for value in values.split(",")]
    for point in points or ["seed=0"]:
        build_all(composed(*words, point)[0])


def test_without_an_experiment_nothing_changes():
    assert composed()[0]["experiment"] is None
    assert composed("experiment=none")[0] == composed()[0]


def test_the_papers_settings_are_those_of_its_70b(tmp_path):
    config, _, _ = composed("experiment=table1")
    clasp = config["method"]["clasp"]
    assert round(clasp["skip_ratio"] * 80) == 44
    assert (clasp["interval"], clasp["exit_threshold"]) == (128, 0.7)
    assert config["generation"]["max_new_tokens"] == 1024
    assert list(config["task"]) == ["spec_bench", "subtasks"] or "spec_bench" in config["task"]


def test_an_experiments_name_and_an_analysis_change_no_hash():
    """Rows of a run that was started without the experiment can be resumed with it."""
    assert {"experiment", "analysis"} <= set(not_in_hash({}))


def tiny(tmp_path, shelf, name, *words):
    """A laptop experiment on the tiny model; its folder."""
    config, _, _ = composed(f"experiment=laptop/{name}", "model=tiny", f"results_dir={tmp_path}", *words)
    return entry.run_job(config, shelf)


def test_figure_3a_runs_on_the_tiny_model_into_an_ordinary_run_folder(tmp_path, capsys):
    folder = tiny(tmp_path, entry.Shelf(), "fig3a", "generation.max_new_tokens=6", "limit=1")
    manifest, rows = read_run(folder)
    assert (manifest.status, manifest.methods, manifest.reference, rows) == ("ok", [], None, [])
    assert manifest.config["experiment"] == "fig3a"
    assert manifest.config["analysis"]["skip_ratio"] == 0.5
    found = read_analysis(folder)
    assert [row["position"] for row in found] == [*range(6), *range(6)]
    assert {row["kind"] for row in found} == {"token_skip_set"}
    assert Path(capsys.readouterr().out.strip().splitlines()[-1]).resolve() == folder.resolve()
    plot = figure("fig3a", load([tmp_path]))
    assert [line["num_pairs"] for line in plot.data] == [10, 8, 6, 4, 2]  # two answers of six tokens
    assert isinstance(figure("ladder", load([tmp_path])), Missing)


def test_figure_3b_runs_on_the_tiny_model_and_the_programme_is_never_above_the_best(tmp_path):
    words = ("analysis.num_free=4", "analysis.counts=[1,2,3]", "analysis.every=3", "generation.max_new_tokens=6")
    found = read_analysis(tiny(tmp_path, entry.Shelf(), "fig3b", *words, "limit=1"))
    assert [(row["position"], row["num_skipped"]) for row in found] == [(at, m) for at in (0, 3) for m in (1, 2, 3)] * 2
    assert all(row["random_mean"] <= row["brute_force"] >= row["programme"] for row in found)
    plot = figure("fig3b", load([tmp_path]))
    assert [line["num_tokens"] for line in plot.data] == [4, 4, 4]


def test_an_analysis_that_does_not_fit_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="the model has 6 layers"):
        tiny(tmp_path, entry.Shelf(), "fig3b")
    with pytest.raises(UserError, match="an analysis is not resumed"):
        tiny(tmp_path, entry.Shelf(), "fig3a", "resume=somewhere")
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_analysis_says_so_and_keeps_what_it_found(tmp_path, monkeypatch):
    real = RunStore.append_analysis

    def once(self, rows):
        if rows[0]["position"] == 2:
            raise KeyboardInterrupt
        real(self, rows)

    monkeypatch.setattr(RunStore, "append_analysis", once)
    with pytest.raises(UserError, match="interrupted; what was found so far is in"):
        tiny(tmp_path, entry.Shelf(), "fig3a", "generation.max_new_tokens=4")
    (folder,) = {path.parent for path in tmp_path.rglob("manifest.jsonl")}
    assert read_run(folder)[0].status == "interrupted"
    assert [row["position"] for row in read_analysis(folder)] == [0, 1]


def test_rows_of_an_analysis_are_plain_json(tmp_path):
    folder = tiny(tmp_path, entry.Shelf(), "fig3a", "generation.max_new_tokens=2", "limit=1", "task.subtasks=[qa]")
    for line in (folder / "analysis.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert set(row) == {"kind", "num_skipped", "skip", "task", "category", "question_id", "turn", "position"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("fig9", "unknown experiment 'fig9'"), ("laptop/fi3a", "unknown experiment/laptop 'fi3a'; did you mean fig3a")],
)
def test_an_unknown_experiment_is_explained_in_one_line(name, words):
    with pytest.raises(MissingConfigException) as caught:
        composed(f"experiment={name}")
    text = keys.explain(caught.value)
    assert text.startswith(words)
    assert "\n" not in text
