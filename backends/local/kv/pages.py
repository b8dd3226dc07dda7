"""Who owns which page of the KV pool; the scheduler calls it, nobody else.

A page holds `page_size` tokens of all layers. This file knows page numbers only: no tensors, no requests.
Pages are handed out last-freed first, so that a lightly used pool touches little memory.

Invariants, checked by `check_integrity`: free + used = total; a page is in one place only; an owner's pages are used.
"""

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out pages of a fixed pool. Not thread-safe: it belongs to the step loop."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        assert total_pages > 0
        assert page_size > 0
        self.total_pages = total_pages
        self.page_size = page_size
        self._free = list(range(total_pages - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return len(self._used)

    @property
    def total_tokens(self) -> int:
        return self.total_pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """That many pages, or None (and nothing taken) when there are not enough."""
        assert count >= 0
        if count > len(self._free):
            return None
        if count == 0:
            return []
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        self._used.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert page in self._used, f"page {page} is freed but not in use"
            self._used.remove(page)
            self._free.append(page)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Assert that the pages of all owners are exactly the used ones, each once, and that none is lost."""
        seen: set[int] = set()
        for pages in owned:
            for page in pages:
                assert page not in seen, f"page {page} has two owners"
                seen.add(page)
        assert seen == self._used, f"owned pages differ from used ones: {sorted(seen ^ self._used)[:8]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._used, "a page is free and used"
        assert len(free) + len(self._used) == self.total_pages, "pages are lost"
