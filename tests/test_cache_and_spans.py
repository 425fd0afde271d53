"""Slots, positions and views: what rows see, what they write, and what an accepted path leaves behind."""

from __future__ import annotations

import pytest
import torch
from conftest import distance, ids, make_target, prefilled
from torch import Tensor

from clasp_core.attention import Span, attend
from clasp_core.kv_cache import KVCache
from clasp_core.skip import LayerSkip
from clasp_core.target import TargetModel, forward

CPU = torch.device("cpu")
EXACT = 1e-6
"""In float64, where Hugging Face's norms still round to float32."""


def small_cache(capacity: int = 8, layers: int = 2) -> KVCache:
    return KVCache.allocate([CPU] * layers, num_heads=2, width=4, capacity=capacity, dtype=torch.float32)


def rows(num: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values `T H D`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, 4, generator=rng), torch.randn(num, 2, 4, generator=rng)


def contents(cache: KVCache, stop: int) -> list[Tensor]:
    """Copies of the keys and values of every layer."""
    return [half.clone() for layer in range(cache.num_layers) for half in cache.read(layer, stop)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- the cache


def test_what_is_written_is_read_and_nothing_else_changes() -> None:
    cache = small_cache()
    keys, values = rows(3)
    cache.write(1, 2, keys, values)
    read_keys, read_values = cache.read(1, 5)
    assert torch.equal(read_keys[:, 2:5], keys.transpose(0, 1))
    assert torch.equal(read_values[:, 2:5], values.transpose(0, 1))
    assert not read_keys[:, :2].any()
    assert not cache.read(1, 8)[0][:, 5:].any()
    assert not any(half.any() for half in cache.read(0, 8))


def test_a_later_write_replaces_an_earlier_one() -> None:
    cache = small_cache()
    cache.write(0, 0, *rows(4, seed=1))
    keys, values = rows(2, seed=2)
    cache.write(0, 1, keys, values)
    assert torch.equal(cache.read(0, 3)[0][:, 1:], keys.transpose(0, 1))
    assert torch.equal(cache.read(0, 4)[1][:, 3], rows(4, seed=1)[1][3])


def test_reading_is_a_view_of_the_length_asked_for() -> None:
    cache = small_cache()
    assert cache.read(0, 3)[0].shape == (2, 3, 4)
    assert cache.read(0, 3)[0].data_ptr() == cache.read(0, 8)[0].data_ptr()
    assert cache.read(0, 0)[1].shape == (2, 0, 4)


@pytest.mark.parametrize(("start", "num"), [(8, 1), (7, 2), (0, 9), (20, 1)])
def test_writes_beyond_the_capacity_are_refused(start: int, num: int) -> None:
    cache = small_cache(8)
    before = contents(cache, 8)
    with pytest.raises(IndexError, match="beyond the cache's 8"):
        cache.write(0, start, *rows(num))
    assert same(before, contents(cache, 8))


def test_the_last_slot_can_be_written() -> None:
    cache = small_cache(8)
    cache.write(0, 5, *rows(3))
    assert cache.read(0, 8)[0][:, 7].any()


@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2), (0, 2, 5), (0, 3, 4), (0, 1, 2, 3, 4, 5)])
def test_keep_moves_the_rows_of_a_path_together(path: tuple[int, ...]) -> None:
    cache = small_cache(10)
    for layer in range(2):
        cache.write(layer, 0, *rows(10, seed=layer))
    before = contents(cache, 10)
    cache.keep(3, path)
    for old, new in zip(before, contents(cache, 10), strict=True):
        assert torch.equal(new[:, :3], old[:, :3])
        for place, row in enumerate(path):
            assert torch.equal(new[:, 3 + place], old[:, 3 + row])
        assert torch.equal(new[:, 3 + len(path) :], old[:, 3 + len(path) :])


def test_an_accepted_tree_path_equals_a_fresh_cache(tiny_target64: TargetModel) -> None:
    """After `keep`, keys and values are those of a full forward over the committed tokens."""
    target = tiny_target64
    prompt, tree = ids(9, seed=4), ids(6, seed=5)
    parents = (0, 0, 1, 1, 3)  # rows: 0 root, 1 and 2 under it, 3 and 4 under 1, 5 under 3
    cache = target.new_cache(16)
    forward(target, torch.tensor(prompt), Span.causal(0, 9), cache)
    forward(target, torch.tensor(tree), Span.tree(9, parents), cache)
    for path in ((0, 1, 3, 5), (0, 1, 4), (0, 2), (0,)):
        kept = target.new_cache(16)
        forward(target, torch.tensor(prompt), Span.causal(0, 9), kept)
        forward(target, torch.tensor(tree), Span.tree(9, parents), kept)
        kept.keep(9, path)
        fresh = prefilled(target, [*prompt, *(tree[row] for row in path)])
        stop = 9 + len(path)
        assert max(map(distance, contents(kept, stop), contents(fresh, stop))) < EXACT


