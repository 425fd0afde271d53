"""Self-SD: the adaptive threshold by hand, skip sets refused for other models, and a search that keeps its promises."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, FakeClock, FixedPolicy, answer, ids, make_target, watched
from omegaconf import OmegaConf

from baselines import self_sd_replay, self_sd_search
from baselines.self_sd import Adaptation, AdaptiveExit, FixedSetPolicy, StoredSet, self_sd
from baselines.self_sd_proposals import Bounds, Proposals, structured_starts
from baselines.self_sd_replay import Costs, Counts, Passage, Replay
from baselines.self_sd_search import SelfSDSearch
from clasp_core.checkpoint import LoadedModel
from clasp_core.decoding import Generation, Verified
from clasp_core.deep import DeepModel
from clasp_core.device import DeviceClock
from clasp_core.drafting import ChainRule, FixedExit, NoDraft, SelfDrafter
from clasp_core.errors import UserError
from clasp_core.prompting import Prompter
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel
from clasp_core.tasks import load
from clasp_core.tiny import TinyModel
from clasp_core.verify import Draft

PUBLISHED = Adaptation(every=1, memory=0.5, wanted=0.9, step=0.01, inertia=0.9)
PROMPTS = ROOT / "data" / "search_prompts.jsonl"


# ---- the adaptive threshold


def verdict(num_accepted: int, num_drafted: int) -> Verified:
    return Verified(Draft((5,) * num_drafted), tuple(range(num_accepted + 1)), 5, 0, None)


def thresholds(rule: AdaptiveExit, *verdicts: tuple[int, int]) -> list[float]:
    """The threshold after each verdict (accepted, drafted)."""
    found = []
    for numbers in verdicts:
        rule.observe(verdict(*numbers))
        found.append(rule.threshold)
    return found


def test_the_threshold_follows_the_published_rule_by_hand() -> None:
    """m: 0.5, 0.75, 0.875, 0.9375, 0.96875, then 0.609375; each step is a tenth of 0.01."""
    rule = AdaptiveExit(0.6, 12, PUBLISHED)
    found = thresholds(rule, (4, 4), (12, 12), (4, 4), (4, 4), (12, 12), (2, 8))
    assert found == pytest.approx([0.601, 0.602, 0.603, 0.602, 0.602, 0.603], abs=1e-12)


def test_acceptance_restarts_with_the_turn_and_the_threshold_does_not() -> None:
    rule = AdaptiveExit(0.6, 12, PUBLISHED)
    assert thresholds(rule, *[(4, 4)] * 4)[-1] == pytest.approx(0.602)
    rule.start_turn()
    assert thresholds(rule, (4, 4)) == pytest.approx([0.603])
    rule.start_stream()
    assert rule.threshold == 0.6
    assert thresholds(rule, (4, 4)) == pytest.approx([0.601])


def test_the_threshold_may_be_asked_to_restart_with_the_turn() -> None:
    rule = AdaptiveExit(0.6, 12, Adaptation(1, 0.5, 0.9, 0.01, 0.9, reset="turn"))
    thresholds(rule, (4, 4))
    rule.start_turn()
    assert rule.threshold == 0.6


def test_only_every_so_many_verifications_of_a_draft_count() -> None:
    rule = AdaptiveExit(0.6, 12, Adaptation(2, 0.5, 0.9, 0.01, 0.9))
    assert thresholds(rule, (0, 4), (0, 0), (4, 4), (4, 4)) == pytest.approx([0.6, 0.6, 0.601, 0.601])


def test_the_threshold_is_not_clipped_as_published() -> None:
    rule = AdaptiveExit(1.0, 12, PUBLISHED)
    assert thresholds(rule, *[(0, 1)] * 3) == pytest.approx([1.001, 1.002, 1.003])


def test_the_threshold_is_carried_through_a_stream_of_real_answers() -> None:
    """Recomputed from the traces, the last round of every turn included."""
    target = make_target(depth_gain=0.1)
    drafter = self_sd({"attn": [2, 5], "mlp": [3]}, 0.3, 4, PUBLISHED)
    drafter.start_stream(target)
    rule = AdaptiveExit(0.3, 4, PUBLISHED)
    ends: set[float] = set()
    for seed in range(3):
        rounds = answer(target, drafter, ids(9, seed=seed), 30, fresh=False).rounds
        rule.start_turn()
        thresholds(rule, *list(zip(rounds.num_accepted, rounds.num_drafted, strict=True)))
        assert drafter.exit_rule.threshold == rule.threshold
        ends.add(rule.threshold)
    assert len(ends - {0.3}) > 1
    drafter.start_stream(target)
    assert drafter.exit_rule.threshold == 0.3


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: AdaptiveExit(1.5, 12, PUBLISHED), "exit_threshold"),
        (lambda: Adaptation(0, 0.5, 0.9, 0.01, 0.9), "every"),
        (lambda: Adaptation(1, 1.5, 0.9, 0.01, 0.9), "memory"),
        (lambda: Adaptation(1, 0.5, 0.9, 0.01, 0.9, reset="never"), "reset"),  # type: ignore[arg-type]
        (lambda: self_sd({"attn": [1]}, 0.6, 12), "skip_set"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        make()


# ---- counters without verification


@pytest.mark.parametrize("stops", [(), (7, 20)])
@pytest.mark.parametrize(("threshold", "draft_len"), [(0.0, 1), (0.0, 12), (0.3, 4), (0.6, 12)])
def test_a_replay_counts_what_decoding_counts(threshold: float, draft_len: int, stops: Sequence[int]) -> None:
    target = make_target(torch.float64, depth_gain=0.25)
    prompts = [ids(6 + 3 * seed, seed=seed) for seed in range(3)]
    texts = [answer(target, NoDraft(), prompt, 20, stop_ids=stops).output_ids for prompt in prompts]
    passages = [Passage(tuple(prompt), tuple(text)) for prompt, text in zip(prompts, texts, strict=True)]
    rng = random.Random(draft_len)
    with torch.inference_mode():
        replay = Replay(target, passages, Generation(20, frozenset(stops)), draft_len, threshold)
    for num in (0, 2, 4):
        skip = LayerSkip.sublayers(8, attn=rng.sample(range(8), num), mlp=rng.sample(range(8), num // 2))
        wanted = Counts()
        for prompt in prompts:
            drafter = SelfDrafter(FixedPolicy(skip), FixedExit(threshold), ChainRule(draft_len))
            rounds = answer(target, drafter, prompt, 20, stop_ids=stops).rounds
            for numbers in zip(rounds.num_drafted, rounds.num_accepted, rounds.num_emitted, strict=True):
                wanted.add(*numbers)
        with torch.inference_mode():
            assert replay.counts(skip) == wanted


def test_the_prediction_is_the_ladders_by_hand() -> None:
    costs = Costs(0.2, (0.1, 0.1), (0.3, 0.3), ((1, 1.0), (2, 1.2), (4, 2.0)))
    skip = LayerSkip.sublayers(2, attn=[0], mlp=[1])
    counts = Counts(num_emitted=22, num_accepted=12, num_rounds_by_width=Counter({1: 2, 3: 8}))
    assert costs.draft_step(skip) == pytest.approx(0.6)
    assert [costs.verification(width) for width in (1, 2, 3, 4)] == pytest.approx([1.0, 1.2, 1.6, 2.0])
    assert counts.acceptance == 12 / 16
    assert costs.predicted(skip, counts) == pytest.approx(22 / (2 * 1.0 + 8 * 1.6 + 16 * 0.6))


def test_costs_by_bytes_are_shares_of_a_full_pass(tiny_target: TargetModel) -> None:
    costs = Costs.by_bytes(tiny_target)
    assert costs.draft_step(LayerSkip.none(8)) == pytest.approx(1)
    assert costs.draft_step(LayerSkip.layers(8, range(8))) == pytest.approx(costs.fixed)
    assert costs.verification(5) == 1


def test_costs_by_the_clock_come_from_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a pass takes 2 s, and 1 s for each attention, 3 s for each MLP, and half of it more for each further row."""
    target, clock = make_target(layers=4), FakeClock()

    def forward(target: Any, tokens: Any, span: Any, cache: Any, *, skip: LayerSkip | None = None, **_: Any) -> None:
        kept = LayerSkip.none(4) if skip is None else skip
        seconds = 2 + 1 * (4 - sum(kept.attn)) + 3 * (4 - sum(kept.mlp))
        clock.pass_(seconds * (1 + 0.5 * (len(tokens) - 1)))

    monkeypatch.setattr(self_sd_replay, "forward", forward)
    costs = Costs.measured(target, ids(5), 13, clock)
    assert costs.fixed == pytest.approx(2 / 18)
    assert costs.attn == pytest.approx([1 / 18] * 4)
    assert costs.mlp == pytest.approx([3 / 18] * 4)
    assert [costs.verification(width) for width in (1, 5, 13)] == pytest.approx([1, 3, 7])


