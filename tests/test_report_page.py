"""The report page as a reader meets it: in a real browser, without a network, whatever a model may have written."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import committed_run

import run as entry
from clasp_core.errors import UserError
from clasp_core.records import Manifest, RoundTrace, TurnRecord
from clasp_core.report.__main__ import main
from clasp_core.report.html import FILE_NAME, page, script_data, write
from clasp_core.report.payload import page_record, skip_in_words
from clasp_core.report.runs import load
from clasp_core.skip import LayerSkip
from clasp_core.store import TEXTS, RunStore, read_texts

DASH, TIMES = " \u2013 ", "\u00d7"
PHONE = {"width": 390, "height": 844}
HOSTILE = (
    "</script><script>window.ran = 1</script>",
    "<script>window.ran = 2</script>",
    "<img src=x onerror=\"window.ran = 3\">",
    "\"'`&lt;&amp;{{data}}{{script}}${window.ran = 4}",
    "line\u2028and\u2029paragraph",
    "right \u202eto\u202c \u200fleft, אבג",
    "<!-- <script> --> ]]> \U0001f642 \x00\x07",
)  # fmt: skip


# ---- browser


def chromium() -> str:
    """Where Chromium is; without one the tests are skipped, and fail where CI promises one."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        why = "no Chromium is installed (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    where = chromium()
    if not os.environ.get("CI"):
        pytest.importorskip("playwright", reason="Playwright is not installed (it is in the dev extra)")
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=where, args=["--no-sandbox"])
        yield opened
        opened.close()


