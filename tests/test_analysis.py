"""What the programme chooses token by token, and how good it is, against fresh caches and brute force."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import pytest
import torch
from conftest import FakeClock, make_target, prefilled
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clasp_core.analysis import Reader, SelectionQuality, Text, TokenSkipSets, rows_of
from clasp_core.attention import Span
from clasp_core.clasp import select_layers
from clasp_core.decoding import Generation
from clasp_core.errors import UserError
from clasp_core.prompting import Prompter
from clasp_core.records import Question
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from clasp_core.tiny import TinyModel

QUESTION = Question(7, "qa", "qa", ("Where do the boats lie?",))
TOKENS = [int(token) for token in torch.randint(64, (18,), generator=torch.Generator().manual_seed(3))]
NUM_PROMPT = 8


@pytest.fixture(scope="module")
def text() -> Text:
    """A float64 target of 8 layers that matter, over 18 tokens of which 10 are the answer."""
    target = make_target(torch.float64, depth_gain=0.5)
    cache = target.new_cache(len(TOKENS))
    rows = slice(NUM_PROMPT, None)
    out = forward(
        target, torch.tensor(TOKENS), Span.causal(0, len(TOKENS)), cache, rows=rows, keep_hidden=True
    )  # fmt: skip
    assert out.hidden is not None
    return Text(target, cache, NUM_PROMPT, out.hidden)


def fresh(target: TargetModel, tokens: list[int], skip: LayerSkip | None = None) -> list[Tensor]:
    """The newest token's states, with the full model's prefix and nothing after it in the cache."""
    cache = prefilled(target, tokens[:-1], len(tokens))
    span = Span.causal(len(tokens) - 1, 1)
    out = forward(target, torch.tensor(tokens[-1:]), span, cache, skip=skip, keep_hidden=True)
    assert out.hidden is not None
    return list(out.hidden)


def quality(**changes: Any) -> SelectionQuality:
    return SelectionQuality(**{"num_free": 5, "counts": [1, 2, 4], "every": 1, "batch": 512, **changes})


@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_tokens_set_is_the_one_of_a_cache_that_ends_there(text: Text, index: int) -> None:
    """The later tokens of the text, which are in the cache, are not seen."""
    tokens = TOKENS[: NUM_PROMPT + index + 1]
    cache = prefilled(text.target, tokens, len(tokens))
    wanted = select_layers(text.target, cache, fresh(text.target, tokens), len(tokens) - 1, 3).skip
    analysis = TokenSkipSets(num_skipped=3, skip_ratio=None, every=1)
    assert analysis.at(text, index) == [{"kind": "token_skip_set", "num_skipped": 3, "skip": wanted.code}]


def test_sets_of_tokens_are_not_all_the_same(text: Text) -> None:
    analysis = TokenSkipSets(num_skipped=3, skip_ratio=None, every=1)
    assert len({analysis.at(text, index)[0]["skip"] for index in range(10)}) > 1


def test_the_cosine_of_every_set_is_that_of_a_replay(text: Text) -> None:
    """Layers 1 to 5 of 8 are free; every subset of the wanted sizes, one by one, with its own cache."""
    found = quality().every_set(text, 4)
    tokens = TOKENS[: NUM_PROMPT + 5]
    full = fresh(text.target, tokens)[-1].float()
    sets = [chosen for count in (1, 2, 3, 4) for chosen in combinations(range(1, 6), count)]
    assert len(found) == len(sets) == sum(comb(5, count) for count in (1, 2, 3, 4))
    for chosen in sets:
        skip = LayerSkip.layers(8, chosen)
        state = fresh(text.target, tokens, skip)[-1].float()
        assert found[skip] == pytest.approx(float(cosine_similarity(state, full)), abs=1e-6), chosen


def test_a_row_compares_programme_best_and_all_sets_by_hand(text: Text) -> None:
    every = quality().every_set(text, 4)
    for row, count in zip(quality().at(text, 4), (1, 2, 4), strict=True):
        near = {skip: value for skip, value in every.items() if sum(skip.attn) == count}
        assert row["num_sets"] == len(near) == comb(5, count)
        assert row["brute_force"] == max(near.values()) == near[LayerSkip.decode(row["brute_force_skip"])]
        assert row["programme"] == near[LayerSkip.decode(row["programme_skip"])] <= row["brute_force"]
        assert row["random_mean"] == pytest.approx(sum(near.values()) / len(near))
        assert row["share_better"] == sum(value > row["programme"] for value in near.values()) / len(near)
        assert row["random_p05"] <= row["random_p95"]


def test_the_programmes_set_keeps_the_first_and_last_layers_and_is_the_constrained_one(text: Text) -> None:
    free = [layer in range(1, 6) for layer in range(8)]
    wanted = select_layers(text.target, text.cache, text.states(4), text.position(4), 2, skippable=free)
    row = quality(counts=[2]).at(text, 4)[0]
    assert row["programme_skip"] == wanted.skip.code
    near = float(cosine_similarity(wanted.final_state.float(), text.states(4)[-1].float()))
    assert row["programme"] == pytest.approx(near, abs=1e-6)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_size_of_a_call_changes_nothing(text: Text, batch: int) -> None:
    small, large = quality(batch=batch).every_set(text, 4), quality().every_set(text, 4)
    assert small.keys() == large.keys()
    assert all(small[skip] == pytest.approx(large[skip], abs=1e-6) for skip in small)


def test_sets_of_no_wanted_size_are_not_tried(text: Text) -> None:
    assert {sum(skip.attn) for skip in quality(counts=[3]).every_set(text, 4)} == {3}


@pytest.mark.parametrize(
    ("num_layers", "num_free", "wanted"), [(32, 12, range(10, 22)), (60, 10, range(25, 35)), (8, 5, range(1, 6))]
)
def test_the_free_layers_lie_in_the_middle_as_in_the_paper(num_layers: int, num_free: int, wanted: range) -> None:
    assert quality(num_free=num_free).free(num_layers) == wanted


def test_a_question_is_read_as_it_is_answered() -> None:
    model = TinyModel().load()
    prompter = Prompter(model.tokenizer, model.prompt)
    reader = Reader(model.target, prompter, Generation(9, frozenset(model.stop_ids)), FakeClock())
    read = reader.read(QUESTION)
    prompt = prompter.ids(QUESTION.turns, [])
    assert read.num_prompt == len(prompt)
    assert read.num_tokens == 9
    assert [len(states) for states in read.hidden] == [9] * 7
    greedy = [int(model.target.head(states[None]).argmax()) for states in read.hidden[-1]]
    answer = [int(row.argmax()) for row in torch.cdist(read.hidden[0], model.target.embed(torch.arange(260))).neg()]
    assert greedy[:-1] == answer[1:]  # each token's last state says the next token
    rows = list(rows_of(TokenSkipSets(num_skipped=3, skip_ratio=None, every=4), read, QUESTION))
    assert [row["position"] for (row,) in rows] == [0, 4, 8]
    assert {(row["task"], row["question_id"], row["turn"]) for (row,) in rows} == {("qa", 7, 0)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_free": 17}, r"num_free is 17: all 2\^17 sets would be tried; choose 1 to 16"),
        ({"num_free": 0}, "num_free is 0"),
        ({"counts": []}, "give one or more"),
        ({"counts": [2, 6]}, "each from 1 to num_free, which is 5"),
        ({"counts": [0]}, "each from 1"),
        ({"every": 0}, "every is 0"),
        ({"batch": 0}, "batch is 0"),
    ],
)
def test_bad_options_are_refused_when_the_analysis_is_built(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        quality(**changes)


def test_a_model_with_too_few_layers_is_refused(text: Text) -> None:
    with pytest.raises(UserError, match=r"num_free is 8, but the model has 8 layers and one must stay; .* at most 7"):
        quality(num_free=8).check(text.target)
    quality(num_free=7).check(text.target)
    with pytest.raises(UserError, match="num_skipped is 8"):
        TokenSkipSets(num_skipped=8, skip_ratio=None, every=1).check(text.target)
    with pytest.raises(UserError, match="set exactly one of them"):
        TokenSkipSets(num_skipped=3, skip_ratio=0.5, every=1)