# ---- proposals


def test_scores_decode_to_those_above_one_half_within_the_bounds() -> None:
    scores = [0.9, 0.1, 0.6, 0.2, 0.7, 0.3]
    assert Bounds(3, 0, 6).decode(scores) == LayerSkip.sublayers(3, attn=[0, 2], mlp=[1])
    assert Bounds(3, 2, 2).decode(scores) == LayerSkip.sublayers(3, attn=[0], mlp=[1])
    assert Bounds(3, 4, 4).decode(scores) == LayerSkip.sublayers(3, attn=[0, 2], mlp=[1, 2])
    assert Bounds(3, 2, 2).decode([1.0, 1.0, 1.0, 0, 0, 0]) == LayerSkip.sublayers(3, attn=[0, 1], mlp=[])


def test_indices_of_starts_come_from_the_model() -> None:
    """P36: nothing assumes 40 layers."""
    for num in (2, 5, 6, 32, 80):
        costs = Costs(0.0, (1.0,) * num, (1.0,) * num, ((1, 1.0),))
        influence = [float(i) for i in range(2 * num)]
        starts = structured_starts(Bounds(num, 1, 2 * num), influence, costs)
        assert starts[0] == LayerSkip.layers(num, range(1, num, 2))
        assert LayerSkip.sublayers(num, attn=range(round(0.4 * num)), mlp=[]) in starts or num < 5
        exact = structured_starts(Bounds(num, num, num), influence, costs)
        assert {skip.num_skipped_sublayers for skip in exact} == {num}


