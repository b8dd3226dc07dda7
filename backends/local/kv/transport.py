"""Pages of the pool as bytes and back: what goes from a prefill to a decode process.

    [layer, page, token in page, …] of the values, then the same of the scales where the cache is FP8

Called by the engine's thread between steps, so nothing writes to a page meanwhile. Whose pages these are, and whether
the bytes are whole, is known elsewhere (kv/pages.py, pair/handover.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.local.kv.pool import KVPool


def layout(*, layers: int, kv_heads: int, head_size: int, page_size: int, stored: torch.dtype) -> str:
    """Two pools of the same layout can read each other's bytes."""
    kind = str(stored).removeprefix("torch.")
    return f"{layers} layers of {kv_heads} heads of {head_size}, pages of {page_size} tokens in {kind}"


def layout_of(pool: KVPool) -> str:
    return layout(
        layers=len(pool.values),
        kv_heads=pool.kv_heads,
        head_size=pool.head_size,
        page_size=pool.page_size,
        stored=pool.stored,
    )


def packed_bytes(pool: KVPool, pages: int) -> int:
    return sum(tensor[:, 0].numel() for tensor in _tensors(pool)) * pages


def pack(pool: KVPool, pages: Sequence[int]) -> memoryview:
    """A copy of these pages, in this order."""
    index = torch.tensor(pages)
    whole = torch.cat([tensor.index_select(1, index).flatten() for tensor in _tensors(pool)])
    return whole.numpy().data.cast("B")


def unpack(pool: KVPool, pages: Sequence[int], data: bytearray, *, skip: int) -> None:
    """Write what `pack` gave to these pages, the first `skip` of which are left as they are."""
    index = torch.tensor(pages[skip:], dtype=torch.int64)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    start = 0
    for tensor in _tensors(pool):
        layers, _, page_bytes = tensor.shape
        end = start + layers * len(pages) * page_bytes
        tensor.index_copy_(1, index, whole[start:end].view(layers, len(pages), page_bytes)[:, skip:])
        start = end
    assert start == len(data)


def _tensors(pool: KVPool) -> list[Tensor]:
    """Of bytes, [layer, page, …]: torch copies no float8 by index."""
    tensors = [pool.values] if pool.scales is None else [pool.values, pool.scales]
    return [tensor.view(torch.uint8) for tensor in tensors]
