"""Recorded sub-layers: what is replayed, operation by operation and without any Python, is what would be computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baselines.draft_model import DraftModel
from clasp_core import checkpoint, fused, graphs
from clasp_core.attention import Span
from clasp_core.checkpoint import Checkpoint, assemble
from clasp_core.decoding import Generation
from clasp_core.drafting import NoDraft
from clasp_core.entry.manifests import notes_on
from clasp_core.errors import UserError
from clasp_core.families import wiring_of
from clasp_core.plan import Plan
from clasp_core.prompting import Prompter
from clasp_core.records import Question
from clasp_core.runner import Runner
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from clasp_core.tiny import byte_tokenizer
from tests.acceptance import gpu
from tests.conftest import FakeClock, answer, distance, hf_greedy, ids, llama_config, make_target, random_model
from tests.test_decoding import METHODS, from_yaml
from tests.test_runner import Memory
from tests.test_wiring import CONFIGS

TOLERANCE = 1e-12


class Tape(TorchDispatchMode):
    """What a CUDA graph does, on a CPU: the operations on the very tensors that they were recorded with, again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class Recorder:
    """Records on tapes and counts them."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        self.num += 1
        with Tape() as tape:
            work()
        assert tape.operations
        return tape.replay


def pair(**sizes: Any) -> tuple[TargetModel, TargetModel, Recorder]:
    """The eager model and the recorded one, in float64, which no kernel of ours serves."""
    recorder = Recorder()
    recorded = make_target(torch.float64, engine="compiled", recorder=recorder, **sizes)
    return make_target(torch.float64, **sizes), recorded, recorder


@torch.inference_mode()
def logits_of(target: TargetModel, prompt: list[int], tokens: list[int], span: Span, **options: Any) -> Tensor:
    """A pass behind a prompt."""
    cache = target.turn_cache(len(prompt) + len(tokens))
    forward(target, torch.tensor(prompt), Span.causal(0, len(prompt)), cache)
    return forward(target, torch.tensor(tokens), span, cache, **options).logits


@pytest.mark.parametrize("rows", [1, 2, 5, 17, 64, 65])
def test_a_replayed_pass_gives_the_logits_of_any_place_and_any_tokens(rows: int) -> None:
    """Recorded at one place behind one prompt, replayed at others."""
    eager, recorded, recorder = pair()
    skip = LayerSkip.sublayers(8, attn=[1, 4], mlp=[4, 6])
    parents = tuple(max(0, row - 2) for row in range(1, rows))
    for seed, start in enumerate((70, 9, 100)):
        prompt, tokens = ids(start, seed=seed), ids(rows, seed=seed + 10)
        for make in (Span.causal, lambda at, num: Span.tree(at, parents), Span.siblings):
            for left_out in (None, skip):
                found = [logits_of(t, prompt, tokens, make(start, rows), skip=left_out) for t in (eager, recorded)]
                assert distance(*found) < TOLERANCE
    sublayers = 3 * 8  # attention of rows that write and of rows alone, and the MLP
    short = {70, 9, 100, rows} & set(range(1, graphs.MAX_ROWS + 1))
    assert recorder.num == (sublayers if rows in short else 0) + 2 * 8 * len(short - {rows})


def test_another_skip_set_or_place_needs_no_new_recording() -> None:
    eager, recorded, recorder = pair()
    prompt = ids(80)
    logits_of(recorded, prompt, [1], Span.causal(80, 1))
    num_recorded = recorder.num
    for seed in range(6):
        skip = LayerSkip.layers(8, sorted({seed, (3 * seed + 1) % 8}))
        found = [
            logits_of(t, prompt[: 70 + seed], [seed], Span.causal(70 + seed, 1), skip=skip) for t in (eager, recorded)
        ]
        assert distance(*found) < TOLERANCE
    assert recorder.num == num_recorded


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_method_is_lossless_on_recordings(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_is_served", lambda module: False)  # as on a GPU: no kernels of ours
    recorder = Recorder()
    eager, recorded = make_target(dtype), make_target(dtype, engine="compiled", recorder=recorder)
    for seed in range(2):
        prompt = ids(20 + seed, seed=seed)
        expected = answer(eager, NoDraft(), prompt, 32).output_ids
        assert expected == hf_greedy(eager, prompt, 32)
        assert answer(recorded, from_yaml(name, exit_threshold=0.0), prompt, 32).output_ids == expected
    assert recorder.num


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_is_recorded_as_far_as_its_operations_are_the_same_for_all_rows(family: str) -> None:
    """Norms of queries and keys, layers without positions, experts."""
    config = CONFIGS[family]()
    model = random_model(config, seed=5, dtype=torch.float64)
    eager, recorder = TargetModel(model, wiring_of(config)), Recorder()
    tokens, span = ids(24, seed=3), Span.causal(20, 4)
    expected = logits_of(eager, tokens[:20], tokens[20:], span)
    recorded = TargetModel(random_model(config, seed=5, dtype=torch.float64), wiring_of(config), "compiled", recorder)
    assert distance(logits_of(recorded, tokens[:20], tokens[20:], span), expected) < TOLERANCE
    num_experts_layers = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert recorder.num == 2 * (2 * recorded.num_layers - num_experts_layers)  # the prompt's 20 rows, and 4


def test_a_longer_turn_lets_go_of_the_recordings_and_stays_right() -> None:
    eager, recorded, recorder = pair()
    for length in (10, 300, 40):
        prompt = ids(length, seed=length)
        found = [logits_of(t, prompt, [5, 6], Span.causal(length, 2)) for t in (eager, recorded)]
        assert distance(*found) < TOLERANCE
    num_recorded = recorder.num
    logits_of(recorded, ids(300), [5, 6], Span.causal(300, 2))
    assert recorder.num == num_recorded


def test_a_new_turn_finds_an_empty_cache_and_retires_the_old_one() -> None:
    _, recorded, _ = pair()
    old = recorded.turn_cache(8)
    with torch.inference_mode():
        forward(recorded, torch.tensor([1, 2]), Span.causal(0, 2), old)
    new = recorded.turn_cache(8)
    assert not any(half.any() for half in new.read(3, 2))
    with pytest.raises(IndexError):
        old.read(3, 2)


def test_a_cache_of_its_own_is_served_without_recordings() -> None:
    eager, recorded, recorder = pair()
    tokens = torch.tensor(ids(6))
    with torch.inference_mode():
        found = [forward(t, tokens, Span.causal(0, 6), t.new_cache(6)).logits for t in (eager, recorded)]
    assert distance(*found) < TOLERANCE
    assert recorder.num == 8  # the MLPs, which read no cache


def test_a_trial_leaves_no_trace() -> None:
    eager, recorded, _ = pair()
    for target in (eager, recorded):
        cache = target.turn_cache(12)
        with torch.inference_mode():
            forward(target, torch.tensor(ids(9)), Span.causal(0, 9), cache)
            before = [half.clone() for half in cache.read(2, 12)]
            forward(target, torch.tensor([3, 4]), Span.trial(9, 2), cache)
            assert all(map(torch.equal, before, cache.read(2, 12)))


def test_a_pass_beyond_the_turns_room_is_an_error() -> None:
    _, recorded, _ = pair()
    with torch.inference_mode(), pytest.raises(IndexError, match="beyond the cache's 256"):
        forward(recorded, torch.tensor([1, 2]), Span.causal(255, 2), recorded.turn_cache(8))


def test_nothing_is_recorded_while_a_clock_runs() -> None:
    """What is prepared is replayed; short prompts, wider passes and longer turns are computed call by call."""
    eager, recorded, recorder = pair()
    recorded.prepare(90)
    assert recorder.num == 2 * 8 * graphs.PREPARED_ROWS
    with recorded.without_recording():
        for num_prompt, budget in ((40, 32), (70, 12), (250, 32)):
            got = answer(recorded, from_yaml("clasp", exit_threshold=0.0), ids(num_prompt), budget)
            assert got.output_ids == answer(eager, NoDraft(), ids(num_prompt), budget).output_ids
    assert recorder.num == 2 * 8 * graphs.PREPARED_ROWS
    answer(recorded, NoDraft(), ids(40), 4)
    assert recorder.num > 2 * 8 * graphs.PREPARED_ROWS
    eager.prepare(90)
    with eager.without_recording():
        pass


def test_a_run_records_before_its_first_row_only() -> None:
    _, recorded, recorder = pair(vocab=300)
    prompter = Prompter(byte_tokenizer(), "plain")
    questions = [Question(each, "qa", "qa", ("One two three.", "Four."[: each + 2])) for each in range(2)]
    plan = Plan(
        model="m",
        methods={"ar": NoDraft(), "clasp": from_yaml("clasp")},
        reference="ar",
        questions=questions,
        generation=Generation(12, frozenset()),
    )
    runner = Runner(recorded, prompter, plan, FakeClock())
    runner.warm_up()
    num_recorded, memory = recorder.num, Memory()
    assert runner.run(memory, memory) == 0
    assert len(memory.rows) == 8
    assert 0 < num_recorded == recorder.num


def test_a_draft_model_is_prepared_and_closed_as_the_target_is() -> None:
    _, recorded, _ = pair(vocab=300)
    recorder = Recorder()
    cousin = make_target(torch.float64, engine="compiled", recorder=recorder, vocab=300, layers=2)
    source = SimpleNamespace(load=lambda engine: SimpleNamespace(target=cousin))
    plan = Plan(
        model="m",
        methods={"ar": NoDraft(), "sps": DraftModel(source, 5, "heuristic", 0.0)},
        reference="ar",
        questions=[Question(each, "qa", "qa", ("One two three. " * (1 + 30 * each),)) for each in range(2)],
        generation=Generation(12, frozenset()),
    )
    runner, memory = Runner(recorded, Prompter(byte_tokenizer(), "plain"), plan, FakeClock()), Memory()
    runner.check()
    runner.warm_up()
    num_recorded = recorder.num
    assert runner.run(memory, memory) == 0
    assert 0 < num_recorded == recorder.num


def test_a_shorter_run_reads_no_more_memory_than_on_its_own() -> None:
    _, recorded, _ = pair()
    capacities = []
    for longest in (900, 100, 90):
        recorded.prepare(longest)
        capacities.append(recorded.turn_cache(10).capacity)
    assert capacities == [1024, 256, 256]


def test_a_model_whose_sublayers_cannot_be_recorded_runs_call_by_call_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    def load() -> checkpoint.LoadedModel:
        model = random_model(llama_config(vocab=300), seed=0, dtype=torch.float64)
        return assemble(Checkpoint(model, byte_tokenizer(), "small", "a small model", "plain", {}), "compiled")

    monkeypatch.setattr("clasp_core.target.recorder_for", lambda devices: refuse)
    loaded = load()
    assert not loaded.target.records
    (note,) = notes_on(loaded.info)
    assert "CUDA graphs are off: a sub-layer cannot be recorded (operation not permitted" in note
    monkeypatch.setattr("clasp_core.target.recorder_for", lambda devices: Recorder())
    loaded = load()
    assert loaded.target.records
    assert loaded.info["cuda_graphs"] == "on"
    assert notes_on(loaded.info) == []
    monkeypatch.undo()
    assert "cuda_graphs" not in load().info


def test_a_recording_that_fails_later_is_one_line_with_the_way_out() -> None:
    calls = Recorder()

    def twice(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        if calls.num == 4:
            raise RuntimeError("out of memory")
        return calls(work, device)

    recorded = make_target(torch.float64, engine="compiled", recorder=twice)
    with pytest.raises(UserError, match=r"cannot be recorded \(out of memory\); use engine=eager"):
        answer(recorded, NoDraft(), ids(70), 4)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_gpu_check_finds_a_recording_that_is_not_what_it_stands_for(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: every fourth recording after those of the load does nothing when it is replayed."""
    good = Recorder()

    def sloppy(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        replay = good(work, device)
        return (lambda: None) if is_broken and good.num > 64 and good.num % 4 == 0 else replay

    monkeypatch.setattr("clasp_core.target.recorder_for", lambda devices: sloppy)
    model = random_model(llama_config(vocab=300), seed=0, dtype=torch.float64)
    loaded = assemble(Checkpoint(model, byte_tokenizer(), "small", "a small model", "plain", {}), "compiled")
    loaded.target.prepare(80)
    assert bool(gpu.faults_of(loaded)) == is_broken