@pytest.mark.parametrize("bounds", [Bounds(2, 1, 4), Bounds(3, 3, 3)], ids=["free", "exact"])
def test_no_set_is_proposed_twice_until_none_is_left(bounds: Bounds) -> None:
    proposals = Proposals(bounds, [], seed=0)
    seen = []
    while (skip := proposals.next()) is not None:
        assert bounds.admits(skip)
        seen.append(skip)
        proposals.tell(skip, float(sum(skip.attn)))
    assert len(seen) == len(set(seen)) == bounds.num_sets


def test_proposals_beat_random_sets_on_planted_values() -> None:
    """Half of 24 sub-layers are free to skip, the others cost; 60 evaluations each, over three seeds."""
    bounds, planted = Bounds(12, 12, 12), set(range(0, 24, 2))

    def value(skip: LayerSkip) -> float:
        return float(sum(bit for i, bit in enumerate((*skip.attn, *skip.mlp)) if i in planted))

    def best(sets: Callable[[], LayerSkip | None], tell: Callable[[LayerSkip, float], None]) -> float:
        values = []
        for _ in range(60):
            skip = sets()
            assert skip is not None
            values.append(value(skip))
            tell(skip, values[-1])
        return max(values)

    for seed in range(3):
        proposals, rng = Proposals(bounds, [], seed), random.Random(seed)
        by_search = best(proposals.next, proposals.tell)
        by_chance = best(lambda r=rng: bounds.of(r.sample(range(24), 12)), lambda skip, value: None)  # type: ignore[misc]
        assert by_search > by_chance


