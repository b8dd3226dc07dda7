"""The steps of page_steps.py as CUDA kernels, one launch each, in the order of the stream they are called on.

Written in Triton, which comes with CUDA builds of torch; page_guard.py imports this file only where the pools are on a
GPU. What each step means stands in page_steps.py, whose results these must equal (a test runs both).
"""

# Triton's own language: pointers and numbers without annotations, constants in capitals.
# ruff: noqa: ANN001, ANN202, N803, PLR0917
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

import triton
import triton.language as tl
from torch import Tensor, zeros_like

from backends.sglang.page_steps import Book, Writes

_BLOCK = 256
# A request's columns are looked at by this many programs at once, so that a long context is no long wait.
_PARTS = 16


def hand_out(book: Book, slots: Tensor) -> None:
    if len(slots):
        _hand_out[triton.cdiv(len(slots), _BLOCK),](book.tags, slots, len(slots), book.page_tokens, _BLOCK)


def release(book: Book, pages: Tensor) -> None:
    if len(pages):
        _release[triton.cdiv(len(pages), _BLOCK),](book.tags, pages, len(pages), _BLOCK)


def record(book: Book, rows: Tensor, starts: Tensor, ends: Tensor) -> None:
    if len(rows):
        _record[len(rows), _PARTS](*_pointers(book), rows, starts, ends, book.page_tokens, _BLOCK)


def check(book: Book, rows: Tensor, lengths: Tensor, writes: Writes) -> Tensor:
    failed = zeros_like(rows, dtype=book.tags.dtype)
    _check[len(rows), _PARTS](*_pointers(book), rows, lengths, *writes, failed, book.page_tokens, _BLOCK)
    return failed


def redirect(writes: Writes, failed: Tensor) -> None:
    _redirect[len(failed),](*writes, failed, _BLOCK)


def _pointers(book: Book) -> tuple[Tensor, Tensor, int, Tensor, Tensor, int]:
    rows, told = book.row_slots.stride(0), book.told_pages.stride(0)
    return book.tags, book.row_slots, rows, book.told_pages, book.told_tags, told


@triton.jit(do_not_specialize=["count"])
def _hand_out(tags, slots, count, page_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < count, other=1)
    begins = (i < count) & (slot % page_tokens == 0)
    page = slot // page_tokens
    tag = tl.load(tags + page, mask=begins, other=0)
    # To the next odd number; past the last one (-1 as int32) comes 3, since 0 is nobody's and 2 is free.
    tag = tl.where(tag & 1 == 1, tl.where(tag == -1, 3, tag + 2), tag + 1)
    tl.store(tags + page, tag, mask=begins)


@triton.jit(do_not_specialize=["count"])
def _release(tags, pages, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages + i, mask=i < count, other=0)
    tag = tl.load(tags + page, mask=i < count, other=0)
    tag = tl.where(tag & 1 == 1, tl.where(tag == -1, 2, tag + 1), tag)
    tl.store(tags + page, tag, mask=i < count)


@triton.jit
def _record(
    tags,
    row_slots,
    row_stride,
    told_pages,
    told_tags,
    told_stride,
    rows,
    starts,
    ends,
    page_tokens,
    BLOCK: tl.constexpr,
):
    span = tl.program_id(0)
    row = tl.load(rows + span).to(tl.int64)
    start = tl.load(starts + span)
    end = tl.load(ends + span)
    last = tl.where(end > start, (end + page_tokens - 1) // page_tokens, 0)
    for block in range(start // page_tokens + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
        column = block + tl.arange(0, BLOCK)
        used = column < last
        position = tl.maximum(column * page_tokens, start)
        page = tl.load(row_slots + row * row_stride + position, mask=used, other=0) // page_tokens
        current = tl.load(tags + page, mask=used, other=0)
        known_page = tl.load(told_pages + row * told_stride + column, mask=used, other=0)
        known = tl.load(told_tags + row * told_stride + column, mask=used, other=0)
        keeps = (known_page == page) & (known != 0)
        tag = tl.where(keeps, known, tl.where(current & 1 == 1, current, 0))
        tl.store(told_tags + row * told_stride + column, tag, mask=used)
        tl.store(told_pages + row * told_stride + column, page, mask=used)


@triton.jit
def _check(
    tags,
    row_slots,
    row_stride,
    told_pages,
    told_tags,
    told_stride,
    rows,
    lengths,
    slots,
    ends,
    failed,
    page_tokens,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + request)
    columns = (length + page_tokens - 1) // page_tokens
    hit = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = block + tl.arange(0, BLOCK)
        used = column < columns
        page = tl.load(row_slots + row * row_stride + column * page_tokens, mask=used, other=0) // page_tokens
        known_page = tl.load(told_pages + row * told_stride + column, mask=used, other=0)
        known = tl.load(told_tags + row * told_stride + column, mask=used, other=0)
        current = tl.load(tags + page, mask=used, other=0)
        hit |= (used & ((known_page != page) | (known == 0) | (current != known))).to(tl.int32)
    end = tl.load(ends + request)
    first = tl.load(ends + request - 1, mask=request > 0, other=0)
    for block in range(first + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        i = block + tl.arange(0, BLOCK)
        used = i < end
        slot = tl.load(slots + i, mask=used, other=0)
        said = tl.load(row_slots + row * row_stride + length - end + i, mask=used, other=0)
        hit |= (used & (slot != said)).to(tl.int32)
    if tl.max(hit, 0) == 1:
        tl.store(failed + request, 1)


@triton.jit
def _redirect(slots, ends, failed, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    if tl.load(failed + request) != 0:
        end = tl.load(ends + request)
        first = tl.load(ends + request - 1, mask=request > 0, other=0)
        for block in range(first, end, BLOCK):
            i = block + tl.arange(0, BLOCK)
            tl.store(slots + i, tl.zeros([BLOCK], dtype=tl.int64), mask=i < end)
