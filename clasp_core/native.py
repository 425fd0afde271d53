"""The fast engine on a CPU: whole layers by the compiled kernels of `kernels.cpp`.

torch's own products either read the weights at full speed for one row only, or want a second, packed copy of them, and
each of the forty small calls around them costs more than its arithmetic. One compiled call for each layer has neither
fault. The kernels are built once for each processor, source and compiler, by the machine's C++ compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clasp_core.attention import Span
from clasp_core.blocks import Block, Rotary
from clasp_core.errors import UserError
from clasp_core.kv_cache import KVCache

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
DTYPES = (torch.float32, torch.bfloat16)
MAX_ROWS = 64
"""A pass over more rows is bound by arithmetic, where torch's own products are the faster ones."""


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "qkv", "qkv_bias", "out", "out_bias")),
        *((name, ctypes.c_int64) for name in ("d", "num_queries", "num_keys", "width")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _FeedForward(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "gate_up", "gate_up_bias", "down", "down_bias")),
        *((name, ctypes.c_int64) for name in ("d", "inner")),
        ("eps", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "visible", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num", "start", "write", "alone")),
    )


class Kernels:
    """The kernels of one dtype, from a library that `build` made."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype):
        name = str(dtype).removeprefix("torch.")
        address, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.layer = library[f"layer_{name}"]
        self.layer.argtypes = (address, address, address, address, address, number, address, address, threads)
        self._linear = library[f"linear_{name}"]
        self._linear.argtypes = (address, address, address, address, number, number, number, threads)
        for kernel in (self.layer, self._linear):
            kernel.restype = None

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x W^T + b` for rows `T d_in`, weights `d_out d_in`: `T d_out`."""
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        self._linear(
            rows.data_ptr(), weight.data_ptr(), _address(bias), out.data_ptr(), *rows.shape, weight.shape[0],
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def multiplies_bfloat16() -> bool:
    """Whether the processor has products of bfloat16; torch's are slower than its float32 ones where it has not."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.13 on
    x86 = capabilities.get("architecture") == "x86_64"
    return not x86 or any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def build() -> ctypes.CDLL:
    """The compiled kernels, from the user's cache folder where this source was compiled for this processor before.

    Without a C++ compiler that knows OpenMP it is a `UserError`. `CXX` names another compiler than `c++`.
    """
    compiler = _compiler()
    made_of = (SOURCE.read_text(encoding="utf-8"), *compiler, *FLAGS, _processor())
    path = _folder() / f"kernels-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}.so"
    if path.is_file():
        with suppress(OSError):  # a damaged file is made again
            return ctypes.CDLL(str(path))
    _compile([*compiler, *FLAGS, str(SOURCE)], path)
    return ctypes.CDLL(str(path))


def _compiler() -> list[str]:
    """The words of `CXX`, or `c++`."""
    named = os.environ.get("CXX", "")
    try:
        return shlex.split(named) or ["c++"]
    except ValueError as error:
        raise UserError(f"CXX is {named!r}, which is no command ({error}); name a C++ compiler in it") from None


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler into a temporary file that takes the name at once, so that runs beside each other may build."""
    if shutil.which(command[0]) is None:
        raise UserError(
            f"engine=compiled needs a C++ compiler on a CPU and {command[0]!r} is not there; install g++, name "
            "another one in CXX, or use engine=eager"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(dir=path.parent, suffix=".so")
    except OSError as error:
        raise UserError(
            f"cannot write {path.parent} ({error.strerror}); set XDG_CACHE_HOME or use engine=eager"
        ) from None
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
            reason = next((line for line in lines if "error" in line), lines[0])
            raise UserError(
                f"{command[0]} cannot compile {SOURCE.name}: {reason}; name another one in CXX or use engine=eager"
            )
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clasp-bench"


def _processor() -> str:
    """What `-march=native` may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model", "flags", "Features", "CPU part"))}))


class NativeBlock:
    """A layer of plain weights: one kernel call where rows are few, and `block`'s two sub-layers where not.

    `qkv` and `gate_up` are the fused weights and biases; `layer` holds the others.
    """

    def __init__(self, kernels: Kernels, block: Block, layer: Any, qkv: Weights, gate_up: Weights):
        attn, mlp = layer.self_attn, layer.mlp
        attn_norm, mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._kernels = kernels
        self._block = block
        self._held = (layer, qkv, gate_up)  # the structures below know addresses only
        attention = _Attention(
            norm=_address(attn_norm.weight), eps=attn_norm.variance_epsilon, scale=block.scale,
            qkv=_address(qkv[0]), qkv_bias=_address(qkv[1]),
            out=_address(attn.o_proj.weight), out_bias=_address(attn.o_proj.bias), d=attn.o_proj.out_features,
            num_queries=attn.q_proj.out_features // attn.head_dim,
            num_keys=attn.k_proj.out_features // attn.head_dim, width=attn.head_dim,
        )  # fmt: skip
        feed_forward = _FeedForward(
            norm=_address(mlp_norm.weight), eps=mlp_norm.variance_epsilon,
            gate_up=_address(gate_up[0]), gate_up_bias=_address(gate_up[1]),
            down=_address(mlp.down_proj.weight), down_bias=_address(mlp.down_proj.bias),
            d=mlp.down_proj.out_features, inner=mlp.down_proj.in_features,
        )  # fmt: skip
        self._attention, self._feed_forward = ctypes.byref(attention), ctypes.byref(feed_forward)

    def run(
        self, hidden: Tensor, span: Span, cache: KVCache, *, skip_attn: bool = False, skip_mlp: bool = False
    ) -> Tensor:
        """See `Layer`."""
        if span.length > MAX_ROWS:
            return self._block.run(hidden, span, cache, skip_attn=skip_attn, skip_mlp=skip_mlp)
        if skip_attn and skip_mlp:
            return hidden
        if not skip_attn:
            cache.check_room(span.start, span.length if span.write else 0)
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self._kernels.layer(
            None if skip_attn else self._attention, None if skip_mlp else self._feed_forward, self._rows(span),
            *cache.addresses[self._block.index], cache.capacity, hidden.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _rows(self, span: Span) -> Any:
        """The address of the span as the kernel wants it, made once for all layers of one kind."""
        rotary = self._block.rotary
        rows, _ = span.once(("native", rotary is not None), lambda: _as_structure(span, rotary))
        return rows


Weights = tuple[Tensor, Tensor | None]
"""A fused product's weight `d_out d_in` and bias."""


def _as_structure(span: Span, rotary: Rotary | None) -> tuple[Any, tuple[Tensor | None, ...]]:
    """With the tensors whose addresses it holds."""
    cpu = torch.device("cpu")
    cos, sin = rotary.table(span.last_position + 1, cpu) if rotary is not None else (None, None)
    positions = span.positions(cpu)
    visible = span.visible.contiguous() if span.visible is not None else None
    rows = _Rows(
        positions=_address(positions), visible=_address(visible), cos=_address(cos), sin=_address(sin),
        num=span.length, start=span.start, write=span.write, alone=span.alone,
    )  # fmt: skip
    return ctypes.byref(rows), (positions, visible, cos, sin)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
