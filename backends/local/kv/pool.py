"""The tensors behind the pages: keys and values of all layers, page by page. `attention.py` reads and writes them.

Layout, one tensor for the whole pool, in the stored type:

    values   [layer, page, token in page, key heads then value heads, head size]
    scales   [layer, page, token in page, key heads then value heads]            FP8 only: one byte each, kv/fp8.py

Keys and values of a token lie side by side because the fused projection makes them so: storing a token's pair is one
row copy, fetching a page's is another. Who owns a page is not known here (`kv/pages.py`).
"""

import numpy as np
import torch
from torch import Tensor

from backends.local.kv.fp8 import dequantise, quantise
from backends.local.precision import KVPrecision

FP8 = torch.float8_e4m3fn


def stored_dtype(precision: KVPrecision, model: torch.dtype) -> torch.dtype:
    """The type that the pool keeps for a model of type `model`."""
    return {KVPrecision.AUTO: model, KVPrecision.BF16: torch.bfloat16, KVPrecision.FP8_E4M3: FP8}[precision]


class KVPool:
    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
    ) -> None:
        """`dtype` is what readers get; `stored` what the pages hold, by default the same."""
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.stored = stored or dtype
        width = 2 * kv_heads * head_size
        self.values = _zeros(layers, pages, page_size * width, self.stored)
        """[layer, page, …] in the stored type."""
        self.scales = _zeros(layers, pages, page_size * 2 * kv_heads, torch.uint8) if self.stored == FP8 else None
        self._values_by_page = self.values.unbind(0)
        self._values_by_slot = self.values.view(layers, pages * page_size, width).unbind(0)
        if self.scales is not None:
            self._scales_by_page = self.scales.unbind(0)
            self._scales_by_slot = self.scales.view(layers, pages * page_size, 2 * kv_heads).unbind(0)
        self.addresses = [
            (self.values[layer].data_ptr(), None if self.scales is None else self.scales[layer].data_ptr())
            for layer in range(layers)
        ]
        """Of each layer's values and scales, for the compiled kernels."""

    @staticmethod
    def page_bytes(*, layers: int, page_size: int, kv_heads: int, head_size: int, stored: torch.dtype) -> int:
        """Of one page in all layers, scales counted."""
        row = head_size + 1 if stored == FP8 else head_size * stored.itemsize
        return layers * page_size * 2 * kv_heads * row

    def store(self, layer: int, slots: Tensor, keys_and_values: Tensor) -> None:
        """Write one row per token; a slot is `page * page_size + offset`."""
        if self.scales is None:
            self._values_by_slot[layer].index_copy_(0, slots, keys_and_values.to(self.stored))
            return
        values, scales = quantise(keys_and_values.view(-1, 2 * self.kv_heads, self.head_size))
        # As bytes: torch copies by index no float8.
        self._values_by_slot[layer].view(torch.uint8).index_copy_(0, slots, values.flatten(-2))
        self._scales_by_slot[layer].index_copy_(0, slots, scales)

    def fetch(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [rows, kv heads, tokens, head size], of `rows` equally long runs of pages."""
        shape = (rows, -1, 2 * self.kv_heads, self.head_size)
        if self.scales is None:
            both = self._values_by_page[layer].index_select(0, pages).view(shape).to(self.dtype)
        else:
            values = self._values_by_page[layer].view(torch.uint8).index_select(0, pages).view(shape)
            scales = self._scales_by_page[layer].index_select(0, pages).view(shape[:-1])
            both = dequantise(values, scales, self.dtype)
        both = both.transpose(1, 2)
        return both[:, : self.kv_heads], both[:, self.kv_heads :]


def _zeros(layers: int, pages: int, page_elements: int, dtype: torch.dtype) -> Tensor:
    # calloc: the kernel gives memory when a page is first written, so an idle engine is small. And zeros matter:
    # padding reads pages that nobody wrote, and a masked weight of 0 times NaN would still be NaN.
    raw = torch.from_numpy(np.zeros(layers * pages * page_elements * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(layers, pages, page_elements)
