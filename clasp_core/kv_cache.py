"""Preallocated keys and values. Positions are arguments: there is no length, no crop and no clone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values `H capacity D` of every layer, each on its layer's device.

    What lies beyond the committed prefix is scratch: a draft writes there, verification overwrites it in
    every layer, and nobody reads past the slot that a caller names. So a rejected draft needs no rollback. (Recorded
    passes do read all slots, and give those past it no weight: what lies there must be finite, as zeros are.)
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]):
        self._keys = list(keys)
        self._values = list(values)
        self.addresses = tuple((k.data_ptr(), v.data_ptr()) for k, v in zip(keys, values, strict=True))
        """Where each layer's keys and values lie, `H capacity D` without gaps; for kernels that take no tensors."""

    @classmethod
    def allocate(
        cls, devices: Sequence[torch.device], *, num_heads: int, width: int, capacity: int, dtype: torch.dtype
    ) -> KVCache:
        """Room for `capacity` tokens in each of `len(devices)` layers. Size it by prompt and budget."""

        def room(device: torch.device) -> Tensor:
            return torch.zeros(num_heads, capacity, width, dtype=dtype, device=device)

        return cls([room(device) for device in devices], [room(device) for device in devices])

    @property
    def capacity(self) -> int:
        """How many tokens fit."""
        return self._keys[0].shape[1]

    @property
    def num_layers(self) -> int:
        """How many layers have room here."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values together."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def renewed(self) -> KVCache:
        """An empty cache in the same memory. Retire this one, or never use it again."""
        for store in (*self._keys, *self._values):
            store.zero_()
        return KVCache(self._keys, self._values)

    def retire(self) -> None:
        """Let go of the memory; any later use is an IndexError."""
        self._keys, self._values = [], []

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Store `T H D` keys and values of one layer at slots `start .. start + T - 1`."""
        self.check_room(start, keys.shape[0])
        stop = start + keys.shape[0]
        self._keys[layer][:, start:stop] = keys.transpose(0, 1)
        self._values[layer][:, start:stop] = values.transpose(0, 1)

    def check_room(self, start: int, num: int) -> None:
        """Raise IndexError where `num` slots from `start` on are not all there."""
        if start + num > self.capacity:
            raise IndexError(f"slots {start}..{start + num - 1} are beyond the cache's {self.capacity}")

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views `H stop D` of one layer's keys and values at slots `0 .. stop - 1`."""
        return self._keys[layer][:, :stop], self._values[layer][:, :stop]

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Move the rows `start + path[i]` to `start + i` in every layer (the accepted path of a tree).

        `path` ascends, so a gather before the write is safe; a chain's path 0, 1, 2, ... moves nothing.
        """
        if list(path) == list(range(len(path))):
            return
        for store in (*self._keys, *self._values):
            rows = torch.tensor([start + row for row in path], device=store.device)
            store[:, start : start + len(path)] = store[:, rows]
