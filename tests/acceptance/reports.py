"""The points of the reports: hand-computed answers, ladders and tables of the committed runs, figures and the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clasp_core.report import ladders, table1
from clasp_core.report.html import page, write
from clasp_core.report.runs import load
from tests import committed
from tests.acceptance.bench import ROOT, Point
from tests.committed import RESULTS

NOTEBOOKS = ROOT / "notebooks"
PREDICTED_WITHIN = 0.1
VIEWPORTS = {"desktop": (1280, 900), "phone": (390, 844)}
DERIVED = (".csv", ".md")
"""What must come out the same wherever it is made; pictures differ with the version that draws them."""


def golden_rows_give_the_hand_computed_answers() -> Point:
    """Every estimator, level, ladder step and grade, by the tests that hold the arithmetic beside the numbers."""
    return _tests("tests/test_metrics.py", "tests/test_summary.py")


def ladders_multiply_and_predict() -> Point:
    """On the committed runs of `smollm2-135m-deep`: every ladder's product, and its prediction cell by cell."""
    runs = load(committed.runs("smollm2-135m-deep"))
    cells = ladders.tables(runs)[0].data.dropna(subset=["measured"])
    product = (cells["product_over_measured"] - 1).abs().max()
    far = cells[cells["predicted_over_measured"].abs() > PREDICTED_WITHIN]
    lost = far["predicted_over_measured"] / (1 + far["predicted_over_measured"])
    unexplained = far[(lost - far["host_share"]).abs() > 0.01]
    share = 1 - len(far) / len(cells)
    names = [f"{cell.method}/{cell.task} {cell.predicted_over_measured:+.0%}" for cell in far.itertuples()]
    return Point(
        bool(product <= 1e-6 and share >= 0.9 and unexplained.empty),
        f"product off by at most {product:.1e}; predicted within 10 % in {share:.0%} of {len(cells)} method x task "
        f"cells, need 90 %; further off: {', '.join(names) or 'none'}; not explained by the host: {len(unexplained)}",
    )


def table1_has_both_sides() -> Point:
    """The paper's cells all there, ours beside them where they were run and "not run" where not."""
    done = _report("table1", str(RESULTS))
    rows = [row for table in table1.tables(load([RESULTS]), table1.Choice()) for row in table.cells.values.tolist()]
    of = {source: [row for row in rows if row[2] == source] for source in ("paper", "ours")}
    not_run = [row for row in of["ours"] if "not run" in row]
    measured = len(of["ours"]) - len(not_run)
    shown = done.stdout.count("not run")
    holds = done.returncode == 0 and shown > 0 and measured > 0 and len(of["paper"]) == len(of["ours"])
    return Point(holds, f"{len(of['ours'])} lines of model and method, {measured} run here, {len(not_run)} not run")


def all_is_regenerated_as_committed() -> Point:
    """One command gives the committed figures' data, tables, notebooks and README again, from the committed rows."""
    with tempfile.TemporaryDirectory() as made:
        rows = Path(made) / "rows"
        for path in committed.files():
            copy = rows / path.relative_to(RESULTS)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        out, notebooks, readme = Path(made) / "results", Path(made) / "notebooks", Path(made) / "README.md"
        shutil.copytree(NOTEBOOKS, notebooks)
        shutil.copy(ROOT / "README.md", readme)
        places = ("--out", str(out), "--notebooks", str(notebooks), "--readme", str(readme))
        done = _report("regenerate", str(rows), *places)
        if done.returncode:
            return Point(False, _last_line(done))
        again = {
            path.relative_to(out): path for name in ("figures", "tables") for path in sorted((out / name).iterdir())
        }
        derived = [name for name in again if name.suffix in DERIVED]
        other = [str(name) for name in derived if not _same(again[name], RESULTS / name)]
        pictures = [name for name in again if name.suffix not in DERIVED]
        absent = [str(name) for name in pictures if not (RESULTS / name).is_file()]
        again_readme = _same(readme, ROOT / "README.md") and _same(out / "demo.svg", RESULTS / "demo.svg")
        changed = [] if again_readme else ["README.md"]
        changed += [path.name for path in sorted(notebooks.glob("*.ipynb")) if not _same(path, NOTEBOOKS / path.name)]
    missing = [line for line in done.stdout.splitlines() if "not drawn" in line]
    return Point(
        not (other or absent or changed or missing),
        f"{len(derived)} files of data and tables, {len(pictures)} pictures, {len(list(NOTEBOOKS.glob('*.ipynb')))} "
        f"notebooks; different: {', '.join((*other, *absent, *changed, *missing)) or 'none'}",
    )


