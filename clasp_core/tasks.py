"""Questions from JSONL files in Spec-Bench's schema: read, checked, and mapped to the reported subtasks.

One line: {"question_id": 81, "category": "writing", "turns": ["first message", "second message"], "reference": [...]}
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clasp_core.errors import UserError
from clasp_core.fetch import DOWNLOADS
from clasp_core.records import Question

SUBTASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
"""The reported subtasks, in the order of the published tables."""

MT_BENCH_CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

CATEGORIES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(MT_BENCH_CATEGORIES, "mt_bench") | {name: name for name in SUBTASKS if name != "mt_bench"}
)
"""The reported subtask of each category of the question file."""


@dataclass(frozen=True)
class JsonlTask:
    """One question file. `questions` does the reading; building a task touches nothing.

    `path` is taken from `root` unless absolute. `subtasks` None means all. `sha256`, where given, must be the
    file's. `shuffle_seed` None keeps the file order. `categories` maps further categories to reported subtasks.
    """

    name: str
    path: str
    subtasks: Sequence[str] | None = None
    sha256: str | None = None
    shuffle_seed: int | None = None
    categories: Mapping[str, str] | None = None
    root: str | Path = "."

    @property
    def file(self) -> Path:
        """The absolute path of the question file."""
        return (Path(self.root) / self.path).resolve()

    def questions(self, limit: int | None = None) -> list[Question]:
        """The first `limit` questions (None: all) of each wanted subtask, in file order or shuffled by the seed.

        Raises UserError for a file, a line, a subtask or a limit that cannot be used.
        """
        _check_limit(limit)
        known = {**CATEGORIES, **(self.categories or {})}
        wanted = _wanted(self.subtasks, list(dict.fromkeys(known.values())))
        chosen = _first(_parse_lines(self.file, self._content(), known), wanted, limit)
        self._check_present(chosen, wanted)
        return chosen if self.shuffle_seed is None else _shuffled(chosen, self.shuffle_seed)

    def _content(self) -> bytes:
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            raise UserError(f"task {self.name}: {self.file} does not exist; {self._way_to_get_it()}") from None
        except OSError as error:
            raise UserError(f"task {self.name}: cannot read {self.file}: {error.strerror}; check its path") from error
        self._check_sha256(content)
        return content

    def _way_to_get_it(self) -> str:
        elsewhere = f"set task.{self.name}.path to a JSONL file of questions (relative to {Path(self.root).resolve()})"
        if self.name in DOWNLOADS:
            return f"fetch it with `python -m clasp_core.fetch {self.name}`, or {elsewhere}"
        return elsewhere

    def _check_sha256(self, content: bytes) -> None:
        found = hashlib.sha256(content).hexdigest()
        if self.sha256 is not None and found != self.sha256.lower():
            raise UserError(
                f"task {self.name}: {self.file} has sha256 {found}, expected {self.sha256}; "
                f"move it away and fetch it again, or set task.{self.name}.sha256=null to use it as it is"
            )

    def _check_present(self, chosen: Sequence[Question], wanted: Sequence[str]) -> None:
        if not chosen:
            raise UserError(f"task {self.name}: {self.file} holds no question of {', '.join(wanted)}; add lines to it")
        absent = sorted(set(wanted) - {question.task for question in chosen})
        if self.subtasks is not None and absent:
            raise UserError(f"task {self.name}: {self.file} holds no question of {', '.join(absent)}; leave it out")


def load(
    path: str,
    name: str,
    subtasks: Sequence[str] | None = None,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    root: str | Path = ".",
) -> list[Question]:
    """The questions of a file, as `JsonlTask.questions` returns them."""
    return JsonlTask(name, path, subtasks, shuffle_seed=shuffle_seed, root=root).questions(limit)


def _check_limit(limit: int | None) -> None:
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UserError(f"limit is {limit!r}, must be a whole number of at least 1; limit=null takes all questions")


def _wanted(subtasks: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    if subtasks is None:
        return list(known)
    if isinstance(subtasks, str):
        raise UserError(f"subtasks is the text {subtasks!r}, must be a list; write subtasks=[{subtasks}]")
    for subtask in subtasks:
        if subtask not in known:
            raise UserError(f"unknown subtask {subtask!r}; {_nearest(subtask, known)}")
    if not subtasks:
        raise UserError("subtasks is an empty list, must name at least one; subtasks=null takes all")
    return list(subtasks)


def _nearest(value: object, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(str(value), names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(names)}"


def _parse_lines(file: Path, content: bytes, categories: Mapping[str, str]) -> list[Question]:
    found: list[Question] = []
    line_of: dict[int, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            question = _parse(line, categories)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {error}") from error
        if (earlier := line_of.setdefault(question.question_id, number)) != number:
            raise UserError(
                f"{file}, line {number}: question_id {question.question_id} is that of line {earlier} too; "
                "give each question an id of its own"
            )
        found.append(question)
    if not found:
        raise UserError(f"{file} is empty; it must hold one question per line, see data/sample/README.md")
    return found


def _parse(line: bytes, categories: Mapping[str, str]) -> Question:
    """The question of one line; raises ValueError with what is wrong and the way out."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"nested too deeply: {_short(line)}; write one flat object per line") from None
    except ValueError as error:
        raise ValueError(f"not JSON in UTF-8 ({error}): {_short(line)}; write one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {_short(row)}; see data/sample/README.md")
    question_id, category = _field(row, "question_id", int), _field(row, "category", str)
    if category not in categories:
        raise ValueError(f"unknown category {category!r}; {_nearest(category, categories)}")
    if "reference" in row:
        _field(row, "reference", list)
    return Question(question_id, categories[category], category, _turns(_field(row, "turns", list)))


def _field(row: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in row:
        raise ValueError(f"field {name!r} is missing, found {sorted(row)}; add it, see data/sample/README.md")
    value = row[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"field {name!r} is {_short(value)}, must be of type {kind.__name__}")
    return value


def _turns(turns: Sequence[Any]) -> tuple[str, ...]:
    if not turns:
        raise ValueError("field 'turns' is an empty list; give at least one message")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"field 'turns' holds {_short(turn)}; each turn must be a text that is not blank")
        if any("\ud800" <= character <= "\udfff" for character in turn):
            raise ValueError(
                f"field 'turns' holds {_short(turn)} with half a surrogate pair; write the whole character"
            )
    return tuple(turns)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _first(questions: Iterable[Question], wanted: Sequence[str], limit: int | None) -> list[Question]:
    taken: Counter[str] = Counter()
    chosen: list[Question] = []
    for question in questions:
        if question.task in wanted and (limit is None or taken[question.task] < limit):
            taken[question.task] += 1
            chosen.append(question)
    return chosen


def _shuffled(questions: Iterable[Question], seed: int) -> list[Question]:
    """An order that depends on the seed and the ids only, not on a library's generator."""
    return sorted(questions, key=lambda q: hashlib.sha256(f"{seed}:{q.question_id}".encode()).digest())
