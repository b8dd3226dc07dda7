"""Bugs in the book-keeping of pages, on purpose: each does to a running engine what such a bug would do.

A page that is freed wrongly is also filled with garbage, as its next owner would do: whoever reads it says something
else than it should. `victims` are the requests that hold a page which is no longer theirs.
"""

import random
from collections.abc import Callable

import torch

from backends.local.engine import Engine
from backends.local.kv.prefix import PrefixNode
from backends.local.sequence import Sequence
from backends.page_tags.table import Claim


class Faults:
    """Of one engine. injected: how many, by kind."""

    def __init__(self, engine: Engine, source: random.Random) -> None:
        self._engine = engine
        self._source = source
        self.victims: set[str] = set()
        self.injected: dict[str, int] = {}

    def inject(self) -> bool:
        """One at random; False if nothing runs that it could happen to."""
        kinds: list[Callable[[], bool]] = [
            self.live_page_is_reused,
            self.page_is_handed_out_twice,
            self.block_table_is_stale,
            self.prefix_node_is_stale,
            self.page_is_freed_while_it_is_shared,
            self.page_is_recycled_during_its_transfer,
        ]
        self._source.shuffle(kinds)
        for kind in kinds:
            if kind():
                self.injected[kind.__name__] = self.injected.get(kind.__name__, 0) + 1
                return True
        return False

    def live_page_is_reused(self) -> bool:
        """A page is freed under its request, and the next request that needs one is given it."""
        sequence = self._a_running_one()
        return sequence is not None and self._free(*self._a_pair(sequence))

    def page_is_handed_out_twice(self) -> bool:
        """A page is on the free list although it has an owner."""
        sequence = self._a_running_one()
        if sequence is None:
            return False
        page, tag = self._a_pair(sequence)
        if not self._engine.allocator.holds(page, tag) or page in self._engine.allocator._free:
            return False
        self._mark(page, tag)
        self._engine.allocator._free.append(page)
        twin = self._engine.allocator.allocate(1)
        assert twin is not None
        assert twin.pages == [page]
        self._spoil(page)
        # The twin is somebody who comes and goes at once: he leaves the page as any owner does.
        self._engine.allocator.free(twin)
        return True

    def block_table_is_stale(self) -> bool:
        """All pages of its own went back, and the request still has the old table."""
        sequence = self._a_running_one()
        if sequence is None:
            return False
        claim = sequence.own_claim
        freed = [self._free(page, tag) for page, tag in zip(claim.pages, claim.tags, strict=True)]
        return any(freed)

    def prefix_node_is_stale(self) -> bool:
        """A page of the prefix cache goes back, and the cache does not know."""
        nodes = [node for node in self._nodes() if node.locks == 0]
        return bool(nodes) and self._free_node(self._source.choice(nodes))

    def page_is_freed_while_it_is_shared(self) -> bool:
        """One of several readers frees a page that the others go on reading."""
        nodes = [node for node in self._nodes() if node.locks > 0]
        return bool(nodes) and self._free_node(self._source.choice(nodes))

    def page_is_recycled_during_its_transfer(self) -> bool:
        """A page that waits for what another process sends is freed before that comes."""
        transferring = self._engine.scheduler.transferring
        return bool(transferring) and self._free(*self._a_pair(self._source.choice(transferring)))

    def _a_running_one(self) -> Sequence | None:
        running = [sequence for sequence in self._engine.scheduler.running if sequence.pages]
        return self._source.choice(running) if running else None

    def _a_pair(self, sequence: Sequence) -> tuple[int, int]:
        at = self._source.randrange(len(sequence.pages))
        return sequence.pages[at], sequence.tags[at]

    def _nodes(self) -> list[PrefixNode]:
        prefix = self._engine.scheduler.prefix
        if prefix is None:
            return []
        nodes, stack = [], list(prefix._roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if node.depth:
                nodes.append(node)
        return nodes

    def _free_node(self, node: PrefixNode) -> bool:
        return self._free(node.page, node.tag)

    def _free(self, page: int, tag: int) -> bool:
        """False if an earlier fault has taken it already."""
        if not self._engine.allocator.holds(page, tag):
            return False
        self._mark(page, tag)
        self._engine.allocator.free(Claim([page], [tag]))
        self._spoil(page)
        return True

    def _mark(self, page: int, tag: int) -> None:
        scheduler = self._engine.scheduler
        for sequence in (*scheduler.running, *scheduler.transferring):
            if (page, tag) in zip(sequence.pages, sequence.tags, strict=True):
                self.victims.add(sequence.rid)

    def _spoil(self, page: int) -> None:
        values = self._engine._pool.values
        values[:, page] = torch.randn(values.shape[0], values.shape[2], dtype=values.dtype) * 5
