"""Attention over paged keys and values. The runner lays a pass out; each layer of a model then attends.

Rows of a pass are its tokens: first one per decoding sequence, longest first, then the chunks.

    rows     d0 d1 d2 d3 d4 | chunk a ......... | chunk b ...

Chunks attend one by one, in torch. Decoding rows attend together, by the compiled kernel or by `attend_decode`, its
equal in torch. There they are padded to the longest of their group and masked; groups keep a long sequence from padding
all others. Query heads that share a key head are laid out so that keys are never repeated in memory: as several queries
of one head while decoding, as a stride of zero in chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from backends.local.kv.pool import KVPool

SPLIT_BELOW = 0.5
"""A row shorter than this share of its group's longest starts a group of its own: one more call costs less then."""
SPLIT_ABOVE_TOKENS = 512
"""Groups shorter than this are not split: padding them is cheaper than another call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    first_row: int
    rows: int
    pages: Tensor
    length: int
    """Keys to read: exact for a single row, padded to whole pages otherwise."""
    mask: Tensor | None


class DecodeRows:
    """The decoding rows of a pass, longest first, with the pages of each."""

    def __init__(self, extents: Sequence["Extent"], page_size: int, dtype: torch.dtype) -> None:
        self.count = len(extents)
        self._lengths = [extent.length for extent in extents]
        self.longest = self._lengths[0]
        self._page_size = page_size
        self._dtype = dtype
        width = -(-self.longest // page_size)
        # Padding repeats page 0: any readable page does, since nothing past a row's length counts.
        table = [(*extent.pages[:width], *(0,) * (width - len(extent.pages))) for extent in extents]
        self.table = torch.tensor(table, dtype=torch.int32)
        self.lengths = torch.tensor(self._lengths, dtype=torch.int32)

    @cached_property
    def groups(self) -> list[DecodeGroup]:
        """For attention in torch."""
        groups = []
        first = 0
        while first < self.count:
            rows = _group_size(self._lengths[first:])
            groups.append(self._group(first, rows))
            first += rows
        return groups

    def _group(self, first: int, rows: int) -> DecodeGroup:
        width = -(-self._lengths[first] // self._page_size)
        pages = self.table[first : first + rows, :width].flatten().long()
        if rows == 1:
            return DecodeGroup(first, 1, pages, self._lengths[first], None)
        hidden = torch.arange(width * self._page_size) >= self.lengths[first : first + rows, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        return DecodeGroup(first, rows, pages, width * self._page_size, mask)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    first_row: int
    rows: int
    pages: Tensor
    length: int
    mask: Tensor | None
    """None: the chunk opens its prompt, so plain causal attention does."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What attention must know about a pass; the same for all layers."""

    positions: Tensor
    slots: Tensor
    """Where each row's keys and values go."""
    decode: DecodeRows | None
    prefill: list[PromptChunk]


@dataclass(frozen=True, slots=True)
class Extent:
    """One sequence's share of a step: `count` new tokens at the end of `length`, on these pages."""

    pages: Sequence[int]
    length: int
    count: int

    @property
    def start(self) -> int:
        return self.length - self.count


def lay_out(decode: Sequence[Extent], prefill: Sequence[Extent], page_size: int, dtype: torch.dtype) -> Layout:
    """The layout of a pass; `decode` must be sorted by length, longest first."""
    rows = DecodeRows(decode, page_size, dtype) if decode else None
    positions: list[int] = []
    slots: list[int] = []
    for extent in (*decode, *prefill):
        span = range(extent.start, extent.length)
        positions += span
        slots += [extent.pages[at // page_size] * page_size + at % page_size for at in span]
    chunks = []
    first = len(decode)
    for extent in prefill:
        chunks.append(_prompt_chunk(extent, first, page_size, dtype))
        first += extent.count
    return Layout(torch.tensor(positions), torch.tensor(slots), rows, chunks)


def _group_size(lengths: Sequence[int]) -> int:
    longest = lengths[0]
    if longest < SPLIT_ABOVE_TOKENS:
        return len(lengths)
    return next((at for at, length in enumerate(lengths) if length < SPLIT_BELOW * longest), len(lengths))


def _prompt_chunk(extent: Extent, first_row: int, page_size: int, dtype: torch.dtype) -> PromptChunk:
    pages = torch.tensor(extent.pages[: -(-extent.length // page_size)])
    mask = None
    if extent.start > 0:
        hidden = torch.ones(extent.count, extent.length, dtype=torch.bool).triu_(extent.start + 1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return PromptChunk(first_row, extent.count, pages, extent.length, mask)


def attend_decode(queries: Tensor, pool: KVPool, layer: int, rows: DecodeRows) -> Tensor:
    """[rows, query heads, head size] to [rows, query heads * head size]; this pass's keys are in the pool already."""
    outputs = [_attend_group(queries, pool, layer, group) for group in rows.groups]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(queries: Tensor, pool: KVPool, layer: int, group: DecodeGroup) -> Tensor:
    keys, values = pool.fetch(layer, group.pages, group.rows)
    if group.mask is None:
        keys, values = keys[:, :, : group.length], values[:, :, : group.length]
    rows = queries[group.first_row : group.first_row + group.rows]
    grouped = rows.reshape(group.rows, pool.kv_heads, -1, pool.head_size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return out.reshape(group.rows, -1)


def attend_prompt(queries: Tensor, pool: KVPool, layer: int, chunk: PromptChunk) -> Tensor:
    """As `attend_decode`, for the rows of one chunk."""
    keys, values = pool.fetch(layer, chunk.pages, 1)
    rows = queries[chunk.first_row : chunk.first_row + chunk.rows]
    grouped = rows.reshape(chunk.rows, pool.kv_heads, -1, pool.head_size).permute(1, 2, 0, 3)
    shape = (pool.kv_heads, grouped.shape[1], chunk.length, pool.head_size)
    keys = keys[0, :, None, : chunk.length].expand(shape)
    values = values[0, :, None, : chunk.length].expand(shape)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
    return out.permute(2, 0, 1, 3).reshape(chunk.rows, -1)
