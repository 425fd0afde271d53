"""Which sub-layers a draft leaves out: a frozen pair of bit tuples, and its compact code for rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from clasp_core.errors import UserError


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """A skip set over L layers; `attn[i]` or `mlp[i]` true means that sub-layer i is bypassed.

    Skipping a whole layer (CLaSp, LayerSkip) sets both bits; Self-SD and SWIFT set them apart.
    """

    attn: tuple[bool, ...]
    mlp: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.attn) != len(self.mlp):
            raise ValueError(f"{len(self.attn)} attention bits but {len(self.mlp)} MLP bits")

    @classmethod
    def none(cls, num_layers: int) -> LayerSkip:
        """The empty skip set: the draft is the target."""
        return cls((False,) * num_layers, (False,) * num_layers)

    @classmethod
    def layers(cls, num_layers: int, skipped: Iterable[int]) -> LayerSkip:
        """Whole layers by index."""
        indices = tuple(skipped)
        return cls.sublayers(num_layers, attn=indices, mlp=indices)

    @classmethod
    def sublayers(cls, num_layers: int, *, attn: Iterable[int], mlp: Iterable[int]) -> LayerSkip:
        """Attention and MLP sub-layers by index. An index outside the model is an error, never ignored."""
        return cls(_bits(num_layers, attn), _bits(num_layers, mlp))

    @property
    def num_layers(self) -> int:
        """L, kept and skipped together."""
        return len(self.attn)

    @property
    def num_skipped_sublayers(self) -> int:
        """Skipped attention plus skipped MLP sub-layers; a whole layer counts two."""
        return sum(self.attn) + sum(self.mlp)

    @property
    def skipped_attn(self) -> tuple[int, ...]:
        """Indices of skipped attention sub-layers, ascending."""
        return tuple(i for i, bit in enumerate(self.attn) if bit)

    @property
    def skipped_mlp(self) -> tuple[int, ...]:
        """Indices of skipped MLP sub-layers, ascending."""
        return tuple(i for i, bit in enumerate(self.mlp) if bit)

    @property
    def code(self) -> str:
        """`L:attention:mlp`, the two bit sets as hexadecimal with layer i at bit i. Inverse: `decode`."""
        return f"{self.num_layers}:{_hex(self.attn)}:{_hex(self.mlp)}"

    @classmethod
    def decode(cls, code: str) -> LayerSkip:
        """The skip set of a stored code."""
        length, attn, mlp = code.split(":")
        return cls(_unhex(int(length), attn), _unhex(int(length), mlp))


def _bits(num_layers: int, indices: Iterable[int]) -> tuple[bool, ...]:
    chosen = set(indices)
    outside = sorted(i for i in chosen if not 0 <= i < num_layers)
    if outside:
        raise UserError(f"skip set names layer {outside[0]}, but the model has layers 0..{num_layers - 1}")
    return tuple(i in chosen for i in range(num_layers))


def _hex(bits: tuple[bool, ...]) -> str:
    return f"{sum(1 << i for i, bit in enumerate(bits) if bit):x}"


def _unhex(length: int, digits: str) -> tuple[bool, ...]:
    value = int(digits, 16)
    if value >> length:
        raise ValueError(f"code {digits!r} has bits beyond layer {length - 1}")
    return tuple(bool(value >> i & 1) for i in range(length))
