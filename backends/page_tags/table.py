"""The tag of every physical page. An engine's page allocator calls `allocate` and `free`; nobody else changes a tag.

A tag is an unsigned 32-bit generation. It changes whenever the page changes hands, so whoever remembers the tag of an
earlier time can be told from the owner:

    0      never handed out          odd    has an owner
    even   free                      4294967295 is followed by 2: no tag of an owner is ever 0, and parity holds

The numbers lie in one buffer (`memory`) that check.py compares in place. This file knows no tensors and no requests.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# No owner is ever given this tag; a pair that expects it is stale, whatever the page says.
UNTAGGED = 0
TAG_MAX = (1 << 32) - 1
# Where a page goes on when its generations are used up: even, since it has just become free, and not 0.
_AFTER_LAST = 2


class Claim(NamedTuple):
    """What a holder says of its pages: tags[i] is the tag that it was given for pages[i]."""

    pages: Sequence[int]
    tags: Sequence[int]


class TagTable:
    """Tags of the pages 0 … total_pages - 1. Not thread-safe: it belongs to whoever allocates."""

    def __init__(self, total_pages: int) -> None:
        assert total_pages > 0
        self.memory = array("I", bytes(4 * total_pages))
        assert self.memory.itemsize == 4, "check.py reads the tags as 32-bit numbers"

    @property
    def total_pages(self) -> int:
        return len(self.memory)

    def tag(self, page: int) -> int:
        assert page >= 0
        return self.memory[page]

    def owned(self, page: int) -> bool:
        return self.tag(page) % 2 == 1

    def allocate(self, pages: Iterable[int]) -> list[int]:
        """The pages get an owner: their new tags, in the same order. The owner keeps them beside the pages."""
        return [self._advance(page, to_owned=True) for page in pages]

    def free(self, pages: Iterable[int]) -> None:
        """The pages lose their owner: every pair that remembers them is stale from now on."""
        for page in pages:
            self._advance(page, to_owned=False)

    def clear(self) -> None:
        """All pages lose their owners, as when a pool is flushed."""
        self.free([page for page, tag in enumerate(self.memory) if tag % 2 == 1])

    def _advance(self, page: int, *, to_owned: bool) -> int:
        tag = self.tag(page)
        assert (tag % 2 == 0) is to_owned, f"page {page} is {'handed out' if to_owned else 'freed'} twice"
        tag = _AFTER_LAST if tag == TAG_MAX else tag + 1
        self.memory[page] = tag
        return tag
