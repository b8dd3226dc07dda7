"""Page tags for SGLang's book-keeping: which page each position of a request's row was given, with which tag.

SGLang keeps a table of rows, one a request; a row's positions point at token slots, and slot // page size is a page:

    row of a request      0 1 2 3 | 4 5 6 7 | 8 …         positions
                          page 7  | page 3  | page 9      columns: what is remembered here, page and tag

plugin.py reports hand-outs, releases and row writes, and asks before each forward pass. Torch only, nothing of SGLang,
so that it can be tested without it. Works on the host; tensors that come from elsewhere are the caller's to bring.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.page_tags.check import compare
from backends.page_tags.quarantine import Quarantine
from backends.page_tags.table import UNTAGGED, TagTable

# SGLang's page for writes that nobody reads. Never handed out, so its tag is always UNTAGGED.
PADDING_PAGE = 0


class PageGuard:
    """pages: of the pool, the padding page left out. rows and row_tokens: the shape of SGLang's table of rows."""

    def __init__(self, *, pages: int, page_tokens: int, rows: int, row_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.table = TagTable(pages + 1)
        # More than this is no stray page any more: the engine should be restarted.
        self.quarantine = Quarantine(pages_max=max(1, pages // 100))
        self.pairs_checked = 0
        self._tags = torch.frombuffer(self.table.memory, dtype=torch.int32)
        columns = -(-row_tokens // page_tokens)
        self._page = torch.zeros((rows, columns), dtype=torch.int64)
        self._expected = torch.full((rows, columns), UNTAGGED, dtype=torch.int32)

    def handed_out(self, slots: Tensor) -> None:
        """The allocator gave these token slots; pages that begin among them have a new owner."""
        for page in (slots[slots % self.page_tokens == 0] // self.page_tokens).tolist():
            if self.table.owned(page):
                # On the free list although it has an owner. The new tag makes the old holder stale; it will be stopped.
                self.table.free([page])
            self.table.allocate([page])

    def released(self, pages: Tensor) -> Tensor:
        """The allocator is about to put these pages on its free list: those that it may, in the same order."""
        usable = []
        for page in pages.tolist():
            # A second release of the same page would put it on the list twice; the first one counts.
            if page != PADDING_PAGE and self.table.owned(page):
                self.table.free([page])
                usable.append(page)
        return torch.tensor(self.quarantine.usable(usable), dtype=pages.dtype)

    def cleared(self) -> None:
        """The pool was flushed: no page has an owner."""
        self.table.clear()
        self._expected.fill_(UNTAGGED)

    def rows_taken(self, rows: Sequence[int]) -> None:
        """These rows begin anew, for other requests."""
        self._expected[list(rows)] = UNTAGGED

    def written(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Positions of rows were pointed at slots.

        A column that keeps its page keeps its tag: a request writes into its last page step after step, and taking the
        tag of the moment would forgive whatever happened to the page in between.
        """
        columns, pages = positions // self.page_tokens, slots.to(torch.int64) // self.page_tokens
        known, current = self._expected[rows, columns], self._tags[pages]
        keeps = (self._page[rows, columns] == pages) & (known != UNTAGGED)
        # A page that nobody owns (an even tag) can't be given to anybody, whoever says so.
        owned = torch.where(current & 1 == 1, current, UNTAGGED)
        self._expected[rows, columns] = torch.where(keeps, known, owned)
        self._page[rows, columns] = pages

    def stale_columns(self, rows: Sequence[int], lengths: Sequence[int], row_slots: Tensor) -> dict[int, list[int]]:
        """One comparison for a whole batch: the columns whose page is no longer theirs, by position in `rows`.

        lengths: tokens in use, those that are about to be written included. row_slots: SGLang's table of rows.
        """
        if not rows or max(lengths) == 0:
            return {}
        index = torch.tensor(rows, dtype=torch.int64)
        in_use = -(torch.tensor(lengths, dtype=torch.int64) // -self.page_tokens)
        columns = int(in_use.max())
        pages = row_slots[index, : columns * self.page_tokens : self.page_tokens].to(torch.int64) // self.page_tokens
        # What a row says without having told us is nobody's.
        expected = torch.where(self._page[index, :columns] == pages, self._expected[index, :columns], UNTAGGED)
        owners, read = torch.nonzero(torch.arange(columns) < in_use[:, None], as_tuple=True)
        verdicts = compare(self._tags, pages[owners, read], expected[owners, read], owners, len(rows))
        self.pairs_checked += len(owners)
        stale: dict[int, list[int]] = {}
        if bool(verdicts.failed.any()):
            for pair in torch.nonzero(verdicts.stale).flatten().tolist():
                stale.setdefault(int(owners[pair]), []).append(int(read[pair]))
        return stale

    def contain(self, row: int, columns: Sequence[int], row_slots: Tensor) -> list[int]:
        """Stop a row from touching these columns' pages: it reads and writes padding instead, and releases nothing of
        theirs. The pages go into quarantine; returns those that are new there.
        """
        pages = []
        for column in columns:
            first = column * self.page_tokens
            page = int(row_slots[row, first]) // self.page_tokens
            if page != PADDING_PAGE:
                pages.append(page)
            row_slots[row, first : first + self.page_tokens] = PADDING_PAGE * self.page_tokens
            self._expected[row, column] = UNTAGGED
        return self.quarantine.abort(pages)
