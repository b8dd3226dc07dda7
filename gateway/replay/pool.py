"""The simulated engine's KV pool: pages, and a cache of prompt prefixes in blocks. Used by engine.py alone.

Every page is free, private to a request, or part of a cached block; a block is locked by the requests that read it, or
evictable, least recently used first. Blocks are named by the whole prefix that ends in them, so that deeper ones are
used no later than their parents and leave first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from gateway.prefixes import BLOCK_TOKENS


class Pool:
    def __init__(self, total_tokens: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.block_pages = -(-BLOCK_TOKENS // page_tokens)
        self.total_pages = total_tokens // page_tokens
        self.free_pages = self.total_pages
        self._locked: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def available_pages(self) -> int:
        """Free now, or free as soon as asked for."""
        return self.free_pages + len(self._evictable) * self.block_pages

    @property
    def used_tokens(self) -> int:
        """As SGLang reports it: evictable cache counts as free."""
        return (self.total_pages - self.available_pages) * self.page_tokens

    @property
    def cached_pages(self) -> int:
        return (len(self._locked) + len(self._evictable)) * self.block_pages

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of the leading blocks are cached."""
        for index, block in enumerate(blocks):
            if block not in self._locked and block not in self._evictable:
                return index
        return len(blocks)

    def matched_evictable(self, blocks: Sequence[int], count: int) -> int:
        """How many of the first `count` blocks would stop being evictable if they were locked."""
        return sum(block in self._evictable for block in blocks[:count])

    def lock(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block in self._evictable:
                del self._evictable[block]
            self._locked[block] = self._locked.get(block, 0) + 1

    def unlock(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._locked[block] -= 1
            if not self._locked[block]:
                del self._locked[block]
                self._evictable[block] = None

    def take(self, pages: int) -> None:
        """Make pages private, evicting as needed. The caller has checked that they are available."""
        assert pages <= self.available_pages, "no more pages than are available"
        while self.free_pages < pages:
            self._evictable.popitem(last=False)
            self.free_pages += self.block_pages
        self.free_pages -= pages

    def give_back(self, pages: int) -> None:
        self.free_pages += pages
        assert self.free_pages <= self.total_pages, "pages given back were taken"

    def keep(self, blocks: Sequence[int]) -> None:
        """Private pages of a prefilled prompt become cached blocks, locked by it; doubles of known blocks are freed."""
        for block in blocks:
            known = block in self._locked or block in self._evictable
            self.lock((block,))
            if known:
                self.give_back(self.block_pages)