def test_the_threshold_sees_every_verification_of_an_answer(tiny_target: TargetModel) -> None:
    """The last one too, which nothing follows in its turn; it is told behind the clock."""
    seen: list[tuple[int, bool]] = []
    drafter = self_sd({"attn": [1, 3], "mlp": [2]}, 0.1, 4, Adaptation(1, 0.5, 0.9, 0.05, 0.5))
    rule = drafter.exit_rule
    with watched(rule, "observe", lambda verified: seen.append((len(verified.draft.tokens), verified.last))):
        rounds = answer(tiny_target, drafter, ids(9), 30).rounds
    assert [num for num, _ in seen] == rounds.num_drafted
    assert [last for _, last in seen] == [False] * (len(rounds) - 1) + [True]


# ---- the search


def search(**options: Any) -> SelfSDSearch:
    """A search in a second or two on a tiny model; costs by bytes, so that no clock decides anything."""
    defaults: dict[str, Any] = {
        "prompts": str(PROMPTS), "num_prompts": 3, "tokens": 16, "evaluations": 20, "seconds": None,
        "objective": "predicted", "costs": "bytes", "max_draft_len": 6, "exit_threshold": 0.2,
        "num_skipped_sublayers": None, "min_share": 0.1, "max_share": 0.8, "seed": 0,
    }  # fmt: skip
    return SelfSDSearch(**{**defaults, **options})


def tiny(**sizes: Any) -> LoadedModel:
    return TinyModel(**{"num_layers": 4, "depth_gain": 0.2, **sizes}).load()


def run(model: LoadedModel, folder: Path, clock: Any = None, **options: Any) -> tuple[Path, dict[str, Any]]:
    prompter = Prompter(model.tokenizer, model.prompt)
    clock = clock or DeviceClock(model.target.devices, model.target.device)
    path = search(**options).run(model, prompter, clock, folder)
    return path, json.loads(path.read_text())


def history(path: Path) -> list[tuple[Any, ...]]:
    """Every evaluation in the log beside a result, without its time."""
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    return [(row["skip"], row["value"], row["counts"]) for row in rows if "skip" in row]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny()