def test_a_partly_skipped_draft_leaves_nothing_behind_a_full_pass(tiny_target64: TargetModel) -> None:
    """Verification overwrites the draft's keys in every layer, kept or skipped."""
    target = tiny_target64
    tokens = ids(14, seed=6)
    cache = prefilled(target, tokens[:9], 14)
    skip = LayerSkip.sublayers(8, attn=[0, 3, 7], mlp=[2, 3])
    for at in range(9, 14):
        forward(target, torch.tensor([(tokens[at] + 1) % 64]), Span.causal(at, 1), cache, skip=skip)
    forward(target, torch.tensor(tokens[9:]), Span.causal(9, 5), cache)
    assert max(map(distance, contents(cache, 14), contents(prefilled(target, tokens), 14))) < EXACT


def test_capacity_and_memory_do_not_follow_max_position_embeddings() -> None:
    """P65: sized by what the caller asks for, and so is the table of angles."""
    small, huge = make_target(layers=2), make_target(layers=2, max_position_embeddings=1_000_000)
    sizes = []
    for target in (small, huge):
        cache = prefilled(target, ids(12), 20)
        assert cache.capacity == 20
        sizes.append((cache.num_bytes, [cos.numel() for cos, _ in target.rotary._tables.values()]))
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == 2 * 2 * (2 * 20 * 8) * 4
    assert sizes[0][1] == [256 * 8]


def test_each_layer_has_room_of_its_own() -> None:
    cache = small_cache(4, layers=3)
    assert cache.num_layers == 3
    assert cache.num_bytes == 3 * 2 * (2 * 4 * 4) * 4
    assert len({half.data_ptr() for layer in range(3) for half in cache.read(layer, 4)}) == 6


# ---- spans by hand


def test_causal_span_by_hand() -> None:
    span = Span.causal(2, 3)
    assert (span.stop, span.last_position) == (5, 4)
    assert span.positions(CPU).tolist() == [2, 3, 4]
    assert span.mask(CPU).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert span.write


def test_tree_span_by_hand() -> None:
    span = Span.tree(2, (0, 0, 1))
    assert (span.length, span.stop, span.last_position) == (4, 6, 4)
    assert span.positions(CPU).tolist() == [2, 3, 3, 4]
    assert span.mask(CPU).int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]


def test_siblings_span_by_hand() -> None:
    span = Span.siblings(5, 3)
    assert not span.write
    assert span.positions(CPU).tolist() == [5, 5, 5]
    assert span.last_position == 5


def test_a_chain_written_as_a_tree_is_causal() -> None:
    chain, tree = Span.causal(3, 4), Span.tree(3, (0, 1, 2))
    assert torch.equal(chain.mask(CPU), tree.mask(CPU))
    assert torch.equal(chain.positions(CPU), tree.positions(CPU))


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,), (0, 0, 3)])
def test_a_child_before_its_parent_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parents come first"):
        Span.tree(0, parents)


def test_masks_are_made_once_per_device() -> None:
    span = Span.tree(1, (0, 0))
    assert span.mask(CPU) is span.mask(CPU)
    assert span.mask(CPU) is not Span.tree(1, (0, 0)).mask(CPU)
    assert span.mask(torch.device("meta")).device.type == "meta"


# ---- attention against the plain formula


