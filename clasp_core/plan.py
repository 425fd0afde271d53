"""What is run: methods (and what they may ask for beside a draft), questions, and the turns in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, Protocol, runtime_checkable

from clasp_core.decoding import Answer, Drafter, Generation
from clasp_core.device import Clock
from clasp_core.errors import UserError
from clasp_core.records import Question
from clasp_core.sampling import Randomness
from clasp_core.target import TargetModel


@runtime_checkable
class Answerer(Protocol):
    """A method that brings its own loop (Hugging Face's `generate`); it still does not count or time itself."""

    def start_stream(self, target: TargetModel) -> None:
        """A new method x task: forget everything."""

    def answer(
        self, target: TargetModel, prompt: Sequence[int], generation: Generation, randomness: Randomness, clock: Clock
    ) -> Answer:
        """One turn."""


Method = Drafter | Answerer


@runtime_checkable
class Informed(Protocol):
    """A method that may look at the reference's answer (the oracle); it answers after the reference."""

    def inform(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The reference's answer to the prompt that comes next, told outside the clock."""


@runtime_checkable
class Forgetful(Protocol):
    """A method that may carry what it learned from stream to stream, and still must not learn from a warm-up."""

    def forget(self) -> None:
        """The next stream begins with nothing."""


@runtime_checkable
class Carries(Protocol):
    """A method whose answers may depend on the turns that it answered before."""

    @property
    def carries(self) -> Literal["stream", "run"] | None:
        """How far what the coming turn teaches reaches: its stream, the whole run, or no other turn."""


@runtime_checkable
class HasModels(Protocol):
    """A method with models beside the target, which are prepared as the target is."""

    def models(self) -> Sequence[TargetModel]:
        """Those that are loaded by now; all of them once a stream has started."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One turn of one question in one repeat: what every method answers, one after the other."""

    question: Question
    turn: int
    repeat: int
    index: int
    """Running number over the whole plan; decides the order of the methods."""

    def key(self, method: str) -> tuple[str, str, int, int, int]:
        """The row key of a method here."""
        return (method, self.question.task, self.question.question_id, self.turn, self.repeat)

    def shares_stream(self, other: Slot) -> bool:
        """Whether both turns lie in the same repeat of the same task."""
        return (self.question.task, self.repeat) == (other.question.task, other.repeat)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. `methods` includes the reference, under the name `reference` (None: no reference)."""

    model: str
    methods: Mapping[str, Method]
    reference: str | None
    questions: Sequence[Question]
    generation: Generation
    seed: int = 0
    repeats: int = 1
    history: Literal["reference", "own"] = "reference"
    max_positions: int | None = None
    warm_up_tokens: int = 8

    def __post_init__(self) -> None:
        if self.history not in ("reference", "own"):
            raise UserError(f"history is {self.history!r}; it must be reference or own")
        if self.repeats < 1:
            raise UserError(f"repeats is {self.repeats}; it must be at least 1")
        if self.warm_up_tokens < 1:
            raise UserError(f"warm_up_tokens is {self.warm_up_tokens}; it must be at least 1")
        replaying = [name for name, method in self.methods.items() if isinstance(method, Informed)]
        if self.reference is None and replaying:
            raise UserError(
                f"method {replaying[0]} replays the reference's answer, and reference=none; use reference=ar"
            )
        if self.history == "reference" and self.reference is None and any(len(q.turns) > 1 for q in self.questions):
            raise UserError("history=reference needs a reference for second turns; use history=own with reference=none")

    def slots(self) -> Iterator[list[Slot]]:
        """The turns of each stream: one repeat of one task, in file order."""
        index = 0
        for repeat in range(self.repeats):
            for _, group in groupby(sorted(self.questions, key=self._task_order), key=lambda q: q.task):
                stream = []
                for question in group:
                    for turn in range(len(question.turns)):
                        stream.append(Slot(question, turn, repeat, index))
                        index += 1
                yield stream

    def _task_order(self, question: Question) -> int:
        return list(dict.fromkeys(q.task for q in self.questions)).index(question.task)
