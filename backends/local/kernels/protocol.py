"""The contract of the kernels, and the tables that they share. `models/llama.py` calls them, `choice.py` picks them.

Both implementations round where transformers rounds; they differ in the order of float32 sums.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from backends.local.attention import DecodeRows, Layout
from backends.local.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and signed sines, [positions, head size]; the sign is that of `rotate_half`."""

    cosines: Tensor
    sines: Tensor


class Kernels(Protocol):
    name: str

    def norm(self, rows: Tensor, norm: Norm, added: Tensor | None = None) -> Tensor:
        """The norm of each row; before it, `added` is added to `rows` in place."""
        ...

    def gate(self, both: Tensor) -> Tensor:
        """silu(gates) * ups; the first half of each row are gates."""
        ...

    def rotate_and_store(self, qkv: Tensor, rotary: Rotary, pool: KVPool, layer: int, layout: Layout) -> None:
        """Rotate query and key heads of `qkv`, [rows, query then key then value heads], in place, each row to its
        position; keep its keys and values in their slots.
        """
        ...

    def attend(self, qkv: Tensor, pool: KVPool, layer: int, rows: DecodeRows) -> Tensor:
        """[rows, query heads * head size] for the leading rows of `qkv`, which are those of `rows`."""
        ...
