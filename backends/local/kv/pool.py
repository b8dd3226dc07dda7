"""The tensors behind the pages: keys and values of all layers, page by page. `attention.py` reads and writes them.

Layout, one tensor for the whole pool:

    [layer, page, token in page, key heads then value heads, head size]

Keys and values of a token lie side by side because the fused projection makes them so: storing a token's pair is one
row copy, fetching a page's is another. Who owns a page is not known here (`kv/pages.py`).
"""

import numpy as np
import torch
from torch import Tensor


class KVPool:
    def __init__(
        self, *, layers: int, pages: int, page_size: int, kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> None:
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_size = head_size
        width = 2 * kv_heads * head_size
        # calloc: the kernel gives memory when a page is first written, so an idle engine is small. And zeros matter:
        # padding reads pages that nobody wrote, and a masked weight of 0 times NaN would still be NaN.
        raw = torch.from_numpy(np.zeros(layers * pages * page_size * width * dtype.itemsize, dtype=np.uint8))
        whole = raw.view(dtype).view(layers, pages, page_size * width)
        self._by_page = whole.unbind(0)
        self._by_slot = whole.view(layers, pages * page_size, width).unbind(0)

    @staticmethod
    def page_bytes(*, layers: int, page_size: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        return layers * page_size * 2 * kv_heads * head_size * dtype.itemsize

    def store(self, layer: int, slots: Tensor, keys_and_values: Tensor) -> None:
        """Write one row per token; a slot is `page * page_size + offset`."""
        self._by_slot[layer].index_copy_(0, slots, keys_and_values)

    def fetch(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [rows, kv heads, tokens, head size], of `rows` equally long runs of pages."""
        fetched = self._by_page[layer].index_select(0, pages)
        both = fetched.view(rows, -1, 2 * self.kv_heads, self.head_size).transpose(1, 2)
        return both[:, : self.kv_heads], both[:, self.kv_heads :]
