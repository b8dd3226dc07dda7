"""Page tags for SGLang's book-keeping: which page each position of a request's row was given, with which tag.

SGLang keeps a table of rows, one a request; a row's positions point at token slots, and slot // page_tokens is a page:

    row of a request      0 1 2 3 | 4 5 6 7 | 8 …         positions
                          page 7  | page 3  | page 9      columns: what is remembered here, page and tag

plugin.py reports hand-outs, releases and row writes as they happen, and asks for a verdict before each forward pass.
All tags are where SGLang's table is. On a GPU nothing waits: reports go to the stream on which SGLang allocates, the
check to the one on which it computes, and SGLang orders the two; the verdict is read when the pass's tokens are.
Torch only, nothing of SGLang, so that it can be tested without it.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from backends.page_tags.quarantine import Quarantine
from backends.page_tags.table import UNTAGGED
from backends.sglang import page_steps
from backends.sglang.page_steps import PADDING_PAGE, Book, Writes


class Ranks:
    """The ranks that run the same batches: what one of them finds counts for all. device and host: process groups."""

    def __init__(self, device: dist.ProcessGroup, host: dist.ProcessGroup) -> None:
        self._device, self._host = device, host

    def any_failed(self, failed: Tensor) -> None:
        """In place, in the order of the current stream."""
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._device)

    def union(self, columns: Sequence[int]) -> list[int]:
        """Waits for all ranks. Only after a mismatch, which all of them know of."""
        gathered: list[list[int] | None] = [None] * dist.get_world_size(self._host)
        dist.all_gather_object(gathered, list(columns), group=self._host)
        return sorted({column for one in gathered if one is not None for column in one})


class Verdict:
    """Of one batch: on its way from the device."""

    def __init__(self, failed: Tensor) -> None:
        self._failed = failed.to("cpu", non_blocking=True)
        self._arrived = None
        if failed.is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._arrived.record()

    def failed(self) -> list[int]:
        """Positions in the batch of those that hold a foreign page. Waits until the check has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._failed.nonzero().flatten().tolist() if bool(self._failed.any()) else []


