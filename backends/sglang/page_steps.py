"""The bookkeeping of page tags as steps over tensors, in plain torch. page_guard.py calls them; nothing else does.

page_kernels.py has the same five steps for CUDA, where these would wait for the device or start too many kernels. Both
must do the same; this is the reference, and what runs on the CPU.

    tags         one for each page: odd with an owner, even when free, 0 never handed out (page_tags/table.py)
    row_slots    SGLang's table of rows: row, position -> token slot; slot // page_tokens is a page
    told_pages   for each row and each column (a page's worth of positions): which page it was given,
    told_tags    and the page's tag at that time

Tags are 32-bit patterns in int32. No step synchronises with a device or allocates by the values it sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from backends.page_tags.check import mismatches
from backends.page_tags.table import UNTAGGED

# SGLang's page for writes that nobody reads. Never handed out, so its tag is always UNTAGGED.
PADDING_PAGE = 0
# Where a page goes on when its generations are used up: even, since it has just become free, and not UNTAGGED.
_AFTER_LAST = 2


class Book(NamedTuple):
    """All that is known, on one device: tags are [pages], row_slots [rows, positions], told_* [rows, columns]."""

    tags: Tensor
    row_slots: Tensor
    told_pages: Tensor
    told_tags: Tensor
    page_tokens: int


class Writes(NamedTuple):
    """What a batch is about to store. slots: of all requests, one after another. ends: where each request's end."""

    slots: Tensor
    ends: Tensor


def freed(tags: Tensor) -> Tensor:
    """The tags of these pages without an owner. A page that is free already keeps its tag."""
    following = tags + (tags & 1)
    return torch.where((following == UNTAGGED) & (tags != UNTAGGED), _AFTER_LAST, following)


def hand_out(book: Book, slots: Tensor) -> None:
    """Pages that begin among these slots have a new owner.

    A page that has one already (it was on the free list all the same) gets another odd tag: the old holder is stale.
    """
    pages = slots[slots % book.page_tokens == 0] // book.page_tokens
    book.tags[pages] = freed(book.tags[pages]) + 1


def release(book: Book, pages: Tensor) -> None:
    """The pages have no owner any more: whoever remembers them is stale."""
    book.tags[pages] = freed(book.tags[pages])


def record(book: Book, rows: Tensor, starts: Tensor, ends: Tensor) -> None:
    """Positions of rows, from starts to ends, were pointed at slots.

    A column that keeps its page keeps its tag: a request writes into its last page step after step, and taking the
    tag of the moment would forgive whatever happened to the page in between. A page that nobody owns can't be given.
    """
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        columns = slice(start // book.page_tokens, -(-end // book.page_tokens))
        if start >= end:
            continue
        positions = torch.arange(columns.start, columns.stop, device=book.tags.device) * book.page_tokens
        pages = book.row_slots[row, positions.clamp_(min=start)] // book.page_tokens
        current, known = book.tags[pages.long()], book.told_tags[row, columns]
        keeps = (book.told_pages[row, columns] == pages) & (known != UNTAGGED)
        book.told_tags[row, columns] = torch.where(keeps, known, torch.where(current & 1 == 1, current, UNTAGGED))
        book.told_pages[row, columns] = pages


def check(book: Book, rows: Tensor, lengths: Tensor, writes: Writes) -> Tensor:
    """1 for each request that reads or writes a page which is not its own any more; int32.

    lengths: tokens in use, those that are about to be written included. Those are the last ones of each request, and
    must go where its row says.
    """
    failed = torch.zeros(len(rows), dtype=torch.int32, device=book.tags.device)
    first = 0
    requests = zip(rows.tolist(), lengths.tolist(), writes.ends.tolist(), strict=True)
    for position, (row, length, end) in enumerate(requests):
        misplaced = writes.slots[first:end] != book.row_slots[row, length - (end - first) : length]
        failed[position] = bool(stale_columns(book, row, length).any()) or bool(misplaced.any())
        first = end
    return failed


def stale_columns(book: Book, row: int, length: int) -> Tensor:
    """Which of a row's columns in use hold a page that is not theirs.

    What a row says without anybody having told it is nobody's.
    """
    columns = -(-length // book.page_tokens)
    pages = book.row_slots[row, : columns * book.page_tokens : book.page_tokens] // book.page_tokens
    told_pages, told_tags = book.told_pages[row, :columns], book.told_tags[row, :columns]
    return (told_pages != pages) | mismatches(book.tags, pages.long(), told_tags)


def redirect(writes: Writes, failed: Tensor) -> None:
    """What failed requests would store goes to the padding page."""
    first = 0
    for end, has_failed in zip(writes.ends.tolist(), failed.tolist(), strict=True):
        if has_failed:
            writes.slots[first:end] = PADDING_PAGE
        first = end
