"""`regenerate`: all figures, tables and notebooks by one command, and no difference where nothing has changed."""

import json

import nbformat
import pytest
from conftest import committed_run
from test_figures import pool, stored

from clasp_core.errors import UserError
from clasp_core.report import figures, notebooks, readme
from clasp_core.report.__main__ import main
from clasp_core.report.runs import load


def notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{place}") for place, source in enumerate(sources)]
    content = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python", "version": "3.0.0"}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(content) + "\n")
    return path


def test_a_notebook_is_changed_by_its_outputs_only_and_once(tmp_path):
    """Neither by the time, nor by the version of the kernel's Python."""
    path = notebook(tmp_path / "a.ipynb", "import os", "os.path.basename(os.environ['CLASP_RESULTS'])")
    assert notebooks.execute(path, tmp_path / "rows")
    first = path.read_text()
    assert not notebooks.execute(path, tmp_path / "rows")
    assert path.read_text() == first
    found = json.loads(first)
    assert [cell["metadata"] for cell in found["cells"]] == [{}, {}]
    assert found["metadata"]["language_info"]["version"] == "3.0.0"
    assert found["cells"][1]["outputs"][0]["data"]["text/plain"] == ["'rows'"]
    assert notebooks.execute(path, tmp_path / "others")


def test_a_notebook_that_fails_is_one_line_and_stays_as_it_was(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "1", "1 / 0")
    before = path.read_text()
    with pytest.raises(UserError, match=r"a\.ipynb failed: ZeroDivisionError: division by zero; the file is as before"):
        notebooks.execute(path, tmp_path)
    assert path.read_text() == before
    path.write_text("{}")
    with pytest.raises(UserError, match=r"a\.ipynb is no notebook"):
        notebooks.execute(path, tmp_path)


def test_one_command_makes_all_figures_tables_and_notebooks_and_nothing_elsewhere(tmp_path, capsys):
    root, out, folder = stored(tmp_path, pool()), tmp_path / "out", tmp_path / "notebooks"
    before = {path for path in root.rglob("*") if path.is_file()}
    notebook(folder / "b.ipynb", "2")
    notebook(folder / "a.ipynb", "1")
    words = ["regenerate", str(root), "--out", str(out), "--notebooks", str(folder)]
    main(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"{folder / 'a.ipynb'}: changed", f"{folder / 'b.ipynb'}: changed"]
    assert len(lines) == len(figures.names()) + 3 + 2
    assert {path.stem for path in (out / "tables").iterdir()} == {"table1", "ladder", "losslessness"}
    assert {"ladder", "fig3c", "predicted"} <= {path.stem for path in (out / "figures").iterdir()}
    assert {path for path in root.rglob("*") if path.is_file()} == before
    made = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    main(words)
    assert capsys.readouterr().out.splitlines()[-1] == f"{folder / 'b.ipynb'}: as before"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == made


def test_a_folder_without_notebooks_is_refused_before_anything_is_made(tmp_path, capsys):
    root = stored(tmp_path, pool())
    with pytest.raises(SystemExit):
        main(["regenerate", str(root), "--out", str(tmp_path / "out"), "--notebooks", str(tmp_path / "none")])
    assert "holds no notebook; name their folder with --notebooks" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_readme_is_made_again_between_its_marks_only(tmp_path, capsys):
    (run,) = load([committed_run()])
    path, out, folder = tmp_path / "README.md", tmp_path / "out", tmp_path / "notebooks"
    notebook(folder / "a.ipynb", "1")
    path.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    words = ["regenerate", str(run.folder), "--out", str(out), "--notebooks", str(folder), "--readme", str(path)]
    main(words)
    assert capsys.readouterr().out.splitlines()[-1] == f"{path}, {out / 'demo.svg'}"
    text = path.read_text()
    assert text.startswith(f"before\n{readme.BEGIN}\n![The tables of `make demo TOKENS=")
    assert text.endswith(f"measured over decode time.\n{readme.END}\nafter\n")
    assert "](out/demo.svg)" in text
    total = run.summary()["cells"]["clasp"]["overall"]["speedup"]["paired_total"]
    assert f"| {total['value']:.2f} [{total['low']:.2f}, {total['high']:.2f}] | exact |\n" in text
    assert "<svg" in (out / "demo.svg").read_text()
    main(words)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["nothing", readme.BEGIN, f"{readme.END} {readme.BEGIN}"])
def test_a_readme_without_marks_is_named_and_left_alone(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(UserError, match=r"README\.md lacks the lines <!-- measured: begin -->"):
        readme.rewrite(path, load([committed_run()])[0], tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]
    assert path.read_text() == text
