"""Pairing, rotation, failure and memory of the runner, on the tiny model and questions made here."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.draft_model import DraftModel
from baselines.hf_generate import HFGenerate
from baselines.layerskip import EarlyExit
from baselines.oracle import Oracle
from baselines.prompt_lookup import PromptLookup
from baselines.random_skip import random_skip
from baselines.self_sd import Adaptation, self_sd
from baselines.swift import swift
from baselines.swift_search import SearchRule
from clasp_core.clasp import Reading, clasp
from clasp_core.decoding import Generation, decode
from clasp_core.device import DeviceClock
from clasp_core.drafting import NoDraft
from clasp_core.errors import NonFiniteLogits, UserError
from clasp_core.metrics import grading
from clasp_core.plan import Plan
from clasp_core.prompting import Prompter
from clasp_core.records import Question, TurnRecord
from clasp_core.runner import Runner
from clasp_core.sampling import Sampling
from clasp_core.tiny import TinyModel

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = [
    Question(1, "qa", "qa", ("Where is the harbour?",)),
    Question(2, "mt_bench", "writing", ("Write about a boat.", "Now about the sea.")),
    Question(3, "qa", "qa", ("Who sails?",)),
]


class Memory:
    """A store and a progress bar in one, for what is asserted here."""

    def __init__(self):
        self.run_id = "test"
        self.groups: list[list[TurnRecord]] = []

    def append(self, rows: Sequence[TurnRecord]) -> None:
        self.groups.append(list(rows))

    def update(self, rows: Sequence[TurnRecord]) -> None:
        assert self.groups[-1] == list(rows), "progress is told before the rows are stored"

    @property
    def rows(self) -> list[TurnRecord]:
        return [row for group in self.groups for row in group]


class Failing(NoDraft):
    """Breaks on the second prompt that it starts."""

    def __init__(self):
        self.num_started = 0

    def start(self, turn, prompt, prefill):
        self.num_started += 1
        if self.num_started == 2:
            raise RuntimeError("out of luck")
        return 0


class Learner(NoDraft):
    """Remembers every prompt since it was told to forget."""

    def __init__(self):
        self.seen: list[int] = []

    def start_stream(self, target):
        self.seen = []

    def start(self, turn, prompt, prefill):
        self.seen.append(len(prompt))
        return 0


@pytest.fixture(scope="module")
def model():
    return TinyModel(num_layers=4).load()


def plan_of(model, methods, **changes):
    methods = {"ar": NoDraft(), **methods}
    settings = {
        "reference": "ar",
        "questions": QUESTIONS,
        "generation": Generation(12, frozenset(model.stop_ids)),
        "max_positions": model.max_positions,
        **changes,
    }
    return Plan(model="tiny", methods=methods, **settings)


def runner_of(model, methods, **changes):
    clock = DeviceClock(model.target.devices, model.target.device)
    return Runner(model.target, Prompter(model.tokenizer, "chat"), plan_of(model, methods, **changes), clock)


def run(model, methods, earlier=(), **changes):
    runner = runner_of(model, methods, **changes)
    memory = Memory()
    runner.check()
    runner.warm_up()
    runner.run(memory, memory, earlier)
    return memory


def draft():
    return clasp(2, None, 4, 0.0, 4)


def test_each_turn_is_answered_by_all_methods_in_rotating_order(model):
    groups = run(model, {"a": draft(), "b": draft()}).groups
    assert [[row.method for row in group] for group in groups] == [
        ["ar", "a", "b"],
        ["a", "b", "ar"],
        ["b", "ar", "a"],
        ["ar", "a", "b"],
    ]
    assert [row.position_in_turn for row in groups[1]] == [0, 1, 2]


def test_all_methods_get_the_same_prompt_even_where_an_own_history_would_differ(model):
    sampled = Generation(12, frozenset(model.stop_ids), plan_of(model, {}).generation.sampling.__class__(1.0))
    for history, num_prompts in (("reference", 1), ("own", 2)):
        groups = run(model, {"a": draft()}, generation=sampled, history=history).groups
        second = next(group for group in groups if group[0].turn == 1)
        assert len({row.prompt_sha256 for row in second}) == num_prompts, history


def test_greedy_answers_equal_the_reference_and_the_null_method_equals_it_in_everything_but_time(model):
    rows = run(model, {"clasp": draft(), "ar_again": NoDraft()}).rows
    by_turn = {row.pair: row.output_ids for row in rows if row.method == "ar"}
    assert all(row.output_ids == by_turn[row.pair] for row in rows)
    assert all(row.num_new_tokens == len(row.output_ids) == 1 + sum(row.rounds.num_emitted) for row in rows)


def test_a_failed_turn_is_a_row_with_an_error_and_no_numbers_and_harms_no_other(model):
    rows = run(model, {"bad": Failing()}, warm_up_tokens=1).rows
    failed = [row for row in rows if row.error]
    assert [(row.method, row.error) for row in failed] == [("bad", "RuntimeError: out of luck")]
    assert failed[0].output_ids is failed[0].num_new_tokens is failed[0].decode_s is failed[0].rounds is None
    assert len([row for row in rows if row.error is None]) == 7


def test_a_second_turn_whose_history_failed_fails_with_the_reason(model):
    methods = {"ar": Failing()}
    rows = run(model, methods, questions=QUESTIONS[1:2] * 1, warm_up_tokens=1).rows
    assert [row.error for row in rows] == [None, "RuntimeError: out of luck"]
    failing_first = Failing()
    failing_first.num_started = 1
    rows = run(model, {"ar": failing_first}, questions=QUESTIONS[1:2], warm_up_tokens=1).rows
    assert rows[0].error == "RuntimeError: out of luck"
    assert "history" in rows[1].error


def test_warm_up_leaves_no_row_and_teaches_nothing_and_streams_do_not_mix(model):
    learner = Learner()
    rows = run(model, {"learner": learner}).rows
    assert len(rows) == 8
    mt_bench = [row.num_prompt_tokens for row in rows if row.method == "learner" and row.task == "mt_bench"]
    assert learner.seen == mt_bench, "the last stream is mt_bench's, and nothing older is remembered"


def test_rows_of_an_earlier_run_are_not_answered_again_and_serve_as_history(model):
    whole = run(model, {"clasp": draft()})
    for kept in (1, 2, 3, 5):
        rest = run(model, {"clasp": draft()}, earlier=whole.rows[:kept])
        merged = {row.key: (row.output_ids, row.prompt_sha256) for row in (*whole.rows[:kept], *rest.rows)}
        assert len(rest.rows) == len(whole.rows) - kept
        assert merged == {row.key: (row.output_ids, row.prompt_sha256) for row in whole.rows}


SEARCH = SearchRule(1, 5, 1000, 300, 1.0, 6)
STREAM = [
    Question(index, "qa", "qa", (text,))
    for index, text in enumerate(("Where is the harbour?", "Who sails?", "What is a boat?", "Why is the sea salt?"))
]
EVERY_METHOD = {
    "ar": NoDraft,
    "clasp": lambda: clasp(3, None, 4, 0.1, 5),
    "clasp_stream": lambda: clasp(3, None, 9, 0.1, 5, reading=Reading(reset="stream")),
    "clasp_one_set": lambda: clasp(3, None, None, 0.1, 5, reading=Reading(reset="stream")),
    "hf_generate": HFGenerate,
    "layerskip": lambda: EarlyExit(3, None, 4),
    "oracle": lambda: Oracle(4),
    "pld": lambda: PromptLookup(3, 10, "earliest", False),
    "random_skip": lambda: random_skip(3, None, "step", 0.1, 4),
    "self_sd": lambda: self_sd({"attn": [1, 3], "mlp": [2]}, 0.1, 6, Adaptation(1, 0.5, 0.9, 0.05, 0.5)),
    "self_sd_fixed": lambda: self_sd({"attn": [1, 3], "mlp": [2]}, 0.1, 6),
    "sps": lambda: DraftModel(TinyModel(num_layers=2), 5, "heuristic", 0.0),
    "swift": lambda: swift(0.45, None, SEARCH, 0.1, 5, "tree"),
    "swift_chain": lambda: swift(0.45, None, SEARCH, 0.1, 5, "chain"),
    "swift_never": lambda: swift(0.45, None, SEARCH, 0.1, 5, "chain", "never"),
}


@pytest.fixture(scope="module")
def deep_model():
    return TinyModel(num_layers=6).load()


def traced(rows):
    """What a row says beside its times."""
    fields = ("num_drafted", "num_accepted", "num_emitted", "num_draft_steps", "num_searches", "skip")
    return {row.key: (row.output_ids, *(getattr(row.rounds, name) for name in fields)) for row in rows}


def test_every_selectable_method_is_resumed_below():
    assert {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} <= set(EVERY_METHOD)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_a_resumed_run_ends_with_the_rounds_of_an_uninterrupted_one(deep_model, name, temperature):
    generation = Generation(24, frozenset(deep_model.stop_ids), Sampling(temperature))
    settings = {"questions": STREAM, "generation": generation, "warm_up_tokens": 2}
    whole = run(deep_model, {"x": EVERY_METHOD[name]()}, **settings).rows
    rest = run(deep_model, {"x": EVERY_METHOD[name]()}, earlier=whole[:4], **settings).rows
    assert traced((*whole[:4], *rest)) == traced(whole)


def test_what_is_carried_over_streams_is_redone_from_the_first_one(deep_model):
    questions = [*STREAM[:2], *(replace(question, task="rag") for question in STREAM[2:])]
    settings = {"questions": questions, "generation": Generation(24, frozenset()), "warm_up_tokens": 2}
    for name in ("swift_never", "swift"):
        whole = run(deep_model, {"x": EVERY_METHOD[name]()}, **settings).rows
        rest = run(deep_model, {"x": EVERY_METHOD[name]()}, earlier=whole[:4], **settings).rows
        assert traced((*whole[:4], *rest)) == traced(whole)


class Counted(Learner):
    """Carries something through its stream, and counts its answers."""

    carries = "stream"


def test_a_method_that_carries_something_redoes_the_turns_that_bear_on_open_ones_and_stores_none(model):
    whole = run(model, {"learner": Counted()}, questions=STREAM, warm_up_tokens=1).rows
    learner = Counted()
    rest = run(model, {"learner": learner}, earlier=whole[:4], questions=STREAM, warm_up_tokens=1)
    assert [row.key for row in rest.rows] == [row.key for row in whole[4:]]
    assert len(learner.seen) == 4
    none_open = run(model, {"learner": learner}, earlier=whole, questions=STREAM, warm_up_tokens=1)
    assert (none_open.rows, learner.seen) == ([], [])


def test_a_turn_that_is_redone_with_other_ids_stops_the_run(model):
    whole = run(model, {"learner": Counted()}, questions=STREAM, warm_up_tokens=1).rows
    next(row for row in whole if row.method == "learner").output_ids[2] += 1
    with pytest.raises(UserError, match=r"learner cannot be resumed: .*qa, question 0, turn 0 gives other ids"):
        run(model, {"learner": Counted()}, earlier=whole[:4], questions=STREAM, warm_up_tokens=1)


def test_sampled_answers_depend_on_seed_question_and_repeat_alone(model):
    sampling = plan_of(model, {}).generation.sampling.__class__(1.0)
    generation = Generation(12, frozenset(), sampling)
    forward = run(model, {"r": random_skip(2, None, "turn", 0.0, 3)}, generation=generation, repeats=2).rows
    backward = run(
        model, {"r": random_skip(2, None, "turn", 0.0, 3)}, generation=generation, repeats=2, questions=QUESTIONS[::-1]
    ).rows
    texts = {row.key: row.output_ids for row in forward}
    assert texts == {row.key: row.output_ids for row in backward}
    assert texts[("ar", "qa", 1, 0, 0)] != texts[("ar", "qa", 1, 0, 1)]


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(model):
    with pytest.raises(UserError, match=r"question 1, turn 0: a prompt of .* and a budget of 2040 exceed .* 2048"):
        run(model, {}, generation=Generation(2040, frozenset()))


def test_a_later_turn_that_long_answers_may_make_too_long_is_noted_and_not_refused(model):
    clock = DeviceClock(model.target.devices, model.target.device)

    def notes(budget):
        plan = plan_of(model, {}, generation=Generation(budget, frozenset()))
        return Runner(model.target, Prompter(model.tokenizer, "chat"), plan, clock).check()

    room = model.max_positions - len(Prompter(model.tokenizer, "chat").ids(QUESTIONS[1].turns, [""]))
    assert notes(room // 2) == []
    assert len(notes(room // 2 + 1)) == 1
    assert "1 later turn(s), the first question 2, turn 1, may exceed the model's context of 2048" in notes(room)[0]
    with pytest.raises(UserError, match="question 2, turn 1: a prompt"):
        notes(room + 1)


def test_a_warm_up_that_does_not_fit_is_refused_before_anything_runs(model):
    with pytest.raises(UserError, match="warm_up_tokens is 2040; behind a prompt of"):
        run(model, {}, warm_up_tokens=2040)


def test_a_skip_count_that_the_model_does_not_have_is_refused_before_anything_runs(model):
    with pytest.raises(UserError, match="num_skipped is 4; a model of 4 layers takes 1 to 3"):
        run(model, {"clasp": clasp(4, None, 1, 0.5, 4)})


def test_weights_that_make_nan_are_refused_by_the_warm_up():
    broken = TinyModel(num_layers=2).load()
    with torch.no_grad():
        broken.hf_model.model.layers[1].mlp.down_proj.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLogits, match="NaN or infinite"):
        run(broken, {})


def test_settings_that_make_no_sense_are_refused(model):
    for changes, text in (
        ({"history": "mine"}, "history is 'mine'"),
        ({"repeats": 0}, "repeats is 0"),
        ({"reference": None}, "history=own"),
        ({"warm_up_tokens": 0}, "warm_up_tokens is 0; it must be at least 1"),
    ):
        with pytest.raises(UserError, match=text):
            plan_of(model, {}, **changes)


def test_a_divergence_is_noted_with_its_gap(model):
    class Wrong(NoDraft):
        """Answers like the reference, but for a token that nobody would choose."""

        def answer(self, target, prompt, generation, randomness, clock):
            good = decode(target, NoDraft(), prompt, generation, randomness, clock)
            good.output_ids[3] = (good.output_ids[3] + 1) % 256
            return good

    rows = [row for row in run(model, {"wrong": Wrong()}).rows if row.method == "wrong"]
    assert all(row.first_divergence == 3 and row.divergence_gap > row.divergence_bound > 0 for row in rows)


class Wrong(NoDraft):
    """Other tokens than the reference's in every answer, or in the first one only."""

    def __init__(self, every=True):
        self._every = every

    def answer(self, target, prompt, generation, randomness, clock):
        good = decode(target, NoDraft(), prompt, generation, randomness, clock)
        if self._every or self._fresh:
            good.output_ids[3:] = [(token * 7 + 1) % 200 + 4 for token in good.output_ids[3:]]
        self._fresh = False
        return good

    def start_stream(self, target):
        self._fresh = True


