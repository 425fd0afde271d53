"""The fast engine: the same numbers as the eager one, from weights that are shared and fused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from clasp_core import fused, native
from clasp_core.attention import Span
from clasp_core.errors import UserError
from clasp_core.families import wiring_of
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward
from tests.conftest import distance, ids, llama_config, make_target, prefilled, random_model

WIDTHS = [1, 2, 3, 5, 9, 17, 33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", WIDTHS)
def test_every_kind_of_pass_gives_the_eager_engines_logits_and_cache(rows: int, dtype: torch.dtype) -> None:
    """Chains, trees and siblings of any width, whole and with sub-layers skipped."""
    eager, fast = make_target(dtype), make_target(dtype, engine="compiled")
    prompt, tokens = ids(11, seed=1), torch.tensor(ids(rows, seed=2))
    skip = LayerSkip.sublayers(8, attn=[1, 4], mlp=[4, 6])
    parents = tuple(max(0, row - 2) for row in range(1, rows))
    spans = [Span.causal(11, rows), Span.tree(11, parents), Span.siblings(11, rows)]
    for span in spans:
        for left_out in (None, skip):
            caches = [prefilled(target, prompt, 11 + rows) for target in (eager, fast)]
            passes = [
                forward(target, tokens, span, cache, skip=left_out)
                for target, cache in zip((eager, fast), caches, strict=True)
            ]
            assert distance(passes[0].logits, passes[1].logits) < 3e-5
            halves = [[half for layer in range(8) for half in cache.read(layer, 11 + rows)] for cache in caches]
            assert max(map(distance, *halves)) < 3e-5


@pytest.mark.parametrize("rows", [1, 4])
def test_bfloat16_agrees_with_eager_up_to_its_rounding(rows: int) -> None:
    eager, fast = (make_target(torch.bfloat16, engine=engine) for engine in ("eager", "compiled"))
    tokens = torch.tensor(ids(rows, seed=3))
    span = Span.causal(0, rows)
    logits = [forward(t, tokens, span, t.new_cache(rows)).logits.float() for t in (eager, fast)]
    assert float((logits[0] - logits[1]).norm() / logits[0].norm()) < 0.02


def test_a_pass_is_the_same_to_the_bit_when_it_is_repeated() -> None:
    fast = make_target(engine="compiled")
    for rows in WIDTHS:
        tokens, span = torch.tensor(ids(rows, seed=4)), Span.causal(0, rows)
        first, second = (forward(fast, tokens, span, fast.new_cache(rows)).logits for _ in range(2))
        assert torch.equal(first, second)


def test_hugging_faces_modules_share_the_fused_weights_and_keep_their_values() -> None:
    """Else fusing would hold the weights twice, and `generate` would measure another copy."""
    config = llama_config()
    model = random_model(config, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    TargetModel(model, wiring_of(config), "compiled")
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        for parts in ((attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)):
            stores = {part.weight.untyped_storage().data_ptr() for part in parts}
            assert len(stores) == 1


def test_eager_takes_nothing_from_the_fast_engine() -> None:
    model = random_model(llama_config(), seed=0)
    target = TargetModel(model, wiring_of(model.config))
    weights = {part.weight.untyped_storage().data_ptr() for part in model.modules() if isinstance(part, nn.Linear)}
    assert len(weights) == 8 * 7 + 1
    assert target._blocks[0].mlp_norm is model.model.layers[0].post_attention_layernorm


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9, 16, 64, 130])
@pytest.mark.parametrize("outputs", [24, 150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_the_plain_one_for_any_number_of_rows(rows: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias, states = (torch.randn(*shape).to(dtype) for shape in ((outputs, 85), (outputs,), (rows, 85)))
    exact = states.double() @ weight.double().T + bias.double()
    found = fused.Linear(weight, bias, kernels_of(dtype))(states)
    assert found.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert bool(((found.double() - exact).abs() <= rounding * exact.abs() + 1e-4).all())


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_long_bfloat16_pass_is_rounded_once_where_the_processor_has_no_such_products(
    with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    weight, bias, states = (torch.randn(*shape).bfloat16() for shape in ((24, 21), (24,), (65, 21)))
    exact = states.double() @ weight.double().T + (bias.double() if with_bias else 0)
    found = fused.Linear(weight, bias if with_bias else None, kernels_of(torch.bfloat16))(states)
    assert found.dtype == torch.bfloat16
    assert bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all())


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_a_row_of_a_product_is_the_same_to_the_bit_at_every_width(dtype: torch.dtype) -> None:
    weight, states = torch.randn(150, 85).to(dtype), torch.randn(native.MAX_ROWS, 85).to(dtype)
    product = fused.Linear(weight, None, kernels_of(dtype))
    single = torch.cat([product(row[None]) for row in states])
    for rows in range(1, native.MAX_ROWS + 1):
        assert torch.equal(product(states[:rows]), single[:rows])


@pytest.mark.parametrize("rows", [2, 5, 9, 17])
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_the_layers_give_the_states_of_single_steps_to_the_bit(rows: int, dtype: torch.dtype) -> None:
    target, prompt, tokens = make_target(engine="compiled", dtype=dtype), ids(12), torch.tensor(ids(rows, seed=1))
    wide, narrow = (prefilled(target, prompt, 40) for _ in range(2))
    together = forward(target, tokens, Span.causal(12, rows), wide, keep_hidden=True).hidden
    singly = [
        forward(target, tokens[i, None], Span.causal(12 + i, 1), narrow, keep_hidden=True).hidden for i in range(rows)
    ]
    assert together is not None
    for layer, states in enumerate(together):
        assert torch.equal(states, torch.cat([step[layer] for step in singly if step is not None]))


def test_a_trial_behind_a_full_cache_gives_the_eager_engines_logits() -> None:
    prompt, tokens, span = ids(12), torch.tensor(ids(3)), Span.trial(12, 3)
    targets = [make_target(engine=engine) for engine in ("compiled", "eager")]
    found, wanted = (forward(each, tokens, span, prefilled(each, prompt, 12)).logits for each in targets)
    assert distance(found, wanted) < 1e-5


def kernels_of(dtype: torch.dtype) -> native.Kernels | None:
    return native.Kernels(native.build(), dtype) if dtype in native.DTYPES else None


def test_what_is_not_plain_stays_as_it_is() -> None:
    class Int8(nn.Linear):
        """Stands for a quantised module."""

    odd, hooked = Int8(4, 4), nn.Linear(4, 4)
    hooked._hf_hook = object()
    fuser = fused.Fuser(random_model(llama_config(), seed=0))
    assert fuser.product_of(odd) is odd
    assert fuser.product_of(hooked) is hooked
    assert isinstance(fuser.product_of(nn.Linear(4, 4)), fused.Linear)


def test_a_missing_compiler_is_one_line_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"'no-such-compiler' is not there; .* CXX, or use engine=eager"):
        make_target(engine="compiled")


def test_a_failing_compiler_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"false cannot compile kernels\.cpp: exit 1; .* use engine=eager"):
        make_target(engine="compiled")
    assert not list(tmp_path.rglob("*.so"))


def test_of_what_a_compiler_says_the_error_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'In file included from x' >&2\necho 'x:1: error: not C++' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"kernels\.cpp: x:1: error: not C\+\+; name another one in CXX"):
        native.build()


def test_what_is_no_command_in_cxx_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", '"')
    with pytest.raises(UserError, match=r"""CXX is '"', which is no command \(No closing quotation\)"""):
        native.build()


def test_kernels_that_are_there_need_no_compiler_and_damaged_ones_are_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "  ")  # blank, as if it were not set
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.build()
    (path,) = tmp_path.rglob("*.so")
    with monkeypatch.context() as patch:
        patch.setattr(native.shutil, "which", lambda name: None)
        native.build()
    whole = path.stat().st_size
    damaged = path.with_name("damaged.so")
    damaged.write_bytes(b"")
    path.unlink()
    damaged.rename(path)
    load, given = native.ctypes.CDLL, iter([str(damaged)])  # once not by the name that the process holds already
    monkeypatch.setattr(native.ctypes, "CDLL", lambda name: load(next(given, name)))
    native.build()
    assert path.stat().st_size == whole


def test_no_rows_are_no_fault() -> None:
    for dtype in native.DTYPES:
        product = fused.Linear(torch.randn(40, 21).to(dtype), None, kernels_of(dtype))
        assert product(torch.randn(0, 21).to(dtype)).shape == (0, 40)


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="engine is 'fast'; it must be one of eager, compiled"):
        make_target(engine="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_the_norm_is_the_rms_norm_at_every_size_of_states(scale: float) -> None:
    """Where states are tiny, eps decides."""
    norm = random_model(llama_config(), seed=0).model.norm
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        states = scale * torch.randn(5, norm.weight.numel())
        assert distance(fused.fast_norm(norm)(states) / norm(states), torch.ones_like(states)) < 1e-5
