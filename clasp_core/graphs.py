"""CUDA graphs: a sub-layer over few rows is recorded once and then replayed, so that nothing waits for the host.

A recording works on buffers that stay where they are. The states of T rows go in and the sub-layer's update comes out;
the rows' slots, angles and view of the cache are buffers too, filled once for each pass. So any skip set is a choice of
what is replayed, and another one needs no new recording. There is one for each layer, sub-layer and number of rows,
made at its first use, and none while a clock runs: what is not recorded then is computed call by call.

The cache is the same memory in every turn, and attention reads all of it: what a row may not see is masked. That costs
the bytes of the cache's unused part, and spares a recording for every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from clasp_core.attention import Span, over_cache, prefix_and_self
from clasp_core.blocks import Angles, Block, InSteps, Rotary
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache

MAX_ROWS = 64
"""A pass over more rows is bound by its arithmetic."""

PREPARED_ROWS = 17
"""Rows of a pass up to which `TargetModel.prepare` records: a draft of 16 tokens and the token before it."""

ROOM = 256
"""The cache's capacity is a multiple of it, so that a slightly longer prompt needs no new recordings."""

Key: TypeAlias = tuple[int, str, int]
"""A layer, what is recorded of it, and the number of rows."""


class RecordingFailed(UserError):
    """The device refused to record a sub-layer."""


class Recorder(Protocol):
    """Turns work on buffers into something that does it again."""

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """`work` may be run meanwhile; its result counts from the first replay on."""


class CudaRecorder:
    """Records as CUDA graphs. Those of one device share a memory pool: what they keep lies in buffers outside it."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, tuple[Any, Any]] = {}
        self._latest: dict[torch.device, Any] = {}

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """See `Recorder`. Run once before, off the main stream, where libraries choose their kernels.

        All is recorded on one stream, since memory is shared within a stream only. The products' workspace is let go of
        before and after, as torch does, so that a graph has one in its own pool. The latest graph is kept, since a pool
        cannot be used again once it has none.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            if device not in self._lanes:
                stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._lanes[device] = stream, torch.cuda.graph_pool_handle()
            aside, pool = self._lanes[device]
            current = torch.cuda.current_stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                work()
                torch._C._cuda_clearCublasWorkspaces()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
                    torch._C._cuda_clearCublasWorkspaces()
            current.wait_stream(aside)
        self._latest[device] = graph
        replay: Callable[[], None] = graph.replay
        return replay


def recorder_for(devices: Sequence[torch.device]) -> Recorder | None:
    """How sub-layers on these devices are recorded; None where they are not all on NVIDIA GPUs."""
    return CudaRecorder() if all(device.type == "cuda" for device in devices) and torch.version.cuda else None


class Stage:
    """The buffers of all passes over T rows on one device."""

    def __init__(self, like: Tensor, capacity: int, num_groups: int, head_width: int):
        rows = like.shape[0]
        self.hidden = torch.zeros_like(like)
        """States `T d` that a sub-layer starts from."""
        self.update = torch.zeros_like(like)
        """What it adds to them."""
        self.slots = torch.zeros(rows, dtype=torch.int64, device=like.device)
        self.bias = like.new_zeros(num_groups * rows, capacity)
        """What the G query heads of a key-value head see of the cache: `(G T) capacity`, 0 or minus infinity."""
        self.angles: Angles = (like.new_zeros(rows, 1, head_width), like.new_zeros(rows, 1, head_width))
        self._num_groups = num_groups
        self._span: Span | None = None

    def fill(self, span: Span, rotary: Rotary) -> None:
        """Slots, angles and view of a pass's rows, once for the pass."""
        if self._span is span:
            return
        device = self.hidden.device
        self.slots.copy_(torch.arange(span.start, span.stop, device=device))
        for buffer, angles in zip(self.angles, rotary.of(span, device), strict=True):
            buffer.copy_(angles)
        self.bias.fill_(float("-inf"))
        if span.alone:
            self.bias[:, : span.start] = 0
        else:
            self.bias[:, : span.stop] = span.bias(self.hidden, self._num_groups)
        self._span = span


