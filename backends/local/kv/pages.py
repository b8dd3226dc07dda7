"""Who owns which page of the KV pool; scheduler and prefix cache call it, nobody else.

A page holds `page_size` tokens of all layers. This file knows page numbers only: no tensors, no requests.
Pages are handed out last-freed first, so that a lightly used pool touches little memory.

With a tag table, a page's tag changes whenever it is handed out or freed, and whoever holds a page says with which tag:
a claim whose tag is not the page's any more frees nothing, because the page is somebody else's. Without a table all
tags are UNTAGGED and every claim is believed.

Invariants, checked by `check_integrity`: free + used + withheld = total; a page is in one place only; each used page
is in one owner's claim. Withheld are pages in quarantine that nobody holds.
"""

from collections.abc import Iterable

from backends.page_tags.quarantine import Quarantine
from backends.page_tags.table import UNTAGGED, Claim, TagTable

QUARANTINED_SHARE_MAX = 0.01
"""With more of the pool than this in quarantine, it is no stray page any more: the engine should be restarted."""


class PageAllocator:
    """Hands out pages of a fixed pool. Not thread-safe: it belongs to the step loop."""

    def __init__(self, total_pages: int, page_size: int, *, tags: TagTable | None = None) -> None:
        assert total_pages > 0
        assert page_size > 0
        assert tags is None or tags.total_pages == total_pages
        self.total_pages = total_pages
        self.page_size = page_size
        self.quarantine = Quarantine(pages_max=max(1, int(total_pages * QUARANTINED_SHARE_MAX)))
        self._tags = tags
        self._free = list(range(total_pages - 1, -1, -1))
        self._used: set[int] = set()
        self._withheld: set[int] = set()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return len(self._used)

    @property
    def withheld_pages(self) -> int:
        return len(self._withheld)

    @property
    def total_tokens(self) -> int:
        return self.total_pages * self.page_size

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> Claim | None:
        """That many pages with their new tags, or None (and nothing taken) when there are not enough."""
        assert count >= 0
        if count > len(self._free):
            return None
        if count == 0:
            return Claim([], [])
        pages = self._free[-count:]
        pages.reverse()
        del self._free[-count:]
        self._used.update(pages)
        return Claim(pages, [UNTAGGED] * count if self._tags is None else self._tag(self._tags, pages))

    def free(self, claim: Claim) -> None:
        """Give back what is really the claimer's; what has changed hands meanwhile stays where it is."""
        for page, tag in zip(claim.pages, claim.tags, strict=True):
            if not self.holds(page, tag):
                continue
            assert page in self._used, f"page {page} is freed but not in use"
            self._used.remove(page)
            if self._tags is not None:
                self._tags.free([page])
            if page in self.quarantine:
                self._withheld.add(page)
            else:
                self._free.append(page)

    def holds(self, page: int, tag: int) -> bool:
        """Is whoever was given this tag still the page's owner? Asked wherever a page changes hands."""
        return self._tags is None or self._tags.tag(page) == tag

    def shareable(self, page: int, tag: int) -> bool:
        """May it go into the prefix cache: it is the claimer's, and nothing is wrong with it."""
        return self.holds(page, tag) and page not in self.quarantine

    def abort(self, stale_pages: Iterable[int]) -> list[int]:
        """A request was stopped because of these pages: they go out of circulation. Those that are new there."""
        return self._withhold(self.quarantine.abort(stale_pages))

    def refuse(self, stale_pages: Iterable[int]) -> list[int]:
        """These pages were not handed over, since the giver does not own them: as `abort`, with no request stopped."""
        return self._withhold(self.quarantine.refuse(stale_pages))

    def check_integrity(self, owned: Iterable[Claim]) -> None:
        """Assert that the pages of all owners are exactly the used ones, each once, and that none is lost."""
        seen: set[int] = set()
        for claim in owned:
            for page, tag in zip(claim.pages, claim.tags, strict=True):
                if not self.holds(page, tag):
                    continue
                assert page not in seen, f"page {page} has two owners"
                seen.add(page)
        assert seen == self._used, f"owned pages differ from used ones: {sorted(seen ^ self._used)[:8]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._used, "a page is free and used"
        assert not self._withheld & (free | self._used), "a page in quarantine is in circulation"
        assert len(free) + len(self._used) + len(self._withheld) == self.total_pages, "pages are lost"

    @staticmethod
    def _tag(tags: TagTable, pages: list[int]) -> list[int]:
        # Somebody's bug put a page on the free list that has an owner: the new tag is what the owner is told apart by.
        tags.free([page for page in pages if tags.owned(page)])
        return tags.allocate(pages)

    def _withhold(self, pages: list[int]) -> list[int]:
        """Those of them that are free leave the free list; those in use follow when they are freed."""
        kept = set(pages) - self._used
        if kept:
            self._free = [page for page in self._free if page not in kept]
            self._withheld |= kept
        return pages