def test_a_second_turn_behind_another_history_is_compared_with_nothing(model):
    rows = run(model, {"w": Wrong(every=False)}, history="own", questions=QUESTIONS[1:2]).rows
    first, second = (row for row in rows if row.method == "w")
    assert first.first_divergence == 3
    assert (second.first_divergence, second.divergence_gap) == (None, None)
    reference = [row for row in rows if row.method == "ar"]
    assert reference[1].prompt_sha256 != second.prompt_sha256
    assert reference[1].output_ids != second.output_ids
    assert grading.grades([reference[1]], [second], True).worst == "missing"


def test_a_reference_that_answers_after_a_resume_only_shows_where_earlier_rows_part_from_it(model):
    methods, settings = {"w": Wrong()}, {"questions": QUESTIONS[:1]}
    failing = Failing()
    failing.num_started = 0
    first = run(model, {"ar": failing, **methods}, **settings).rows
    assert [(row.method, row.error is None, row.first_divergence) for row in first] == [
        ("ar", False, None), ("w", True, None),
    ]  # fmt: skip
    kept = [row for row in first if row.error is None]
    runner, memory = runner_of(model, methods, **settings), Memory()
    runner.run(memory, memory, kept)
    assert [(row.key, row.first_divergence) for row in runner.late] == [(kept[0].key, 3)]
    assert runner.late[0].divergence_gap is not None
    assert kept[0].first_divergence is None
    runner.run(memory, memory, [*memory.rows, runner.late[0]])
    assert runner.late == []


class Ticking:
    """A meter whose counter rises by 3 J at each reading."""

    def __init__(self):
        self.read = 0.0

    def joules(self):
        self.read += 3.0
        return self.read


def test_rows_hold_the_energy_between_two_readings_around_the_turn(model):
    plan = plan_of(model, {"broken": Failing()})
    clock = DeviceClock(model.target.devices, model.target.device)
    memory, meter = Memory(), Ticking()
    Runner(model.target, Prompter(model.tokenizer, "chat"), plan, clock, meter).run(memory, memory)
    failed = [row for row in memory.rows if row.error]
    assert failed
    assert all(row.energy_j is None for row in failed)
    assert all(row.energy_j == 3.0 for row in memory.rows if not row.error)


def test_rows_without_a_meter_have_no_energy_and_no_peak(model):
    assert {(row.energy_j, row.peak_memory_bytes) for row in run(model, {}).rows} == {(None, None)}