def a_fresh_experiment_draws_its_figure() -> Point:
    """One command runs Figure 3a's experiment (two short answers) into a new folder, another draws it from there."""
    with tempfile.TemporaryDirectory() as made:
        words = ["experiment=laptop/fig3a", f"results_dir={made}", "limit=1", "generation.max_new_tokens=24"]
        done = _run([str(ROOT / "run.py"), *words])
        if done.returncode == 0:
            done = _report("figures", made, "--only", "fig3a", "--out", f"{made}/figures")
        pictures = sorted(path.name for path in Path(made).glob("figures/fig3a.*"))
        return Point(
            done.returncode == 0 and {"fig3a.csv", "fig3a.pdf", "fig3a.png"} <= set(pictures),
            ", ".join(pictures) or _last_line(done),
        )


def the_page_opens_in_a_browser() -> Point:
    """The page's tests in a real Chromium, then the newest committed run at both widths as pictures to look at."""
    tested = _tests("tests/test_report_page.py")
    folder = ROOT / "outputs" / "acceptance"
    folder.mkdir(parents=True, exist_ok=True)
    newest = load(committed.runs("smollm2-135m-deep"))[-1]
    write(folder / "report.html", page(newest))
    shots, complaints = screenshots(folder / "report.html", folder)
    return Point(
        tested.holds and not complaints,
        f"{tested.figure}; {newest.folder.name}: {', '.join(shots)}; complaints: {'; '.join(complaints) or 'none'}",
    )


def screenshots(path: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Pictures of a page at desktop and phone width, and what is wrong with it there (errors, a body too wide)."""
    from playwright import sync_api

    shots, complaints = [], []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height) in VIEWPORTS.items():
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.on("console", lambda message: complaints.append(message.text))
            tab.on("pageerror", lambda error: complaints.append(str(error)))
            tab.goto(path.as_uri())
            over = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            if over > 0:
                complaints.append(f"{over} pixels too wide at {name} width")
            tab.screenshot(path=folder / f"{name}.png", full_page=True)
            shots.append(str((folder / f"{name}.png").relative_to(ROOT)))
        browser.close()
    return shots, complaints


def fast_paths_are_the_eager_path() -> Point:
    """The contract of every method, and passes of every kind, on the compiled engine and on recordings."""
    return _tests("tests/test_fused.py", "tests/test_graphs.py", "tests/test_decoding.py", "tests/test_wiring.py")


def _tests(*files: str) -> Point:
    done = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files])
    counted = re.search(r"\d+ (passed|failed|error).*", done.stdout)
    return Point(done.returncode == 0, counted[0] if counted else _last_line(done))


def _report(*words: str) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "clasp_core.report", *words])


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CI": "1"}  # then a missing browser fails instead of passing over its tests
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}").splitlines()[-1]


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


POINTS = {
    "golden": golden_rows_give_the_hand_computed_answers,
    "ladder": ladders_multiply_and_predict,
    "table1": table1_has_both_sides,
    "regenerate": all_is_regenerated_as_committed,
    "fresh-experiment": a_fresh_experiment_draws_its_figure,
    "engines": fast_paths_are_the_eager_path,
    "page": the_page_opens_in_a_browser,
}
