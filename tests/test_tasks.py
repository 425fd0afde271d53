"""Question files: what is read, in which order, and what a faulty file or request says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from clasp_core.errors import UserError
from clasp_core.fetch import SPEC_BENCH
from clasp_core.tasks import CATEGORIES, MT_BENCH_CATEGORIES, SUBTASKS, JsonlTask, load

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = "data/sample/questions.jsonl"

WriteFile = Callable[[str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def write_file(content: str | bytes) -> str:
        path = tmp_path / "questions.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write_file


def line(question_id: object = 1, category: object = "qa", turns: object = ("why?",), **more: object) -> str:
    row = {"question_id": question_id, "category": category, "turns": turns, **more}
    return json.dumps({key: value for key, value in row.items() if value != "absent"}) + "\n"


def spec_bench_file() -> Path:
    for path in (ROOT.parent / "shared/spec_bench/question.jsonl", ROOT / SPEC_BENCH.path):
        if path.is_file():
            return path
    pytest.skip("Spec-Bench's questions are not here; `python -m clasp_core.fetch spec_bench` brings them")


def sample_rows() -> list[dict[str, Any]]:
    return [json.loads(text) for text in (ROOT / SAMPLE).read_text(encoding="utf-8").splitlines()]


def test_sample_has_four_questions_of_each_subtask() -> None:
    questions = load(SAMPLE, "sample", root=ROOT)
    assert Counter(q.task for q in questions) == dict.fromkeys(SUBTASKS, 4)
    assert {len(q.turns) for q in questions if q.task == "mt_bench"} == {2}
    assert {len(q.turns) for q in questions if q.task != "mt_bench"} == {1}
    assert len({q.category for q in questions if q.task == "mt_bench"}) == 4


def test_sample_follows_the_wording_of_the_question_file() -> None:
    for question in load(SAMPLE, "sample", root=ROOT):
        assert all(turn == turn.strip() for turn in question.turns)
        if question.task == "translation":
            assert question.turns[0].startswith("Translate German to English: ")
        if question.task == "summarization":
            assert question.turns[0].startswith("Summarize: ")
            assert 150 <= len(question.turns[0].split()) <= 300
        if question.task == "rag":
            assert question.turns[0].count("\n") >= 2


def test_sample_word_problems_have_the_right_reference() -> None:
    references = [row["reference"][0] for row in sample_rows() if row["category"] == "math_reasoning"]
    jars = (7 * 12 - 54) / 2
    minutes = 2 * (11 * 60 + 5 - (9 * 60 + 40)) + 20
    dollars = 40 * 3 / 5 * 6 + 40 * 2 / 5 * 4
    books = 1250 * 18 / 100 * 2 / 5
    assert [float(text.rpartition("#### ")[2]) for text in references] == [jars, minutes, dollars, books]


def test_sample_shares_no_question_with_spec_bench() -> None:
    published = load(str(spec_bench_file()), "spec_bench")
    own = load(SAMPLE, "sample", root=ROOT)
    assert not {turn for q in own for turn in q.turns} & {turn for q in published for turn in q.turns}
    assert not {q.question_id for q in own} & {q.question_id for q in published}


def test_spec_bench_has_its_published_counts() -> None:
    file = spec_bench_file()
    questions = JsonlTask("spec_bench", str(file), sha256=SPEC_BENCH.sha256).questions()
    assert len(questions) == 480
    assert sum(len(q.turns) for q in questions) == 560
    assert Counter(q.task for q in questions) == dict.fromkeys(SUBTASKS, 80)
    assert Counter(q.category for q in questions if q.task == "mt_bench") == dict.fromkeys(MT_BENCH_CATEGORIES, 10)
    assert [q.question_id for q in questions] == list(range(81, 561))


@pytest.mark.parametrize("name", ["sample", "spec_bench"])
def test_yaml_builds_the_task_under_its_own_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        f"defaults: [{{task: [sample, spec_bench]}}, _self_]\nhydra: {{searchpath: ['file://{ROOT / 'conf'}']}}\n"
    )
    OmegaConf.register_new_resolver("repository", lambda: str(ROOT), replace=True)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("config", overrides=[f"task.{name}.subtasks=[qa,rag]"])
    task = instantiate(config.task[name], root=str(ROOT))
    assert task.name == name
    assert list(task.subtasks) == ["qa", "rag"]
    assert task.file.is_relative_to(ROOT / "data")
    if name == "sample":
        assert {q.task for q in task.questions()} == {"qa", "rag"}
    else:
        assert (task.sha256, task.file) == (SPEC_BENCH.sha256, ROOT / SPEC_BENCH.path)


def test_limit_takes_the_first_of_each_subtask_in_file_order(write: WriteFile) -> None:
    labels = ["rag", "qa", "writing", "qa", "math", "coding", "rag", "qa"]
    path = write("".join(line(number, label) for number, label in enumerate(labels)))
    assert [q.question_id for q in load(path, "x", limit=2)] == [0, 1, 2, 3, 4, 6]
    assert [q.question_id for q in load(path, "x", ["mt_bench"], limit=2)] == [2, 4]
    assert [q.question_id for q in load(path, "x")] == list(range(8))


def test_shuffling_reorders_the_limited_questions_by_seed_only(write: WriteFile) -> None:
    path = write("".join(line(number) for number in range(40)))
    orders = [[q.question_id for q in load(path, "x", limit=20, shuffle_seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_every_category_is_reported_under_a_known_subtask(write: WriteFile) -> None:
    path = write("".join(line(number, label) for number, label in enumerate(CATEGORIES)))
    assert [q.task for q in load(path, "x")] == [CATEGORIES[q.category] for q in load(path, "x")]
    assert set(CATEGORIES.values()) == set(SUBTASKS)
    assert len(CATEGORIES) == 13


def test_yaml_can_add_categories_of_another_data_set(write: WriteFile) -> None:
    task = JsonlTask("x", write(line(1, "haiku")), ["poems"], categories={"haiku": "poems"})
    assert [(q.task, q.category) for q in task.questions()] == [("poems", "haiku")]


def test_relative_path_is_taken_from_the_given_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "q.jsonl").write_text(line())
    monkeypatch.chdir(tmp_path / "here")
    assert load("q.jsonl", "x", root=tmp_path)[0].question_id == 1
    assert load("../q.jsonl", "x")[0].question_id == 1
    with pytest.raises(UserError, match="does not exist"):
        load("q.jsonl", "x")


def test_texts_keep_every_character(write: WriteFile) -> None:
    turns = ["tab\tnewline\nline\u2028separator", "umlaut ü, quote \" and '"]
    content = "\ufeff" + json.dumps({"question_id": 1, "category": "qa", "turns": turns}, ensure_ascii=False)
    assert list(load(write(content), "x")[0].turns) == turns


FAULTS: dict[str, tuple[str | bytes, str]] = {
    "not json": ("{'a': 1}\n", "not JSON"),
    "cut off": (line()[:-4], "not JSON"),
    "not utf-8": (b'{"question_id": 1, "category": "qa", "turns": ["\xff"]}\n', "not JSON in UTF-8"),
    "not an object": ("[1, 2]\n", r"expected an object, found \[1, 2\]"),
    "id missing": (line("absent"), "'question_id' is missing"),
    "id a text": (line("81"), "'question_id' is '81', must be of type int"),
    "id a truth value": (line(True), "'question_id' is True"),
    "category missing": (line(category="absent"), "'category' is missing"),
    "category a number": (line(category=3), "'category' is 3"),
    "category unknown": (
        line(category="summarisation"),
        "unknown category 'summarisation'; did you mean summarization",
    ),
    "turns missing": (line(turns="absent"), "'turns' is missing"),
    "turns a text": (line(turns="why?"), r"'turns' is 'why\?', must be of type list"),
    "turns empty": (line(turns=[]), "'turns' is an empty list"),
    "turn blank": (line(turns=["why?", " \n"]), r"'turns' holds ' \\n'"),
    "turn with half a character": (
        b'{"question_id": 1, "category": "qa", "turns": ["a \\ud800 b"]}\n',
        r"'turns' holds 'a \\ud800 b' with half a surrogate pair",
    ),
    "nested without end": ("[" * 200_000 + "\n", "nested too deeply"),
    "turn a number": (line(turns=[4]), "'turns' holds 4"),
    "reference a text": (line(reference="because"), "'reference' is 'because'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_line_is_refused_with_file_and_line_number(fault: str, write: WriteFile) -> None:
    content, message = FAULTS[fault]
    path = write(line(7).encode() + (content if isinstance(content, bytes) else content.encode()))
    with pytest.raises(UserError, match=message) as caught:
        load(path, "x")
    assert str(caught.value).startswith(f"{Path(path).resolve()}, line 2: ")
    assert "\n" not in str(caught.value)


def test_duplicate_id_is_refused_with_both_lines(write: WriteFile) -> None:
    with pytest.raises(UserError, match=r"line 4: question_id 5 is that of line 2 too"):
        load(write(line(4) + line(5) + "\n" + line(5)), "x")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_refused(content: str, write: WriteFile) -> None:
    with pytest.raises(UserError, match="is empty"):
        load(write(content), "x")


def test_missing_file_names_the_command_that_brings_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; fetch it with `python -m clasp_core.fetch spec_bench`"):
        load("nowhere.jsonl", "spec_bench", root=tmp_path)
    with pytest.raises(UserError, match=r"does not exist; set task.mine.path") as caught:
        load("nowhere.jsonl", "mine", root=tmp_path)
    assert "clasp_core.fetch" not in str(caught.value)


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        load(str(tmp_path), "x")


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3"])
def test_limit_below_one_is_refused(limit: Any, write: WriteFile) -> None:
    with pytest.raises(UserError, match=f"limit is {limit!r}.*at least 1"):
        load(write(line()), "x", limit=limit)


def test_unknown_subtask_names_the_nearest(write: WriteFile) -> None:
    with pytest.raises(UserError, match="unknown subtask 'mtbench'; did you mean mt_bench"):
        load(write(line()), "x", ["mtbench"])
    with pytest.raises(UserError, match="unknown subtask 'zzz'; choose from mt_bench, translation"):
        load(write(line()), "x", ["zzz"])


def test_subtasks_must_be_a_list_that_the_file_can_serve(write: WriteFile) -> None:
    path = write(line())
    with pytest.raises(UserError, match=r"write subtasks=\[qa\]"):
        load(path, "x", "qa")
    with pytest.raises(UserError, match="empty list"):
        load(path, "x", [])
    with pytest.raises(UserError, match="holds no question of rag; leave it out"):
        load(path, "x", ["qa", "rag"])


def test_checksum_is_compared_when_given(write: WriteFile) -> None:
    path = write(line())
    sha256 = hashlib.sha256(line().encode()).hexdigest()
    assert len(JsonlTask("x", path, sha256=sha256.upper()).questions()) == 1
    with pytest.raises(UserError, match=f"has sha256 {sha256}, expected 00; .*task.x.sha256=null"):
        JsonlTask("x", path, sha256="00").questions()


def test_reading_questions_does_not_import_torch() -> None:
    code = "import sys, clasp_core.tasks, clasp_core.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
