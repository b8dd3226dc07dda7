"""`native.c` behind the kernels' contract, by ctypes: pointers in, nothing allocated there, the GIL released meanwhile.

A call costs about a microsecond, where a torch operator costs five; and attention reads FP8 pages where they lie,
instead of gathering and widening them first. For bfloat16 models on the CPU.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.local.attention import DecodeRows, Layout
from backends.local.kernels.protocol import Norm, Rotary
from backends.local.kv.pool import FP8, KVPool

LANES = 16
SPLIT = 256
"""Keys to a partial softmax; as in native.c."""
GROUP_MAX = 16
HEAD_MAX = 256

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "pg_norm": [_POINTER] * 4 + [_INTEGER] * 2 + [_FLOAT],
    "pg_gate": [_POINTER] * 2 + [_INTEGER] * 2,
    "pg_rotate_store": [_POINTER] * 7 + [_INTEGER] * 4,
    "pg_attend": [_POINTER] * 7 + [_INTEGER] * 7,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a model, as far as the kernels care."""

    dtype: torch.dtype
    hidden_size: int
    inner_size: int
    heads: int
    kv_heads: int
    head_size: int


def supports(shape: Shape) -> bool:
    """Is this one of the models that native.c is written for?"""
    return (
        shape.dtype == torch.bfloat16
        and all(size % LANES == 0 for size in (shape.hidden_size, shape.inner_size, shape.head_size))
        and shape.heads % shape.kv_heads == 0
        and shape.head_size <= HEAD_MAX
        and shape.heads // shape.kv_heads <= GROUP_MAX
    )


class NativeKernels:
    name = "native"

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, None
        self._norm, self._gate = loaded.pg_norm, loaded.pg_gate
        self._rotate_store, self._attend = loaded.pg_rotate_store, loaded.pg_attend
        self._scratch = torch.empty(0)

    def norm(self, rows: Tensor, norm: Norm, added: Tensor | None = None) -> Tensor:
        assert rows.is_contiguous()
        assert added is None or added.is_contiguous()
        out = torch.empty_like(rows)
        self._norm(
            out.data_ptr(), rows.data_ptr(), None if added is None else added.data_ptr(), norm.weight.data_ptr(),
            *rows.shape, norm.epsilon,
        )  # fmt: skip
        return out

    def gate(self, both: Tensor) -> Tensor:
        assert both.is_contiguous()
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        self._gate(out.data_ptr(), both.data_ptr(), *out.shape)
        return out

    def rotate_and_store(self, qkv: Tensor, rotary: Rotary, pool: KVPool, layer: int, layout: Layout) -> None:
        assert qkv.is_contiguous()
        positions, slots = layout.positions, layout.slots
        assert positions.dtype == slots.dtype == torch.int64
        heads = qkv.shape[1] // pool.head_size - 2 * pool.kv_heads
        self._rotate_store(
            qkv.data_ptr(), rotary.cosines.data_ptr(), rotary.sines.data_ptr(), positions.data_ptr(), slots.data_ptr(),
            *pool.addresses[layer], len(qkv), heads, pool.kv_heads, pool.head_size,
        )  # fmt: skip

    def attend(self, qkv: Tensor, pool: KVPool, layer: int, rows: DecodeRows) -> Tensor:
        assert pool.stored in {torch.bfloat16, FP8}
        size, kv_heads = pool.head_size, pool.kv_heads
        heads = qkv.shape[1] // size - 2 * kv_heads
        splits = -(-rows.longest // SPLIT)
        needed = rows.count * splits * heads * (size + 2)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(2 * needed)
        out = qkv.new_empty(rows.count, heads * size)
        self._attend(
            out.data_ptr(), qkv.data_ptr(), *pool.addresses[layer], rows.table.data_ptr(), rows.lengths.data_ptr(),
            self._scratch.data_ptr(), rows.count, rows.table.shape[1], splits, pool.page_size, heads, kv_heads, size,
        )  # fmt: skip
        return out
