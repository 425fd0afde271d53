"""Methods x tasks x questions on one loaded model: warm-up, pairing, rotation, rows. Imports no method."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import torch

from clasp_core.decoding import Answer, Generation, decode
from clasp_core.device import Clock, EnergyMeter, free_memory, peak_memory_bytes, reset_peak_memory
from clasp_core.divergence import divergence
from clasp_core.errors import UserError
from clasp_core.plan import Answerer, Carries, Forgetful, HasModels, Informed, Method, Plan, Slot
from clasp_core.prompting import Prompter
from clasp_core.records import Question, TurnRecord
from clasp_core.sampling import Randomness
from clasp_core.target import TargetModel

WARM_UP_TEXT = "The harbour was quiet that morning, and the boats lay still. "
"""Of our own and in no benchmark; repeated to the length that a warm-up needs."""


class RowStore(Protocol):
    """Where rows go; `store.RunStore` is the one in use."""

    run_id: str

    def append(self, rows: Sequence[TurnRecord]) -> None:
        """Write the rows of one turn, all or none."""


class Progress(Protocol):
    """Who is told of each finished turn, outside the clock."""

    def update(self, rows: Sequence[TurnRecord]) -> None:
        """One turn is done by all methods."""


class Runner:
    """Runs a plan on a target: `check`, `warm_up`, then `run` into a store."""

    def __init__(
        self, target: TargetModel, prompter: Prompter, plan: Plan, clock: Clock, energy: EnergyMeter | None = None
    ):
        self._target = target
        self._prompter = prompter
        self._plan = plan
        self._clock = clock
        self._energy = energy
        self._answers: dict[tuple[str, str, int, int, int], list[int]] = {}
        self._open: dict[str, list[Slot]] = {}
        self._stored: dict[tuple[str, str, int, int, int], TurnRecord] = {}
        self.late: list[TurnRecord] = []
        """Earlier rows with the divergence that only a reference's later answer could show."""

    def check(self) -> list[str]:
        """Refuse what cannot be run, before anything is timed: misfit methods and prompts that are too long.

        Later turns are checked with empty answers here, and again when their prompt is known; returns a note if
        earlier answers may yet make one too long.
        """
        unsure = []
        for method in self._plan.methods.values():
            method.start_stream(self._target)
        for question in self._plan.questions:
            for turn in range(len(question.turns)):
                ids = self._prompter.ids(question.turns[: turn + 1], [""] * turn)
                self._check_length(question, turn, len(ids))
                if turn == 0:
                    self._check_warm_up(len(ids))
                elif self._exceeds(len(ids), (turn + 1) * self._plan.generation.max_new_tokens):
                    unsure.append(f"question {question.question_id}, turn {turn}")
        return [self._may_exceed(unsure)] if unsure else []

    def warm_up(self) -> None:
        """Each method answers a short and a long prompt that are in no benchmark; nothing is stored or kept."""
        self._prepare()
        first_turns = [len(self._prompter.ids(q.turns[:1], [])) for q in self._plan.questions]
        generation = Generation(self._plan.warm_up_tokens, frozenset(), self._plan.generation.sampling)
        for length in sorted({min(first_turns), max(first_turns)}):
            prompt = self._filler(length)
            for name, method in self._plan.methods.items():
                method.start_stream(self._target)
                answer = self._try(method, prompt, generation)
                if name == self._plan.reference:
                    self._inform(prompt, answer.output_ids)
        for method in self._plan.methods.values():
            if isinstance(method, Forgetful):
                method.forget()

    def run(self, store: RowStore, progress: Progress, earlier: Sequence[TurnRecord] = ()) -> int:
        """Answer everything that `earlier` rows do not hold; returns the number of failed rows written.

        A method that carries something through its stream redoes its earlier turns first, unrecorded, so that the
        rows become those of an uninterrupted run. Raises UserError where that gives other ids than the rows hold.
        """
        self._answers = {row.key: row.output_ids for row in earlier if row.output_ids is not None}
        self._open = {name: self._unanswered(name) for name in self._plan.methods}
        self._stored = {row.key: row for row in earlier}
        self.late = []
        num_failed = 0
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.without_recording())
            for stream in self._plan.slots():
                for method in self._plan.methods.values():
                    method.start_stream(self._target)
                for slot in stream:
                    rows = self._turn(slot, store.run_id)
                    if rows:
                        store.append(rows)
                        progress.update(rows)
                    num_failed += sum(row.error is not None for row in rows)
        return num_failed

    def _turn(self, slot: Slot, run_id: str) -> list[TurnRecord]:
        """All methods that have not answered here yet, right after one another, in rotating order."""
        order = self._order(slot)
        rows = []
        for place, name in enumerate(order):
            if slot.key(name) not in self._answers:
                rows.append(self._row(slot, name, place, run_id))
                if (ids := rows[-1].output_ids) is not None:
                    self._answers[slot.key(name)] = ids
            elif self._bears_on_open_turns(slot, name):
                self._redo(slot, name)
            if name == self._plan.reference and slot.key(name) in self._answers:
                self._inform(self._prompt(slot, name), self._answers[slot.key(name)])
        for row in rows:
            self._compare(slot, row)
        self._compare_stored(slot)
        return rows

    def _compare_stored(self, slot: Slot) -> None:
        """Earlier rows that could not be compared when they were written: the reference had failed there."""
        for name in self._plan.methods:
            row = self._stored.get(slot.key(name))
            if row is not None and row.first_divergence is None:
                row = replace(row)
                self._compare(slot, row)
                self.late += [row] * (row.first_divergence is not None)

    def _unanswered(self, name: str) -> list[Slot]:
        """The turns that a method has no answer to."""
        return [slot for stream in self._plan.slots() for slot in stream if slot.key(name) not in self._answers]

    def _bears_on_open_turns(self, slot: Slot, name: str) -> bool:
        """Whether a turn that has its answer must be redone for what it teaches about later ones that have none."""
        method = self._plan.methods[name]
        reach = method.carries if isinstance(method, Carries) else None
        later = [other for other in self._open[name] if other.index > slot.index]
        return bool(later) and (reach == "run" or (reach == "stream" and any(slot.shares_stream(o) for o in later)))

    def _redo(self, slot: Slot, name: str) -> None:
        """Answer a turn again for its lesson alone; nothing is stored."""
        row = self._row(slot, name, 0, "")
        if row.error is not None or row.output_ids != self._answers[slot.key(name)]:
            raise UserError(
                f"{name} cannot be resumed: redone for what it teaches, {slot.question.task}, question "
                f"{slot.question.question_id}, turn {slot.turn} gives {row.error or 'other ids than its row holds'}; "
                "start a new run"
            )

    def _order(self, slot: Slot) -> list[str]:
        """The methods, rotated by one from turn to turn; who looks at the reference's answer comes after it."""
        names = list(self._plan.methods)
        first = slot.index % len(names)
        rotated = names[first:] + names[:first]
        if self._plan.reference is None:
            return rotated
        early = rotated[: rotated.index(self._plan.reference)]
        waiting = [name for name in early if isinstance(self._plan.methods[name], Informed)]
        return [name for name in rotated if name not in waiting] + waiting

    def _inform(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        for method in self._plan.methods.values():
            if isinstance(method, Informed):
                method.inform(prompt, answer)

    def _row(self, slot: Slot, name: str, place: int, run_id: str) -> TurnRecord:
        """One method's turn; an exception becomes a row with an error and no numbers."""
        row = TurnRecord(
            run_id=run_id,
            model=self._plan.model,
            method=name,
            task=slot.question.task,
            category=slot.question.category,
            question_id=slot.question.question_id,
            turn=slot.turn,
            repeat=slot.repeat,
            seed=self._plan.seed,
            position_in_turn=place,
        )
        try:
            prompt = self._prompt(slot, name)
            randomness = self._randomness(slot.question.question_id, slot.turn, slot.repeat)
            reset_peak_memory(self._target.devices)
            before_j = self._joules()
            answer = self._answer(self._plan.methods[name], prompt, self._plan.generation, randomness)
            after_j = self._joules()
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}"
            return row
        row.energy_j = after_j - before_j if before_j is not None and after_j is not None else None
        return _filled(row, prompt, answer, peak_memory_bytes(self._target.devices))

    def _joules(self) -> float | None:
        """The energy counter, read outside the clocked region; unknown without a meter."""
        return self._energy.joules() if self._energy is not None else None

    def _answer(self, method: Method, prompt: Sequence[int], generation: Generation, randomness: Randomness) -> Answer:
        if isinstance(method, Answerer):
            return method.answer(self._target, prompt, generation, randomness, self._clock)
        return decode(self._target, method, prompt, generation, randomness, self._clock)

    def _try(self, method: Method, prompt: Sequence[int], generation: Generation) -> Answer:
        try:
            return self._answer(method, prompt, generation, self._randomness("warm-up", len(prompt)))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory on a prompt of {len(prompt)} tokens, before anything was timed: "
                f"{str(error).splitlines()[0]}; choose shorter tasks, a smaller model.dtype or more GPUs"
            ) from error

    def _prompt(self, slot: Slot, name: str) -> list[int]:
        """Prompt ids of a turn; earlier answers are the reference's, or the method's own."""
        author = self._plan.reference if self._plan.history == "reference" else name
        answers = [self._earlier_answer(slot, turn, author or name) for turn in range(slot.turn)]
        ids = self._prompter.ids(slot.question.turns[: slot.turn + 1], answers)
        self._check_length(slot.question, slot.turn, len(ids))
        return ids

    def _earlier_answer(self, slot: Slot, turn: int, author: str) -> str:
        ids = self._answers.get(Slot(slot.question, turn, slot.repeat, 0).key(author))
        if ids is None:
            raise RuntimeError(f"turn {turn} of {author} failed, so this turn has no history")
        return self._prompter.text_of(ids)

    def _compare(self, slot: Slot, row: TurnRecord) -> None:
        """Note where a greedy answer parts from the reference's to the same prompt, and how close the tokens were."""
        if self._plan.reference is None or row.method == self._plan.reference:
            return
        reference = self._answers.get(slot.key(self._plan.reference))
        if row.output_ids is None or reference is None:
            return
        if not self._plan.generation.sampling.greedy or row.output_ids == reference:
            return
        prompt = self._prompt(slot, row.method)
        if prompt != self._prompt(slot, self._plan.reference):
            return
        found = divergence(self._target, prompt, reference, row.output_ids)
        if found is not None:
            row.first_divergence, row.divergence_gap, row.divergence_bound = found.index, found.gap, found.bound

    def _check_length(self, question: Question, turn: int, num_prompt: int) -> None:
        limit = self._plan.max_positions
        budget = self._plan.generation.max_new_tokens
        if limit is not None and num_prompt + budget > limit:
            raise UserError(
                f"question {question.question_id}, turn {turn}: a prompt of {num_prompt} tokens and a budget of "
                f"{budget} exceed the model's context of {limit}; lower generation.max_new_tokens or choose other tasks"
            )

    def _check_warm_up(self, num_prompt: int) -> None:
        num_tokens = self._plan.warm_up_tokens
        if self._exceeds(num_prompt, num_tokens):
            raise UserError(
                f"warm_up_tokens is {num_tokens}; behind a prompt of {num_prompt} tokens that exceeds the model's "
                f"context of {self._plan.max_positions}; lower it"
            )

    def _exceeds(self, num_prompt: int, num_new: int) -> bool:
        return self._plan.max_positions is not None and num_prompt + num_new > self._plan.max_positions

    def _may_exceed(self, places: Sequence[str]) -> str:
        return (
            f"{len(places)} later turn(s), the first {places[0]}, may exceed the model's context of "
            f"{self._plan.max_positions} after long answers and would then be rows with an error; "
            "a lower generation.max_new_tokens avoids that"
        )

    def _prepare(self) -> None:
        """Record what the run will replay (on a GPU), of the target and of models beside it."""
        models = [model for model in self._models if model.records]
        capacity = self._longest_turn() if models else 0
        for model in models:
            try:
                model.prepare(capacity)
            except torch.OutOfMemoryError:
                model.forgo_recordings()
                free_memory()

    @property
    def _models(self) -> list[TargetModel]:
        beside = (method.models() for method in self._plan.methods.values() if isinstance(method, HasModels))
        return [self._target, *(model for models in beside for model in models)]

    def _longest_turn(self) -> int:
        """Slots that the longest turn may take: its prompt with full answers, the budget, a tree's side branches."""
        budget = self._plan.generation.max_new_tokens
        lengths = [
            len(self._prompter.ids(question.turns[: turn + 1], [""] * turn))
            + turn * budget
            + max(budget, self._plan.warm_up_tokens)
            for question in self._plan.questions
            for turn in range(len(question.turns))
        ]
        longest = max(lengths) if self._plan.max_positions is None else min(max(lengths), self._plan.max_positions)
        drafters = (method for method in self._plan.methods.values() if not isinstance(method, Answerer))
        return longest + max((drafter.extra_slots(budget) for drafter in drafters), default=0)

    def _filler(self, length: int) -> list[int]:
        text = WARM_UP_TEXT
        while len(ids := self._prompter.ids([text], [])) < length:
            text += WARM_UP_TEXT
        return ids[:length]

    def _randomness(self, *parts: object) -> Randomness:
        return Randomness.seeded(self._plan.seed, *parts, device=self._target.device)


def _filled(row: TurnRecord, prompt: Sequence[int], answer: Answer, peaks: dict[str, int] | None) -> TurnRecord:
    """The row with the turn's numbers; tokens are counted here, from ids, for every method alike."""
    row.prompt_sha256 = hashlib.sha256(" ".join(map(str, prompt)).encode()).hexdigest()
    row.num_prompt_tokens = len(prompt)
    row.output_ids = answer.output_ids
    row.num_new_tokens = len(answer.output_ids)
    row.stop_reason = answer.stop_reason
    row.prefill_s = answer.prefill_s
    row.decode_s = answer.decode_s
    row.select_s = sum(answer.rounds.select_s)
    row.rounds = answer.rounds
    row.peak_memory_bytes = sum(peaks.values()) if peaks is not None else None
    row.peak_memory_bytes_by_device = peaks
    return row
