"""Attention over paged keys and values. The runner lays a step out, each layer of a model then calls `attend`.

Rows of a step are its tokens: first one per decoding sequence, longest first, then the prompt chunks.

    rows     d0 d1 d2 | d3 d4 | chunk a ......... | chunk b ...
    groups   group 0    group 1  one call each

Decoding rows are padded to the longest of their group and masked; groups keep a long sequence from padding all others.
Query heads that share a key head are laid out so that keys are never repeated in memory: as several queries of one
head while decoding, as a stride of zero while prefilling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What attention must know about a step; the same for all layers."""

    slots: Tensor
    """Where each row's keys and values go."""
    decode: list[DecodeGroup]
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
    """The layout of a step; `decode` must be sorted by length, longest first."""
    slots = [extent.pages[extent.start // page_size] * page_size + extent.start % page_size for extent in decode]
    groups = []
    first = 0
    while first < len(decode):
        rows = _group_size(decode[first:])
        groups.append(_decode_group(decode[first : first + rows], first, page_size, dtype))
        first += rows
    chunks = []
    for extent in prefill:
        positions = range(extent.start, extent.length)
        slots.extend(extent.pages[at // page_size] * page_size + at % page_size for at in positions)
        chunks.append(_prompt_chunk(extent, first, page_size, dtype))
        first += extent.count
    return Layout(torch.tensor(slots), groups, chunks)


def _group_size(extents: Sequence[Extent]) -> int:
    longest = extents[0].length
    if longest < SPLIT_ABOVE_TOKENS:
        return len(extents)
    return next((at for at, extent in enumerate(extents) if extent.length < SPLIT_BELOW * longest), len(extents))


def _decode_group(extents: Sequence[Extent], first_row: int, page_size: int, dtype: torch.dtype) -> DecodeGroup:
    width = -(-extents[0].length // page_size)
    if len(extents) == 1:
        pages = torch.tensor(extents[0].pages[:width])
        return DecodeGroup(first_row, 1, pages, extents[0].length, None)
    # Padding repeats page 0: any readable page does, the mask hides it.
    table = [page for extent in extents for page in (*extent.pages[:width], *(0,) * (width - len(extent.pages)))]
    lengths = torch.tensor([extent.length for extent in extents])
    hidden = torch.arange(width * page_size) >= lengths[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
    return DecodeGroup(first_row, len(extents), torch.tensor(table), width * page_size, mask)


def _prompt_chunk(extent: Extent, first_row: int, page_size: int, dtype: torch.dtype) -> PromptChunk:
    pages = torch.tensor(extent.pages[: -(-extent.length // page_size)])
    mask = None
    if extent.start > 0:
        hidden = torch.ones(extent.count, extent.length, dtype=torch.bool).triu_(extent.start + 1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return PromptChunk(first_row, extent.count, pages, extent.length, mask)


def attend(queries: Tensor, pool: KVPool, layer: int, layout: Layout) -> Tensor:
    """[rows, query heads, head size] to [rows, query heads * head size]; this step's keys are in the pool already."""
    outputs = [_attend_decode(queries, pool, layer, group) for group in layout.decode]
    outputs += [_attend_prompt(queries, pool, layer, chunk) for chunk in layout.prefill]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_decode(queries: Tensor, pool: KVPool, layer: int, group: DecodeGroup) -> Tensor:
    keys, values = pool.fetch(layer, group.pages, group.rows)
    if group.mask is None:
        keys, values = keys[:, :, : group.length], values[:, :, : group.length]
    rows = queries[group.first_row : group.first_row + group.rows]
    grouped = rows.view(group.rows, pool.kv_heads, -1, pool.head_size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return out.reshape(group.rows, -1)


def _attend_prompt(queries: Tensor, pool: KVPool, layer: int, chunk: PromptChunk) -> Tensor:
    keys, values = pool.fetch(layer, chunk.pages, 1)
    rows = queries[chunk.first_row : chunk.first_row + chunk.rows]
    grouped = rows.view(chunk.rows, pool.kv_heads, -1, pool.head_size).permute(1, 2, 0, 3)
    shape = (pool.kv_heads, grouped.shape[1], chunk.length, pool.head_size)
    keys = keys[0, :, None, : chunk.length].expand(shape)
    values = values[0, :, None, : chunk.length].expand(shape)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
    return out.permute(2, 0, 1, 3).reshape(chunk.rows, -1)
