"""The kernels in torch alone: what runs without a compiler, in other types than bfloat16, and what `native.c` is
tested against.
"""

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from backends.local.attention import DecodeRows, Layout, attend_decode
from backends.local.kernels.protocol import Norm, Rotary
from backends.local.kv.pool import KVPool


class TorchKernels:
    name = "torch"

    def norm(self, rows: Tensor, norm: Norm, added: Tensor | None = None) -> Tensor:
        if added is not None:
            rows.add_(added)
        wide = rows if rows.dtype == torch.float64 else rows.float()
        # The mean of squares plus epsilon as one product: two thirds of the time of mean and sum.
        shares = wide.new_full((rows.shape[1], 1), 1.0 / rows.shape[1])
        wide = wide * torch.addmm(wide.new_full((1, 1), norm.epsilon), wide * wide, shares).rsqrt_()
        return wide.to(rows.dtype).mul_(norm.weight)

    def gate(self, both: Tensor) -> Tensor:
        gates, ups = both.chunk(2, dim=-1)
        return F.silu(gates).mul_(ups)

    def rotate_and_store(self, qkv: Tensor, rotary: Rotary, pool: KVPool, layer: int, layout: Layout) -> None:
        stored = 2 * pool.kv_heads
        heads = qkv.view(len(qkv), -1, pool.head_size)
        rotated = heads[:, : heads.shape[1] - pool.kv_heads]
        cosines = rotary.cosines.index_select(0, layout.positions)[:, None]
        sines = rotary.sines.index_select(0, layout.positions)[:, None]
        # Swapping the halves is a roll, and the minus sign is in the sines.
        swapped = rotated.roll(pool.head_size // 2, -1).mul_(sines)
        rotated.mul_(cosines).add_(swapped)
        pool.store(layer, layout.slots, qkv[:, -stored * pool.head_size :])

    def attend(self, qkv: Tensor, pool: KVPool, layer: int, rows: DecodeRows) -> Tensor:
        queries = qkv.view(len(qkv), -1, pool.head_size)[: rows.count, : -2 * pool.kv_heads]
        return attend_decode(queries, pool, layer, rows)