@pytest.fixture(scope="module")
def found(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a search of 20 sets."""
    return run(model, tmp_path_factory.mktemp("found"))[0]


def test_the_result_says_what_it_is_and_where_it_comes_from(model: LoadedModel, found: Path) -> None:
    row = json.loads(found.read_text())
    assert found.name == "tiny-self_sd.json"
    assert row["model"]["fingerprint"] == model.info["fingerprint"]
    assert (row["model"]["num_layers"], row["model"]["dtype"]) == (4, "float32")
    lists = {kind: row["skip"][kind] for kind in ("attn", "mlp")}
    assert LayerSkip.decode(row["skip"]["code"]) == LayerSkip.sublayers(4, **lists)
    assert row["search"]["value"] == max(value for _, value, _ in history(found))
    assert row["search"]["num_evaluations"] == 20
    assert row["search"]["seconds"] > 0
    assert row["search"]["settings"]["seed"] == 0
    assert {"git", "versions", "machine"} <= set(row)
    assert str(Path.home()) not in found.read_text()


def test_every_set_is_decoded_once(model: LoadedModel, tmp_path: Path) -> None:
    decoded: list[LayerSkip] = []
    with watched(Replay, "counts", lambda replay, skip: decoded.append(skip)):
        path, _ = run(model, tmp_path, evaluations=30)
    assert len(decoded) == len(set(decoded)) == 30
    assert [skip.code for skip in decoded] == [code for code, _, _ in history(path)]
    assert all(1 <= skip.num_skipped_sublayers <= 6 for skip in decoded)


def test_the_same_seed_gives_the_same_history(model: LoadedModel, found: Path, tmp_path: Path) -> None:
    assert history(run(model, tmp_path / "a")[0]) == history(found)
    assert history(run(model, tmp_path / "b", seed=1)[0]) != history(found)


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_search_keeps_its_best_and_goes_on(
    model: LoadedModel, found: Path, tmp_path: Path, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[LayerSkip] = []

    def stop(replay: Replay, skip: LayerSkip) -> None:
        if len(decoded) == 12:
            raise KeyboardInterrupt
        decoded.append(skip)

    with watched(Replay, "counts", stop), pytest.raises(UserError, match=r"interrupted; .* the same command goes on"):
        run(model, tmp_path)
    path = next(tmp_path.glob("*.json"))
    row = json.loads(path.read_text())
    assert row["search"]["status"] == "interrupted"
    assert row["search"]["num_evaluations"] == 12
    assert row["search"]["value"] == max(value for _, value, _ in history(found)[:12])
    if torn:
        with path.with_suffix(".jsonl").open("a") as file:
            file.write('{"key":"v1:')
    more: list[LayerSkip] = []
    with watched(Replay, "counts", lambda replay, skip: more.append(skip)):
        path, row = run(model, tmp_path)
    assert history(path) == history(found)
    assert len({*decoded, *more}) == len(decoded) + len(more) == 20
    assert row["search"]["status"] == "budget used up"
    with watched(Replay, "counts", lambda replay, skip: pytest.fail("decoded again")):
        assert run(model, tmp_path)[1]["skip"] == row["skip"]


def test_a_trial_never_replaces_the_result_of_another_search(model: LoadedModel, tmp_path: Path) -> None:
    path, _ = run(model, tmp_path, evaluations=6)
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"tiny-self_sd.json .* another search \(tokens differ\).*search.replace=true"):
        run(model, tmp_path, evaluations=1, tokens=3)
    assert path.read_bytes() == before
    run(model, tmp_path, evaluations=1, tokens=3, replace=True)
    assert path.read_bytes() != before


def test_a_better_set_is_never_replaced(model: LoadedModel, tmp_path: Path) -> None:
    path, row = run(model, tmp_path, evaluations=6)
    path.write_text(json.dumps({**row, "search": {**row["search"], "value": 9.0}}))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"holds a better set \(9 against .*search.replace=true"):
        run(model, tmp_path, evaluations=8)
    assert path.read_bytes() == before
    run(model, tmp_path, evaluations=8, replace=True)


def test_another_model_or_setting_does_not_continue_a_search(model: LoadedModel, tmp_path: Path) -> None:
    run(model, tmp_path, evaluations=6)
    for other, options in ((tiny(seed=1), {}), (model, {"tokens": 12}), (model, {"seed": 3})):
        decoded: list[LayerSkip] = []
        with watched(Replay, "counts", lambda replay, skip, decoded=decoded: decoded.append(skip)):
            run(other, tmp_path, evaluations=6, replace=True, **options)
        assert len(decoded) == 6


def test_a_small_space_is_exhausted_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, row = run(tiny(num_layers=2), tmp_path, evaluations=200, num_skipped_sublayers=2)
    assert row["search"]["num_evaluations"] == 6
    assert "exhausted (6 sets)" in row["search"]["status"]
    assert "space exhausted (6 sets): 6 distinct sets" in capsys.readouterr().out


def test_seconds_end_a_search_and_count_earlier_sessions(model: LoadedModel, tmp_path: Path) -> None:
    clock = FakeClock()
    with watched(Replay, "counts", lambda replay, skip: clock.pass_(10)):
        _, row = run(model, tmp_path, clock, seconds=35)
        assert (row["search"]["status"], row["search"]["num_evaluations"]) == ("time used up", 4)
        _, row = run(model, tmp_path, clock, seconds=55)
        assert (row["search"]["num_evaluations"], row["search"]["seconds"]) == (6, 60)


def test_an_exact_count_is_kept_and_named(model: LoadedModel, tmp_path: Path) -> None:
    path, row = run(model, tmp_path, num_skipped_sublayers=3, evaluations=12)
    assert path.name == "tiny-self_sd-3.json"
    assert row["skip"]["num_skipped_sublayers"] == 3
    assert {LayerSkip.decode(code).num_skipped_sublayers for code, _, _ in history(path)} == {3}


def test_a_planted_redundancy_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd layers hardly matter; without the starts that know such patterns, and better than random sets."""
    base = TinyModel(num_layers=4, depth_gain=0.5)
    deep = DeepModel(name="deep", base=base, epsilon=0.02, dtype="float32", device="cpu", prompt="chat").load()
    monkeypatch.setattr(self_sd_search, "structured_starts", lambda *_: [])
    options = {"num_skipped_sublayers": 6, "evaluations": 40, "num_prompts": 2, "tokens": 10, "exit_threshold": 0.0}
    row = run(deep, tmp_path, **options)[1]
    rng = random.Random(0)
    monkeypatch.setattr(Proposals, "next", lambda self: self._bounds.of(rng.sample(range(16), 6)))
    by_chance = run(deep, tmp_path / "random", **options)[1]
    assert row["search"]["value"] > by_chance["search"]["value"]
    assert sum(i % 2 for i in (*row["skip"]["attn"], *row["skip"]["mlp"])) >= 5


def test_tokens_per_second_is_measured_on_real_runs(model: LoadedModel, tmp_path: Path) -> None:
    path, row = run(model, tmp_path, objective="tokens_per_s", evaluations=5)
    assert row["search"]["objective"] == "tokens_per_s"
    assert row["search"]["value"] > 0
    predicted = {code: counts for code, _, counts in history(run(model, tmp_path / "p", evaluations=20)[0])}
    for code, value, counts in history(path):
        assert value > 0
        assert predicted.get(code, counts) == counts


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_skipped_sublayers": 9}, "8 sub-layers"),
        ({"num_prompts": 99}, "num_prompts"),
        ({"prompts": "nowhere.jsonl"}, "search.prompts"),
        ({"tokens": 5000}, "positions"),
        ({"objective": "luck"}, "objective"),
        ({"min_share": 0.9}, "min_share"),
        ({"evaluations": 0}, "evaluations"),
        ({"exit_threshold": 2.0}, "exit_threshold"),
        ({"seconds": 0}, "search.seconds"),
    ],
)
def test_searches_that_cannot_be_made_are_refused(
    model: LoadedModel, tmp_path: Path, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        run(model, tmp_path, **options)
    assert not list(tmp_path.glob("*.json"))


def test_a_damaged_log_is_named(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny-self_sd.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"tiny-self_sd\.jsonl, line 1 is damaged"):
        run(model, tmp_path)


def test_the_yaml_of_the_search_fits_its_class() -> None:
    options = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/search/self_sd.yaml"), resolve=False)
    assert isinstance(options, dict)
    assert options.pop("_target_") == "baselines.self_sd_search.SelfSDSearch"
    assert set(options) == set(SelfSDSearch.__dataclass_fields__)
    method = OmegaConf.load(ROOT / "conf/method/self_sd.yaml")
    assert (method.max_draft_len, method.exit_threshold) == (options["max_draft_len"], options["exit_threshold"])


# ---- stored sets


def test_a_found_set_is_a_method_and_lossless(model: LoadedModel, found: Path) -> None:
    drafter = self_sd(str(found), 0.2, 6, PUBLISHED)
    for seed in range(3):
        prompt = ids(12, seed=seed, vocab=260)
        expected = answer(model.target, NoDraft(), prompt, 40).output_ids
        got = answer(model.target, drafter, prompt, 40)
        assert got.output_ids == expected
        assert set(got.rounds.skip) <= {json.loads(found.read_text())["skip"]["code"], None}
    assert isinstance(drafter.policy, FixedSetPolicy)
    assert drafter.policy.stored is not None
    assert drafter.policy.stored.search_s == json.loads(found.read_text())["search"]["seconds"]


@pytest.mark.parametrize(
    ("sizes", "word"),
    [({"seed": 1}, "fingerprint"), ({"num_layers": 3}, "num_layers is 4"), ({"dtype": "float64"}, "dtype is float32")],
)
def test_a_set_of_another_model_is_refused(found: Path, sizes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=rf"searched for another model \(tiny\): its {word}"):
        self_sd(str(found), 0.6, 12).start_stream(tiny(**sizes).target)


def changed(found: Path, place: Path, **parts: dict[str, Any]) -> Path:
    """A copy of a stored set with some values changed."""
    row = json.loads(found.read_text())
    for part, values in parts.items():
        row[part] = row[part] | values if isinstance(values, dict) else values
    place.write_text(json.dumps(row))
    return place


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ({"skip": {"attn": [4]}}, "names layer 4, but the model has layers 0..3"),
        ({"skip": {"mlp": [-1]}}, "names layer -1"),
        ({"skip": {"code": "4:f:f"}}, "is damaged"),
        ({"skip": {"attn": None}}, "is no skip set"),
        ({"schema": 2}, "schema 2"),
    ],
)
def test_a_damaged_set_is_refused(found: Path, model: LoadedModel, tmp_path: Path, parts: Any, word: str) -> None:
    path = changed(found, tmp_path / "set.json", **parts)
    with pytest.raises(UserError, match=re.escape(word)) as caught:
        self_sd(str(path), 0.6, 12).start_stream(model.target)
    assert str(path) in str(caught.value)