class PageGuard:
    """pages: of the pool, the padding page left out. row_slots: SGLang's table of rows, read where it is."""

    def __init__(self, row_slots: Tensor, *, pages: int, page_tokens: int, ranks: Ranks | None = None) -> None:
        self.pages = pages
        # More than this is no stray page any more: the engine should be restarted.
        self.quarantine = Quarantine(pages_max=max(1, pages // 100))
        self.pairs_checked = 0
        self._ranks = ranks
        self._steps = _steps_for(row_slots.device)
        shape = (row_slots.shape[0], -(-row_slots.shape[1] // page_tokens))
        self.book = Book(
            tags=torch.full((pages + 1,), UNTAGGED, dtype=torch.int32, device=row_slots.device),
            row_slots=row_slots,
            told_pages=torch.full(shape, PADDING_PAGE, dtype=torch.int32, device=row_slots.device),
            told_tags=torch.full(shape, UNTAGGED, dtype=torch.int32, device=row_slots.device),
            page_tokens=page_tokens,
        )
        self._on_gpu = row_slots.is_cuda
        # In a decode step each request writes one slot: where its writes end is its number.
        self._one_each = torch.arange(1, row_slots.shape[0] + 1, dtype=torch.int64, device=row_slots.device)

    def rehearse(self) -> None:
        """Every step once, before there is a request: on a GPU they are compiled, and the ranks meet, at the start."""
        one = torch.ones(1, dtype=torch.int64, device=self.book.tags.device)
        self.handed_out(one * self.book.page_tokens)
        self.written_run(0, 0, 1)
        self.check_decode(one * 0, one, one * 0).failed()
        self.released(one)
        self.released(one.int())  # both come by
        self.book.tags.fill_(UNTAGGED)
        self.book.told_tags.fill_(UNTAGGED)
        if self._on_gpu:
            # What comes next runs on other streams.
            torch.cuda.synchronize()

    def handed_out(self, slots: Tensor) -> None:
        """The allocator gave these token slots; pages that begin among them have a new owner."""
        self._steps.hand_out(self.book, slots)

    def released(self, pages: Tensor) -> Tensor:
        """The allocator is about to put these pages on its free list: those that it may, in the same order.

        A second release of the same page, or one of the padding page, would put it on the list wrongly. Finding them
        waits for the device, so on a GPU it is done once something has gone wrong.
        """
        if self._on_gpu and not len(self.quarantine):
            self._steps.release(self.book, pages)
            return pages
        usable = self.quarantine.usable(
            page
            for page, tag in zip(pages.tolist(), self.book.tags[pages].tolist(), strict=True)
            if tag % 2 == 1 and page != PADDING_PAGE
        )
        # Once each, in order: the same page may be named twice in one release.
        kept = torch.tensor(list(dict.fromkeys(usable)), dtype=pages.dtype, device=pages.device)
        self._steps.release(self.book, kept)
        return kept

    def cleared(self) -> None:
        """The pool was flushed: no page has an owner."""
        self.book.tags.copy_(page_steps.freed(self.book.tags))
        self.book.told_tags.fill_(UNTAGGED)

    def row_taken(self, row: int) -> None:
        """The row begins anew, for another request."""
        self.book.told_tags[row].fill_(UNTAGGED)

    def written(self, rows: Tensor, starts: Tensor, ends: Tensor) -> None:
        """These positions of rows were pointed at slots; row_slots says which."""
        self._steps.record(self.book, rows, starts, ends)

    def written_run(self, row: int, start: int, end: int) -> None:
        """As `written`, for one row."""
        if start < end:
            span = torch.tensor([[row], [start], [end]], dtype=torch.int64, pin_memory=self._on_gpu)
            self.written(*span.to(self.book.tags.device, non_blocking=True))

    def check_decode(self, rows: Tensor, lengths: Tensor, slots: Tensor) -> Verdict:
        """Before a pass in which each request stores its last token. See `check`."""
        return self.check(rows, lengths, Writes(slots, self._one_each[: len(rows)]))

    def check(self, rows: Tensor, lengths: Tensor, writes: Writes) -> Verdict:
        """One comparison for a whole batch, in the order of the current stream; stale requests' writes are redirected.

        lengths: tokens in use, those that are about to be written included; those are the last of each request.
        """
        failed = self._steps.check(self.book, rows, lengths, writes)
        if self._ranks is not None:
            self._ranks.any_failed(failed)
        self._steps.redirect(writes, failed)
        return Verdict(failed)

    def count(self, lengths: Tensor) -> None:
        """What a check of requests of these lengths compares. lengths: on the host."""
        self.pairs_checked += int(((lengths + self.book.page_tokens - 1) // self.book.page_tokens).sum())

    def contain(self, row: int, length: int) -> list[int]:
        """A request has failed: its row reads padding where a page is not its own, and releases nothing of theirs.

        The pages go into quarantine; returns those that are new there. What the row was told stays, so that it stays
        stale whatever is written into it. Waits for the device (and the other ranks).
        """
        stale = page_steps.stale_columns(self.book, row, length)
        columns = stale.nonzero().flatten().tolist()
        if self._ranks is not None:
            columns = self._ranks.union(columns)
        pages = []
        for column in columns:
            first = column * self.book.page_tokens
            page = int(self.book.row_slots[row, first]) // self.book.page_tokens
            if page != PADDING_PAGE:
                pages.append(page)
            self.book.row_slots[row, first : first + self.book.page_tokens] = PADDING_PAGE * self.book.page_tokens
        return self.quarantine.abort(pages)


def _steps_for(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return page_steps
    from backends.sglang import page_kernels  # noqa: PLC0415 - Triton is there with CUDA only

    return page_kernels
