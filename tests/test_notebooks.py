"""The notebooks: thin, kept with their outputs, and executed on stored rows from both folders."""

import shutil

import nbformat
import pytest
from conftest import ROOT, committed
from nbclient import NotebookClient
from test_experiments import composed

import run as entry

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DRAWS = {"ladder": 3, "latency": 1, "size": 1, "skip_sets": 3, "sweeps": 3, "verification": 1}
"""Pictures where there are rows for all of them."""
COMMITTED = next(path.parents[2] for path in committed.files() if path.name == "rows.jsonl")
TINY = ("model=tiny", "generation.max_new_tokens=6", "limit=1", "task.subtasks=[qa,mt_bench]")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The committed rows and passes, and runs of the tiny model beside them."""
    root = tmp_path_factory.mktemp("results")
    shutil.copytree(COMMITTED, root / COMMITTED.name)
    shelf = entry.Shelf()
    free = ("analysis.num_free=3", "analysis.counts=[1,2]")
    jobs = [("fig3a", ()), ("fig3b", free)]
    jobs += [("fig4a", (f"method.clasp.skip_ratio={each}",)) for each in (0.3, 0.5)]
    jobs += [("fig4b", (f"method.clasp.interval={each}",)) for each in (1, 4)]
    jobs += [("fig4c", (f"method.clasp.exit_threshold={each}",)) for each in (0.1, 0.7)]
    for name, words in jobs:
        config, _, _ = composed(f"experiment=laptop/{name}", *TINY, f"results_dir={root}", *words)
        entry.run_job(config, shelf)
    return root


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook):
    return sum("image/png" in out.get("data", {}) for cell in code(notebook) for out in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_thin_and_kept_with_the_outputs_of_committed_rows(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    assert sum(len(cell.source.splitlines()) for cell in code(notebook)) < 30
    _, *rest = code(notebook)
    assert all(cell.outputs for cell in rest)
    kinds = {out.output_type for cell in code(notebook) for out in cell.outputs}
    assert kinds == {"execute_result"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_the_root_or_its_own_folder(path, results, monkeypatch):
    monkeypatch.setenv("CLASP_RESULTS", str(results))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(path, 4)
    folder = ROOT if NOTEBOOKS.index(path) % 2 else path.parent
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    assert pictures(notebook) == DRAWS.get(path.stem, 0)
    assert all(cell.outputs for cell in code(notebook)[1:])