def test_a_missing_set_names_the_search(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="search=self_sd"):
        self_sd(str(tmp_path / "none.json"), 0.6, 12).start_stream(model.target)
    (tmp_path / "text.json").write_text("not a set")
    with pytest.raises(UserError, match="is not JSON"):
        self_sd(str(tmp_path / "text.json"), 0.6, 12).start_stream(model.target)


def test_a_set_can_be_spelled_out(model: LoadedModel) -> None:
    drafter = self_sd({"attn": [1], "mlp": [0, 2]}, 0.6, 12)
    drafter.start_stream(model.target)
    assert drafter.policy.current() == LayerSkip.sublayers(4, attn=[1], mlp=[0, 2])
    with pytest.raises(UserError, match="names layer 7"):
        self_sd({"attn": [7], "mlp": []}, 0.6, 12).start_stream(model.target)


@pytest.mark.parametrize("path", sorted((ROOT / "data/skip_sets").glob("*.json")), ids=lambda path: path.stem)
def test_the_sets_that_are_shipped_can_be_read(path: Path) -> None:
    stored = StoredSet.read(path)
    assert path.name.startswith(f"{stored.model['name']}-self_sd")
    assert stored.search_s > 0
    assert stored.num_evaluations > 0
    count = path.stem.rpartition("-")[2]
    assert not count.isdigit() or stored.skip.num_skipped_sublayers == int(count)