@pytest.mark.parametrize("span", [Span.causal(0, 5), Span.causal(4, 1), Span.causal(4, 3), Span.tree(4, (0, 0, 1, 2))])
@pytest.mark.parametrize("num_heads", [2, 4, 6])
def test_attention_equals_the_plain_formula(span: Span, num_heads: int) -> None:
    """Row by row and head by head, with query heads h*G .. h*G+G-1 on key-value head h."""
    rng = torch.Generator().manual_seed(1)
    size, scale, group = span.length, 0.3, num_heads // 2
    cache = KVCache.allocate([CPU], num_heads=2, width=4, capacity=12, dtype=torch.float64)

    def noise(heads: int, num: int = size) -> Tensor:
        return torch.randn(num, heads, 4, generator=rng, dtype=torch.float64)

    if span.start:
        cache.write(0, 0, noise(2, span.start), noise(2, span.start))
    queries, keys, values = noise(num_heads), noise(2), noise(2)
    out = attend(queries, keys, values, span, cache, layer=0, scale=scale)
    seen_keys, seen_values = cache.read(0, span.stop)
    assert torch.equal(seen_keys[:, span.start :], keys.transpose(0, 1))
    for row in range(size):
        for head in range(num_heads):
            view = span.mask(CPU)[row]
            scores = seen_keys[head // group][view] @ queries[row, head] * scale
            expected = scores.softmax(0) @ seen_values[head // group][view]
            assert distance(out[row, head], expected) < 1e-12


# ---- a tree is its paths, siblings are their own calls


def paths_of(parents: tuple[int, ...]) -> list[list[int]]:
    """Every row's way from the root."""
    ways = [[0]]
    for row, parent in enumerate(parents, start=1):
        ways.append([*ways[parent], row])
    return ways


@pytest.mark.parametrize(
    "parents", [(0,), (0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1, 2, 4, 4), (0, 0, 1, 0, 3, 5, 5, 6), (0, 1, 0, 2, 4, 1)]
)
@pytest.mark.parametrize("start", [0, 7])
def test_a_tree_equals_each_of_its_paths_as_a_chain(
    tiny_target64: TargetModel, parents: tuple[int, ...], start: int
) -> None:
    target = tiny_target64
    prompt, tree = ids(start, seed=2), ids(len(parents) + 1, seed=3)
    capacity = start + len(tree)

    def after_prompt() -> KVCache:
        return prefilled(target, prompt, capacity) if start else target.new_cache(capacity)

    out = forward(target, torch.tensor(tree), Span.tree(start, parents), after_prompt(), keep_hidden=True)
    assert out.hidden is not None
    for way in paths_of(parents):
        tokens = torch.tensor([tree[row] for row in way])
        chain = forward(target, tokens, Span.causal(start, len(way)), after_prompt(), keep_hidden=True)
        assert chain.hidden is not None
        assert distance(out.logits[way], chain.logits) < EXACT
        assert max(distance(a[way], b) for a, b in zip(out.hidden, chain.hidden, strict=True)) < EXACT


def test_siblings_equal_a_call_for_each_state(tiny_target64: TargetModel) -> None:
    """Each state sees the prefix and itself, at the same position, whatever else is in the call."""
    target = tiny_target64
    cache = prefilled(target, ids(11, seed=1), 16)
    states = torch.randn(5, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for layer in range(target.num_layers):
        together = target.layer(layer, states, Span.siblings(7, 5), cache)
        for row in range(5):
            scratch = prefilled(target, ids(11, seed=1), 16)
            alone = target.layer(layer, states[row : row + 1], Span.causal(7, 1), scratch)
            assert distance(together[row], alone[0]) < 1e-6, "softmax of siblings is taken in float32"


@pytest.mark.parametrize("position", [0, 1, 6])
def test_siblings_do_not_see_what_lies_at_or_behind_their_position(tiny_target: TargetModel, position: int) -> None:
    """The cache holds the token's own full-model keys at `position`: reading them would be an off-by-one."""
    target = tiny_target
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    full = prefilled(target, ids(9, seed=1), 16)
    span = Span.siblings(position, 4)
    expected = target.layer(2, states, span, full)
    for slot in range(position, 16):
        full.write(2, slot, torch.full((1, 2, 8), 1e3), torch.full((1, 2, 8), -1e3))
    assert torch.equal(target.layer(2, states, span, full), expected)
    if position:
        full.write(2, position - 1, torch.full((1, 2, 8), 1e3), torch.full((1, 2, 8), -1e3))
        assert distance(target.layer(2, states, span, full), expected) > 0.01


def test_siblings_write_nothing(tiny_target: TargetModel) -> None:
    target = tiny_target
    cache = prefilled(target, ids(9, seed=1), 16)
    before = contents(cache, 16)
    states = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    for layer in range(target.num_layers):
        target.layer(layer, states, Span.siblings(8, 6), cache)
        target.layer(layer, states[:1], Span.siblings(8, 1), cache)
    assert same(before, contents(cache, 16))


def test_what_rows_see_behind_their_span_does_not_matter(tiny_target: TargetModel) -> None:
    """Rubbish in the scratch part, as a rejected draft leaves it, changes nothing."""
    target = tiny_target
    tokens = torch.tensor(ids(4, seed=9))
    outs = []
    for rubbish in (0.0, 1e3):
        cache = prefilled(target, ids(9, seed=1), 24)
        for layer in range(target.num_layers):
            cache.write(layer, 9, torch.full((15, 2, 8), rubbish), torch.full((15, 2, 8), rubbish))
        outs.append(
            [
                forward(target, tokens, span, cache).logits
                for span in (Span.causal(9, 4), Span.tree(9, (0, 0, 1)), Span.causal(9, 4))
            ]
        )
    assert same(outs[0], outs[1])