@dataclass
class Visit:
    """An open page, and everything that it complained of or asked for."""

    tab: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.tab.locator(selector).all_inner_texts()]

    def switch(self, scope: str) -> None:
        self.tab.locator(f"#switch input[value='{scope}']").check()

    def figure(self, method: str, key: str) -> str:
        return str(self.tab.locator(f"td[data-method='{method}'][data-figure='{key}']").first.inner_text()).strip()

    def open_question(self, place: int = 0) -> None:
        self.tab.locator(f"tr[data-question='{place}'] button.opener").click()

    def overflow(self) -> int:
        """By how many pixels the body is wider than the window."""
        return int(self.tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a run folder; at the end nothing may have gone wrong in any of them."""
    visits: list[Visit] = []
    with contextlib.ExitStack() as stack:

        def call(folder: Path, **options: Any) -> Visit:
            path = tmp_path / f"page-{len(visits)}.html"
            write(path, page(load([folder])[0]))
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
            stack.callback(context.close)
            opened = Visit(context.new_page())
            opened.tab.on("console", lambda message: opened.complaints.append(message.text))
            opened.tab.on("pageerror", lambda error: opened.complaints.append(str(error)))
            opened.tab.on("dialog", lambda dialog: opened.complaints.append(dialog.message))
            opened.tab.on("request", lambda request: opened.requests.append(request.url))
            opened.tab.goto(path.as_uri())
            visits.append(opened)
            return opened

        yield call
        assert [each.complaints for each in visits] == [[]] * len(visits)
        assert {url.partition(":")[0] for each in visits for url in each.requests} <= {"file", "data"}
        assert all(len([url for url in each.requests if url.startswith("file:")]) == 1 for each in visits)


# ---- runs


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, a tree among them, on two questions of two subtasks each."""
    root = tmp_path_factory.mktemp("tiny")
    words = ("debug=smoke", "method=[clasp,pld,swift]", "limit=2", "task.subtasks=[mt_bench,qa]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "argv", ["run.py", *words, "generation.max_new_tokens=24"])
        entry.main()
    return next(path.parent for path in root.glob("results/*/*/*/rows.jsonl"))


MANIFEST: dict[str, Any] = {
    "run_id": "run-1", "status": "ok", "reference": "ar", "methods": ["ar", "clasp"], "config_hash": "v1:0",
    "config": {"generation": {"temperature": 0.0}}, "command": ["run.py", "method=clasp"],
    "git": {"revision": "abc1234"}, "versions": {"torch": "2"},
    "fingerprint": {"machine": {"cpu": "xeon", "num_cores": 2}},
    "model": {"name": "tiny", "label": "a model"}, "start": "2026-11-29T18:00:00Z",
}  # fmt: skip


def turn(method: str, question: int, ids: list[int], rounds: RoundTrace, task: str = "qa", **more: Any) -> TurnRecord:
    return TurnRecord(
        "run-1", "tiny", method, task, more.pop("category", task), question, 0, 0, 0, num_prompt_tokens=3,
        output_ids=ids, num_new_tokens=len(ids), stop_reason="length", prefill_s=0.5, decode_s=1.0, rounds=rounds,
        **more,
    )  # fmt: skip


def alone(num: int) -> RoundTrace:
    """The rounds of a reference."""
    seconds = [0.9 / num] * num
    none, one = [0] * num, [1] * num
    empty: list[list[int]] = [[] for _ in none]
    return RoundTrace(none, none, one, none, none, [0.0] * num, seconds, [0.0] * num, [None] * num, empty, [None] * num)


def drafted(drafts: list[list[int]], accepted: list[int], emitted: list[int]) -> RoundTrace:
    """The rounds of a method that skips the first two of four layers."""
    num = len(drafts)
    counts = [len(draft) for draft in drafts]
    code = LayerSkip.layers(4, [0, 1]).code
    seconds = [0.1] * num
    return RoundTrace(
        counts, accepted, emitted, counts, [1] * num, seconds, seconds, seconds, [code] * num, drafts, [None] * num
    )


def store(root: Path, rows: list[TurnRecord], texts: dict[str, Any] | None = None, **changes: Any) -> Path:
    with RunStore.create(root, "xeon-2c", "tiny", Manifest(**{**MANIFEST, **changes})) as opened:
        for row in rows:
            opened.append([row])
        if texts is not None:
            opened.write_texts({"schema": 1, **texts})
        return opened.folder


# ---- in the browser


def test_the_page_opens_with_its_tables_and_charts(visit: Callable[..., Visit], tiny_run: Path) -> None:
    opened = visit(tiny_run)
    assert opened.tab.locator("h1").inner_text() == "clasp, pld, swift against ar"
    assert "not a trained model" in opened.tab.locator(".model").inner_text()
    for table in ("summary", "estimator", "ladder", "acceptance", "question"):
        assert opened.tab.locator(f"#{table}-table tbody tr").count() > 0
    for chart in ("speedup-chart", "ladder-charts", "latency-chart", "acceptance-chart", "skip-charts"):
        assert opened.tab.locator(f"#{chart} svg [data-tip] .shape").count() > 0
    assert opened.tab.locator("#ladder-charts svg").count() >= 3
    assert "swift" in opened.tab.locator("#acceptance-remark").inner_text()  # a tree has no positions
    labels = opened.tab.locator("#provenance dt").all_text_contents()
    assert {"command", "git.revision", "label", "dtype", "torch", "generation.max_new_tokens"} <= set(labels)


def interval(found: dict[str, Any]) -> str:
    return f"{found['low']:.2f}{DASH}{found['high']:.2f}"


def test_switching_the_task_shows_the_summarys_numbers(visit: Callable[..., Visit], tiny_run: Path) -> None:
    """Against `summary.json`, which the run wrote itself."""
    opened = visit(tiny_run)
    summary = json.loads((tiny_run / "summary.json").read_text())
    seen = set()
    for scope in ("qa", "overall", "mt_bench"):
        opened.switch(scope)
        assert set(opened.texts("h2 .scope")) <= {scope, ""}
        for name in ("clasp", "pld", "swift"):
            cell, ladder = summary["cells"][name][scope], summary["ladders"][name][scope]
            total = cell["speedup"]["paired_total"]
            assert opened.figure(name, "speedup") == f"{total['value']:.2f}{TIMES}"
            assert opened.figure(name, "interval") == interval(total)
            assert opened.figure(name, "n") == str(total["n"]) == str(cell["num_questions"])
            assert opened.figure(name, "tokens") == f"{cell['num_tokens']:,}"
            assert opened.figure(name, "emitted") == f"{cell['mean_emitted_per_round']['rounds']:.2f}"
            assert opened.figure(name, "speed") == f"{cell['end_to_end_tokens_per_s']:.1f}"
            assert opened.figure(name, "grade") == f"exact {cell['grade']['counts']['exact']}/{cell['num_turns']}"
            shown = opened.tab.locator(f"td[data-method={name}][data-figure=ladder-oracle]").text_content()
            assert shown == f"{ladder['oracle']:.2f}"
            tips = [mark.get_attribute("data-tip") for mark in opened.tab.locator("#speedup-chart [data-tip]").all()]
            assert any(tip.startswith(f"{name}: {total['value']:.2f}{TIMES}") for tip in tips)
            seen.add((name, scope, opened.figure(name, "tokens")))
        questions = opened.tab.locator("#question-table tbody tr").count()
        assert questions == (4 if scope == "overall" else 2)
        measured = [panel.split(TIMES)[0] for panel in opened.texts("#ladder-charts .panel > p")]
        assert measured == [f"{summary['ladders'][name][scope]['measured']:.2f}" for name in ("clasp", "pld", "swift")]
        verify = opened.tab.locator("#latency-chart [data-tip^='clasp, verify']").get_attribute("data-tip")
        assert (
            verify
            == f"clasp, verify: {100 * summary['cells']['clasp'][scope]['shares']['verify']:.1f} % of decode time"
        )
    assert len(seen) == 9


def test_nothing_is_lost_at_phone_width(visit: Callable[..., Visit], tiny_run: Path) -> None:
    """The body never scrolls sideways; a table that is too wide scrolls in its own box."""
    for folder in (tiny_run, committed_run()):
        opened = visit(folder, viewport=PHONE)
        assert opened.overflow() <= 0
        opened.tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        opened.open_question()
        opened.switch("qa")
        opened.switch("overall")
        opened.open_question(1)
        assert opened.overflow() <= 0
        box = opened.tab.locator("#summary > .scroll")
        assert box.evaluate("(box) => box.scrollWidth - box.clientWidth") > 50
        wide = opened.tab.evaluate(
            "[...document.querySelectorAll('section, .answer, .prompt, section > .chart svg, .panel svg')]"
            ".filter((each) => each.getBoundingClientRect().right > 391).length"
        )
        assert wide == 0


def test_an_answer_shows_its_rounds_as_the_rows_hold_them(visit: Callable[..., Visit], tiny_run: Path) -> None:
    opened = visit(tiny_run)
    opened.open_question()
    run = load([tiny_run])[0]
    key = run.rows[0].pair[:2]
    answers = opened.tab.locator(".detail .answer")
    rows = [row for row in run.rows if (row.task, row.question_id) == key]
    rows.sort(key=lambda row: (row.turn, run.manifest.methods.index(row.method)))
    assert answers.count() == len(rows)
    for place, row in enumerate(rows):
        box, trace = answers.nth(place), row.rounds
        assert trace is not None
        assert box.locator(".round").count() == len(trace) + 1
        assert box.locator(".token.accepted").count() == sum(trace.num_accepted)
        dropped = box.locator(".token.rejected").count() + box.locator(".token.cut").count()
        assert dropped == sum(trace.num_drafted) - sum(trace.num_accepted)
        kept = box.locator(".token.accepted, .token.own, .token.plain").count()
        assert kept == len(row.output_ids or ())


PIECES = {"1": "The ", "2": [0xF0, 0x9F], "3": [0x99, 0x82], "4": " end", "5": [0xC3], "6": [0xA9], "7": "x", "8": "\n"}


def split_characters(root: Path) -> Path:
    """An answer with an emoji and an é in two tokens each, one of them drafted and one rejected."""
    ids = [1, 2, 3, 4, 5, 6, 8]
    method = turn("clasp", 1, ids, drafted([[2, 3, 7], [5, 7], [8, 7]], [2, 1, 1], [3, 2, 1]))
    texts = {"pieces": PIECES, "questions": {"qa": {"1": ["Why?"]}}}
    return store(root, [turn("ar", 1, ids, alone(6)), method], texts)


def test_characters_that_span_tokens_are_put_together_again(visit: Callable[..., Visit], tmp_path: Path) -> None:
    opened = visit(split_characters(tmp_path))
    opened.open_question()
    clasp = opened.tab.locator(".detail .answer").nth(1)
    assert clasp.locator(".token.accepted").all_inner_texts() == ["·", "🙂", "·", "↵\n"]
    assert clasp.locator(".token.rejected").all_text_contents() == ["x", "\ufffdx"]
    assert clasp.locator(".token.cut").all_inner_texts() == ["x"]  # behind the end of the answer
    assert clasp.locator(".token.own").all_inner_texts() == ["The ", " end", "é"]
    opened.tab.locator("input[value=plain]").check()
    assert opened.tab.locator(".detail .answer").nth(1).text_content() == "The 🙂 endé\n"
    assert opened.tab.locator(".prompt").text_content() == "Why?"


def hostile_run(root: Path) -> Path:
    pieces = {str(place): text for place, text in enumerate(HOSTILE)}
    ids = list(range(len(HOSTILE)))
    text = " ".join(HOSTILE)
    rows = [
        turn("ar", 1, ids, alone(len(ids) - 1), task=HOSTILE[1], category=text),
        turn("clasp", 1, ids, drafted([[1, 0], [3], [4, 5, 2]], [1, 1, 2], [2, 2, 2]), task=HOSTILE[1], category=text),
        TurnRecord("run-1", "tiny", "clasp", HOSTILE[1], text, 2, 0, 0, 0, error=f"RuntimeError: {text}"),
        turn("ar", 2, ids, alone(len(ids) - 1), task=HOSTILE[1], category=text),
    ]
    questions = {HOSTILE[1]: {"1": [text], "2": [text]}}
    label = {"name": HOSTILE[2], "label": text}
    texts = {"pieces": pieces, "questions": questions}
    return store(
        root,
        rows,
        texts,
        model=label,
        notes=[text],
        command=["run.py", text],
        config={**MANIFEST["config"], text: text},
    )


def test_hostile_text_is_shown_and_never_run(visit: Callable[..., Visit], tmp_path: Path) -> None:
    folder = hostile_run(tmp_path)
    source = page(load([folder])[0])
    assert (
        source.count("<script") == source.count("</script>") == 1 + 1 + 2
    )  # the script, the page's data, two questions
    assert "<img" not in source
    opened = visit(folder)
    opened.open_question(0)
    opened.open_question(1)
    text = " ".join(HOSTILE)
    assert opened.tab.locator("pre.prompt").all_text_contents() == [text, text]
    assert opened.tab.locator(".model").text_content() == text
    assert f"RuntimeError: {text}" in opened.tab.locator(".answer.failed").all_text_contents()
    shown = opened.tab.locator(".detail .answer").first.text_content()
    assert "<script>window.ran = 2</script>" in shown
    assert "⟨U+2028⟩" in shown
    assert "⟨U+202E⟩" in shown
    assert "⟨U+0000⟩" in shown
    opened.tab.locator("input[value=plain]").check()
    assert opened.tab.locator(".detail .answer.plain").first.text_content() == "".join(HOSTILE)
    opened.switch(HOSTILE[1])
    assert opened.tab.locator("#failure-table").text_content().count("onerror") == 1
    assert opened.tab.evaluate("window.ran") is None
    assert opened.tab.locator("img").count() == 0
    assert opened.tab.locator("script").count() == 4


def test_a_failed_turn_shows_in_the_table_the_list_and_its_question(
    visit: Callable[..., Visit], tmp_path: Path
) -> None:
    rows = [
        turn("ar", 1, [1, 2], alone(1)), turn("clasp", 1, [1, 2], drafted([[2]], [1], [1])),
        turn("ar", 2, [1, 2], alone(1)),
        TurnRecord("run-1", "tiny", "clasp", "qa", "qa", 2, 0, 0, 0, error="OutOfMemory: 3 GiB"),
    ]  # fmt: skip
    opened = visit(store(tmp_path, rows, status="failed", num_failed=1))
    assert opened.figure("clasp", "failed") == "1"
    assert opened.figure("ar", "failed") == "0"
    assert opened.texts("#failure-table tbody tr") == ["clasp\tqa\t2\t1\tOutOfMemory: 3 GiB"]
    assert any("clasp failed on 1 of 2 turns" in note for note in opened.texts("#notes li"))
    assert "the run's status is failed" in opened.texts("#notes li")
    opened.open_question(1)
    assert opened.texts(".answer.failed") == ["OutOfMemory: 3 GiB"]


def before_ids_were_kept(folder: Path, copy: Path) -> Path:
    """A run as it was stored when rows held neither drafted ids nor paths, and no text lay beside them."""
    shutil.copytree(folder, copy)
    (copy / TEXTS).unlink()
    rows = [json.loads(line) for line in (copy / "rows.jsonl").read_text().splitlines()]
    for each in rows:
        for key in ("drafted_ids", "accepted_path"):
            del each["rounds"][key]
    (copy / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return copy


def test_a_run_from_before_the_ids_were_kept_opens_with_counts(
    visit: Callable[..., Visit], tiny_run: Path, tmp_path: Path
) -> None:
    folder = before_ids_were_kept(tiny_run, tmp_path / tiny_run.name)
    assert read_texts(folder) is None
    opened = visit(folder)
    opened.open_question()
    assert "kept no text" in opened.tab.locator(".detail").inner_text()
    row = next(row for row in load([folder])[0].rows if row.method == "clasp")
    box = opened.tab.locator(".detail .answer").nth(1)
    assert row.rounds is not None
    assert box.locator(".token.accepted").count() == sum(row.rounds.num_accepted)
    assert box.locator(".token").first.inner_text() == f"#{(row.output_ids or [0])[0]}"
    assert box.locator(".token.rejected").count() == 0
    counted = sum(int(text.split()[0]) for text in box.locator(".count").all_inner_texts())
    assert counted == sum(row.rounds.num_drafted) - sum(row.rounds.num_accepted)


def test_a_keyboard_is_enough(visit: Callable[..., Visit], tiny_run: Path) -> None:
    opened = visit(tiny_run)
    focused = "document.activeElement"
    opened.tab.locator("#switch input:checked").focus()
    opened.tab.keyboard.press("ArrowRight")
    assert set(opened.texts("h2 .scope")) <= {"mt_bench", ""}
    opened.tab.locator("button.opener").first.focus()
    opened.tab.keyboard.press("Enter")
    opened.tab.keyboard.press("Tab")
    opened.tab.keyboard.press("Tab")
    assert opened.tab.evaluate(f"{focused}.className") == "round"
    opened.tab.keyboard.press("ArrowRight")
    tip = opened.tab.locator("#tip").inner_text()
    assert tip.startswith("Round 1 of 23\nnothing drafted: the target's token\ndraft ")
    assert opened.tab.evaluate(f"{focused}.getAttribute('aria-label')") == tip
    opened.tab.keyboard.press("Escape")
    assert opened.tab.locator("#tip").is_hidden()
    opened.tab.locator("#ladder-charts [data-tip]").first.focus()
    opened.tab.keyboard.press("End")
    assert opened.tab.locator("#tip").inner_text().startswith("measured: ")


def test_pointing_at_a_mark_says_its_value_also_after_a_scroll(visit: Callable[..., Visit], tiny_run: Path) -> None:
    opened = visit(tiny_run)
    tip = opened.tab.locator("#tip")
    ladder = json.loads((tiny_run / "summary.json").read_text())["ladders"]["clasp"]["overall"]
    opened.tab.locator("#ladder-charts svg [data-tip^=rejection]").first.hover()  # scrolls there first
    opened.tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert tip.inner_text().startswith(f"rejection: {ladder['ceiling']:.2f}{TIMES} ")
    opened.tab.locator("h1").hover()
    assert tip.is_hidden()


CONTRAST = """
([selector]) => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length && (colour.length < 4 || colour[3] > 0)) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(selector)].map((element) => {
    const [ink, ground] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
  });
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(visit: Callable[..., Visit], tmp_path: Path, scheme: str) -> None:
    opened = visit(split_characters(tmp_path), color_scheme=scheme)
    opened.open_question()
    seen = set()
    for selector in (
        "body",
        ".lead",
        ".facts li",
        "td",
        "th",
        ".choice span",
        ".token",
        ".answer",
        "summary",
        "small",
        "button",
    ):
        found = opened.tab.evaluate(CONTRAST, [selector])
        assert min(found) >= 4.5, (selector, min(found))
        seen.add(selector)
    background = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")


def test_kinds_of_tokens_differ_by_more_than_colour(visit: Callable[..., Visit], tmp_path: Path) -> None:
    opened = visit(split_characters(tmp_path))
    opened.open_question()
    looks = (
        "(selector) => { const style = getComputedStyle(document.querySelector(selector));"
        " return [style.textDecorationLine, style.borderBottomStyle, style.fontStyle].join(); }"
    )
    kinds = [f".answer .token.{kind}" for kind in ("accepted", "own", "rejected", "cut")]
    assert len({opened.tab.evaluate(looks, kind) for kind in kinds}) == 4


def test_questions_are_drawn_as_they_are_asked_for(visit: Callable[..., Visit], tmp_path: Path) -> None:
    rows = [turn(m, n, [1, 2], alone(1), task=("qa", "rag")[n % 2]) for n in range(120) for m in ("ar", "clasp")]
    opened = visit(store(tmp_path, rows))
    lines = opened.tab.locator("#question-table tbody tr")
    assert lines.count() == 25
    opened.tab.get_by_role("button", name="Show 95 more of 120").click()
    assert lines.count() == 120
    opened.tab.get_by_label("Find a question").fill("RAG")
    assert lines.count() == 25
    assert opened.tab.locator(".answer").count() == 0
    opened.tab.get_by_label("Find a question").fill("nowhere")
    assert opened.texts("#question-table tbody tr") == ["No question matches."]


def test_a_run_without_a_reference_has_a_page_without_speedups(visit: Callable[..., Visit], tmp_path: Path) -> None:
    rows = [turn("clasp", 1, [1, 2], drafted([[2]], [1], [1]))]
    opened = visit(store(tmp_path, rows, reference=None, methods=["clasp"]))
    assert opened.tab.locator("h1").inner_text() == "clasp"
    assert opened.figure("clasp", "speedup") == "n/a"
    assert opened.tab.locator("#ladder").is_hidden()
    opened.open_question()


# ---- without a browser


def test_the_command_writes_one_page_into_the_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = split_characters(tmp_path)
    main(["html", str(tmp_path)])
    assert (folder / FILE_NAME).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.strip().endswith(FILE_NAME)
    main(["html", str(folder), "--out", str(tmp_path / "own.html")])
    assert (tmp_path / "own.html").read_bytes() == (folder / FILE_NAME).read_bytes()


def test_mistakes_of_the_command_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = split_characters(tmp_path / "one")
    second = store(tmp_path / "two", [turn("ar", 1, [1, 2], alone(1))], run_id="run-1")
    for words, said in (
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(first), str(second), "--out", "x.html"], "--out names one file, and 2 runs were found"),
        ([str(first), "--out", str(tmp_path / "no" / "x.html")], "choose another --out"),
        ([str(first), "--out", str(tmp_path)], "choose another --out"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["html", *words])
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert error.startswith("error: ")
        assert said in error
        assert error.count("\n") == 1


def test_data_in_the_page_cannot_end_its_block_and_comes_back_whole() -> None:
    value = {text: [text] for text in HOSTILE}
    block = script_data("x", value)
    inside = block.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert not set("<>&\u2028\u2029") & set(inside)
    assert inside.isascii()
    assert json.loads(inside) == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        script_data("x", {"value": float("nan")})


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    source = page(load([split_characters(tmp_path)])[0])
    head = source.partition("<script")[0]
    assert "default-src 'none'" in head
    assert "unsafe" not in head
    assert "http://" not in source.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in source
    assert "innerHTML" not in source
    assert "{{" not in source


def test_the_skip_map_weighs_sets_by_the_steps_they_drafted(tmp_path: Path) -> None:
    trace = drafted([[1, 2, 3], [4]], [0, 0], [1, 1])
    trace.skip[1] = LayerSkip.sublayers(4, attn=[3], mlp=[]).code
    found = page_record(load([store(tmp_path, [turn("clasp", 1, [1, 2, 3], trace)])])[0], None)["skips"]["clasp"]["qa"]
    assert found == {"num_sets": 2, "num_steps": 4, "attn": [0.75, 0.75, 0, 0.25], "mlp": [0.75, 0.75, 0, 0]}


def test_skip_sets_read_as_words() -> None:
    assert skip_in_words(LayerSkip.layers(9, [1, 3, 4, 5])) == "4 of 9 layers skipped: 1, 3-5"
    apart = LayerSkip.sublayers(9, attn=[0, 1], mlp=[])
    assert skip_in_words(apart) == "skipped of 9 layers: 2 attention (0-1), 0 MLP (none)"


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose another --out"):
        write(tmp_path / "missing" / "x.html", "text")
    path = tmp_path / "x.html"
    write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