# ---- the search prompts


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def phrases(texts: Sequence[str], length: int) -> set[tuple[str, ...]]:
    """Every run of so many words."""
    return {tuple(each[i : i + length]) for each in map(words, texts) for i in range(len(each) - length + 1)}


def test_search_prompts_are_many_and_of_many_kinds() -> None:
    questions = load("data/search_prompts.jsonl", "search_prompts", root=ROOT)
    assert len(questions) >= 8
    assert len({question.task for question in questions[:8]}) == 6
    assert len({question.category for question in questions}) >= 8


@pytest.mark.parametrize("place", ["data/sample/questions.jsonl", "../shared/spec_bench/question.jsonl"])
def test_search_prompts_share_no_question_and_no_phrase_with_a_benchmark(place: str) -> None:
    """No id, no text and no run of eight words; Spec-Bench is compared where its questions are."""
    path = ROOT / place
    if not path.is_file():
        pytest.skip(f"{place} is not here")
    theirs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ours = load("data/search_prompts.jsonl", "search_prompts", root=ROOT)
    assert not {row["question_id"] for row in theirs} & {question.question_id for question in ours}
    texts = [turn for row in theirs for turn in row["turns"]]
    assert not phrases(texts, 8) & phrases([turn for question in ours for turn in question.turns], 8)