class Graphs:
    """The recordings of one model, and the memory that they work on."""

    def __init__(
        self, record: Recorder, allocate: Callable[[int], KVCache], rotary: Rotary, num_groups: int, head_width: int
    ):
        self._record = record
        self._allocate = allocate
        self._rotary = rotary
        self._num_groups = num_groups
        self._head_width = head_width
        self._memory: KVCache | None = None
        self._lent: KVCache | None = None
        self.is_open = True
        """Whether what is not recorded yet may be."""
        self._stages: dict[tuple[torch.device, int], Stage] = {}
        self._recorded: dict[Key, Callable[[], None]] = {}

    def resize(self, capacity: int) -> None:
        """Let go of memory of another size, and with it of the recordings, so that a run is as fast as on its own."""
        if self._memory is not None and self._memory.capacity != _rounded(capacity):
            self._forget()

    def _forget(self) -> None:
        self._stages, self._recorded, self._memory = {}, {}, None

    @torch.inference_mode(False)
    def cache(self, capacity: int) -> KVCache:
        """An empty cache in the memory that recordings read. The one that was given before is retired.

        One that needs more memory than there is lets go of all recordings, or, where none may be made, has its own.
        """
        if self._lent is not None:
            self._lent.retire()
            self._lent = None
        if not self.is_open and (self._memory is None or self._memory.capacity < capacity):
            return self._allocate(capacity)
        if self._memory is None or self._memory.capacity < capacity:
            self._forget()
            self._memory = self._allocate(_rounded(capacity))
        self._lent = self._memory.renewed()
        return self._lent

    def serves(self, cache: KVCache) -> bool:
        """Whether recordings work on this cache."""
        return cache is self._lent

    def has(self, key: Key) -> bool:
        """Whether this is recorded, or may be."""
        return self.is_open or key in self._recorded

    def stage(self, hidden: Tensor, span: Span | None = None) -> Stage:
        """The buffers for states `T d` like these, made at the first call and told where the rows of a pass sit."""
        key = (hidden.device, hidden.shape[0])
        if key not in self._stages:
            self._stages[key] = self._new_stage(hidden)
        if span is not None:
            self._stages[key].fill(span, self._rotary)
        return self._stages[key]

    @torch.inference_mode(False)
    def _new_stage(self, hidden: Tensor) -> Stage:
        capacity = self._memory.capacity if self._memory is not None else 0
        like = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        return Stage(like, capacity, self._num_groups, self._head_width)

    def replay(self, key: Key, stage: Stage, hidden: Tensor, work: Callable[[], Callable[[], None]]) -> Tensor:
        """States `T d` with the update added that a recording leaves in the stage; `work` gives what to record."""
        stage.hidden.copy_(hidden)
        if key not in self._recorded:
            try:
                self._recorded[key] = self._record(work(), hidden.device)
            except RuntimeError as error:  # torch's errors of a device
                why = str(error).partition("\n")[0]
                raise RecordingFailed(f"a sub-layer cannot be recorded ({why}); use engine=eager") from error
        self._recorded[key]()
        return hidden + stage.update


def _rounded(capacity: int) -> int:
    return -(-capacity // ROOM) * ROOM


class GraphedBlock(InSteps):
    """A layer whose sub-layers are replayed where rows are few and the cache is the recordings' own.

    `plain_mlp`: the MLP runs the same operations for all rows, as a mixture of experts does not.
    """

    def __init__(self, graphs: Graphs, block: Block, plain_mlp: bool):
        self.block = block
        self._graphs = graphs
        self._plain_mlp = plain_mlp

    def attention(self, hidden: Tensor, span: Span, cache: KVCache) -> Tensor:
        """See `InSteps`. Rows that see one another and write nothing (trials) are not recorded."""
        run = _alone if span.alone else _written
        key = (self.block.index, run.__name__, span.length)
        is_kind = (span.write or span.alone) and span.length <= MAX_ROWS
        if not (is_kind and self._graphs.serves(cache) and self._graphs.has(key)):
            return self.block.attention(hidden, span, cache)
        if span.write:
            cache.check_room(span.start, span.length)
        stage = self._graphs.stage(hidden, span)
        return self._graphs.replay(
            key, stage, hidden, lambda: partial(run, self.block, stage, *cache.read(key[0], cache.capacity))
        )

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """See `InSteps`."""
        key = (self.block.index, _feed_forward.__name__, hidden.shape[0])
        if hidden.shape[0] > MAX_ROWS or not self._plain_mlp or not self._graphs.has(key):
            return self.block.feed_forward(hidden)
        stage = self._graphs.stage(hidden)
        return self._graphs.replay(key, stage, hidden, lambda: partial(_feed_forward, self.block, stage))


def _projected(block: Block, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
    return block.project(block.attn_norm(stage.hidden), stage.angles if block.rotary is not None else None)


def _written(block: Block, stage: Stage, keys: Tensor, values: Tensor) -> None:
    """Attention of rows that go into the cache's `H capacity D` keys and values first."""
    queries, own_keys, own_values = _projected(block, stage)
    keys.index_copy_(1, stage.slots, own_keys.transpose(0, 1))
    values.index_copy_(1, stage.slots, own_values.transpose(0, 1))
    out = over_cache(queries, keys, values, stage.bias, block.scale)
    stage.update.copy_(block.out_proj(out.reshape(len(out), -1)))


def _alone(block: Block, stage: Stage, keys: Tensor, values: Tensor) -> None:
    """Attention of rows that see what is before them and themselves."""
    out = prefix_and_self(*_projected(block, stage), keys, values, block.scale, stage.bias)
    stage.update.copy_(block.out_proj(out.reshape(len(out), -1)))


def _feed_forward(block: Block, stage: Stage) -> None:
    stage.update.copy_(block.mlp(block.mlp_norm(stage.hidden)))
