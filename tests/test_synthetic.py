"""Synthetic models: the planted layers are those that matter least, and the GPU check works as far as a CPU goes."""

from __future__ import annotations

import pytest
import torch

from clasp_core.attention import Span
from clasp_core.checkpoint import LoadedModel
from clasp_core.clasp import select_layers
from clasp_core.errors import UserError
from clasp_core.probe import Scene
from clasp_core.synthetic import SyntheticModel
from clasp_core.target import forward
from tests.acceptance import gpu
from tests.conftest import distance, ids


def small(**changes: object) -> SyntheticModel:
    options = {
        "name": "small", "dtype": "float32", "device": "cpu", "num_layers": 8, "width": 64, "mlp_width": 96,
        "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300, "rope_theta": 1e4, "planted_share": 0.5, "epsilon": 0.02,
    }  # fmt: skip
    return SyntheticModel(**{**options, **changes})  # type: ignore[arg-type]


def loaded(**changes: object) -> LoadedModel:
    return small(**changes).load()


def logits(model: LoadedModel) -> torch.Tensor:
    tokens = torch.tensor(ids(7, seed=1))
    with torch.inference_mode():
        return forward(model.target, tokens, Span.causal(0, 7), model.target.new_cache(7)).logits


def test_one_seed_gives_one_model() -> None:
    assert distance(logits(loaded()), logits(loaded())) == 0
    assert distance(logits(loaded()), logits(loaded(seed=1))) > 0.1


@torch.inference_mode()
def test_the_programme_finds_the_planted_layers() -> None:
    model = loaded()
    planted = model.info["planted_layers"]
    assert planted == [1, 3, 5, 7]
    scene = Scene.after(model.target, ids(12, seed=2), 1)
    chosen = select_layers(model.target, scene.cache, scene.states, 11, len(planted))
    assert list(chosen.skip.skipped_attn) == planted


def test_planted_layers_are_evenly_spread() -> None:
    assert small(planted_share=0.25).planted_layers() == [2, 6]
    assert small(planted_share=0).planted_layers() == []


@pytest.mark.parametrize(
    ("changes", "word"), [({"vocab_size": 100}, "vocab_size=100"), ({"planted_share": 1.0}, "planted_share=1.0")]
)
def test_what_cannot_be_made_is_refused_by_name(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UserError, match=word):
        small(**changes).config()


def test_a_shape_that_does_not_fit_is_refused_before_it_is_made() -> None:
    with pytest.raises(UserError, match=r"needs about .* GiB on cpu"):
        small(num_layers=80, width=8192, mlp_width=28672, num_heads=64, num_kv_heads=8, vocab_size=128256).load()


def test_the_gpu_check_ends_well_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([])
    assert "no GPU is visible" in capsys.readouterr().out


def test_the_gpu_check_gives_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, object]] = []
    faults: list[str] = []
    found = gpu.check(loaded(), rows, faults, num_turns=1)  # type: ignore[arg-type]
    assert faults == []
    passes = {"ar_ms", "bandwidth_share", "width_5", "draft_50", "dp_4"}
    assert passes | {"host_share", "clasp_efficiency", "ladder_verify"} <= set(found)
    assert {row["case"] for row in rows} >= {"ar_step", "read", "width-13", "prefill"}
    assert "exact" in capsys.readouterr().out
