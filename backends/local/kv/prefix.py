"""The prefix cache: which full pages hold the keys and values of which beginnings. The scheduler calls it, nobody else.

A radix tree whose edges are whole pages, one tree per scope (the caller's opaque salt): another scope's identical
prompt never meets its pages.

    scope "a" ── tokens 0…15: page 7 ──┬─ tokens 16…31: page 3     locked by one sequence
                                       └─ tokens 16…31: page 9     not locked: evictable

The tree owns its pages. A sequence that reads them locks the deepest node it uses, and with it all on the way to the
root; what nobody locks is evicted, least recently used first, when pages are short, and counts as free until then.
Shared pages are full, so nobody ever writes to one and no copy is needed.

A node whose page has another tag than the node was given is stale: it is never handed to a sequence, but cut off with
all that follows it. Sequences that hold such a part find out in their next step's check (engine.py), not here.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from backends.local.kv.pages import PageAllocator
from backends.page_tags.table import UNTAGGED, Claim

_HEAP_SLACK = 64


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One page of a cached prefix. Of the tree's own bookkeeping, callers use `depth` alone."""

    scope: str
    key: tuple[int, ...]
    parent: "PrefixNode | None"
    page: int
    tag: int
    depth: int
    """How many pages lie on the way from the root to here, this one included."""
    children: "dict[tuple[int, ...], PrefixNode]" = field(default_factory=dict)
    locks: int = 0
    used_at: int = 0
    attached: bool = True
    """False: it was cut off, and goes when its last lock does."""

    @property
    def claim(self) -> Claim:
        return Claim((self.page,), (self.tag,))


class PrefixCache:
    """Not thread-safe: it belongs to the step loop, as the allocator does."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._roots: dict[str, PrefixNode] = {}
        self._nodes = 0
        self._evictable = 0
        self._uses = itertools.count(1)
        self._pushes = itertools.count()
        # Leaves without a lock, by last use. An entry whose node was used since, or has gone, is skipped.
        self._heap: list[tuple[int, int, PrefixNode]] = []

    @property
    def pages(self) -> int:
        """Pages that the tree owns, whoever reads them."""
        return self._nodes

    @property
    def evictable_pages(self) -> int:
        """Those of them that no sequence holds: as good as free."""
        return self._evictable

    def lock_longest(self, scope: str, tokens: Sequence[int]) -> PrefixNode | None:
        """Lock the longest cached beginning of `tokens` that leaves at least one token to compute; None: there is none.

        Here pages change hands, so each one's tag is compared first.
        """
        node = self._roots.get(scope)
        if node is None:
            return None
        for start in range(0, len(tokens) - self._page_size, self._page_size):
            child = node.children.get(tuple(tokens[start : start + self._page_size]))
            if child is None:
                break
            if not self._allocator.shareable(child.page, child.tag):
                self._refuse(child)
                break
            node = child
        if node.depth == 0:
            return None
        self._lock(node, above=None)
        return node

    def claim(self, node: PrefixNode | None) -> Claim:
        """The pages from the root to this node, with the tree's tags."""
        path = list(_path(node))
        path.reverse()
        return Claim([one.page for one in path], [one.tag for one in path])

    def adopt(
        self, scope: str, tokens: Sequence[int], held: PrefixNode | None, pages: list[int], tags: list[int]
    ) -> PrefixNode | None:
        """Take the full pages of `tokens` into the tree; the holder goes on with a lock on all of them.

        held: the deepest node that the holder has locked. pages, tags: its table, changed in place where the tree has a
        page for the same tokens already: the holder's own one is freed then. Returns the deepest node that is locked
        now. A page that is not the holder's, or is in quarantine, ends the run.
        """
        depth = 0 if held is None else held.depth
        full = len(tokens) // self._page_size
        if depth >= full or (held is not None and not held.attached):
            return held
        node = held or self._root(scope)
        for at in range(depth, full):
            if not self._allocator.shareable(pages[at], tags[at]):
                break
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            child = node.children.get(key)
            if child is not None and not self._allocator.shareable(child.page, child.tag):
                self._refuse(child)
                child = None
            if child is None:
                child = PrefixNode(scope, key, node, pages[at], tags[at], node.depth + 1)
                node.children[key] = child
                if node.depth == 0:
                    self._roots[scope] = node  # a refused child may just have emptied it
                self._nodes += 1
                self._evictable += 1
            else:
                self._allocator.free(Claim(pages[at : at + 1], tags[at : at + 1]))
                pages[at], tags[at] = child.page, child.tag
            node = child
        if node.depth == 0:
            self._drop_root_if_empty(node)
            return None
        if node is not held:
            self._lock(node, above=held)
        return node

    def unlock(self, node: PrefixNode | None) -> None:
        """The holder reads none of them any more."""
        now = next(self._uses)
        for one in _path(node):
            assert one.locks > 0, f"page {one.page} is unlocked but not locked"
            one.locks -= 1
            one.used_at = now
            if one.locks == 0:
                if one.attached:
                    self._evictable += 1
                    self._offer(one)
                else:
                    self._allocator.free(one.claim)

    def evict(self, free_pages: int) -> bool:
        """Free the least recently used pages until so many are free; False when that is not possible."""
        while self._allocator.free_pages < free_pages and self._heap:
            self._evict_next()
        return self._allocator.free_pages >= free_pages

    def condemn(self, held: PrefixNode | None, stale_pages: Iterable[int]) -> None:
        """A holder was stopped because of these pages: those of them that are the tree's are cut off it."""
        stale = set(stale_pages)
        shallowest = None
        for node in _path(held):
            if node.page in stale and node.attached:
                shallowest = node
        if shallowest is not None:
            self._cut(shallowest)

    def clear(self) -> None:
        """Forget everything that nobody holds."""
        while self._heap:
            self._evict_next()

    def claims(self, held: Iterable[PrefixNode | None]) -> Iterator[Claim]:
        """What the tree owns, parts that were cut off but are still held included: for the allocator's integrity."""
        seen: set[int] = set()
        stack = list(self._roots.values())
        stack += [node for one in held for node in _path(one) if not node.attached]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.attached:
                stack.extend(node.children.values())
            if node.depth:
                yield node.claim

    def check_integrity(self) -> None:
        nodes = evictable = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.attached
            assert node.depth == 0 or node.parent is not None
            assert all(child.locks <= node.locks for child in node.children.values()) or node.depth == 0, (
                "whoever holds a page holds all before it"
            )
            assert node.depth or node.children, "an empty tree is kept"
            nodes += node.depth > 0
            evictable += node.depth > 0 and node.locks == 0
            stack.extend(node.children.values())
        assert (nodes, evictable) == (self._nodes, self._evictable), "the tree's counts are wrong"

    def _root(self, scope: str) -> PrefixNode:
        return self._roots.setdefault(scope, PrefixNode(scope, (), None, -1, UNTAGGED, 0))

    def _lock(self, node: PrefixNode, *, above: PrefixNode | None) -> None:
        """One more lock on the nodes from `node` up to `above`, that one left out."""
        for one in _path(node):
            if one is above:
                return
            if one.locks == 0 and one.attached:
                self._evictable -= 1
            one.locks += 1

    def _evict_next(self) -> None:
        used_at, _, node = heapq.heappop(self._heap)
        if self._is_idle_leaf(node) and node.used_at == used_at:
            self._cut(node)

    def _refuse(self, node: PrefixNode) -> None:
        self._allocator.refuse([node.page])
        self._cut(node)

    def _cut(self, node: PrefixNode) -> None:
        """Take a node and all after it out of the tree; what sequences hold of it goes with their locks."""
        self._unlink(node)
        stack = [node]
        while stack:
            one = stack.pop()
            one.attached = False
            self._nodes -= 1
            stack.extend(one.children.values())
            if one.locks == 0:
                self._evictable -= 1
                self._allocator.free(one.claim)

    def _unlink(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.depth == 0:
            self._drop_root_if_empty(parent)
        else:
            self._offer(parent)

    def _drop_root_if_empty(self, root: PrefixNode) -> None:
        if not root.children:
            self._roots.pop(root.scope, None)

    def _is_idle_leaf(self, node: PrefixNode) -> bool:
        return node.attached and node.locks == 0 and not node.children

    def _offer(self, node: PrefixNode) -> None:
        if not self._is_idle_leaf(node):
            return
        heapq.heappush(self._heap, (node.used_at, next(self._pushes), node))
        if len(self._heap) > 2 * self._nodes + _HEAP_SLACK:
            fresh = {
                id(one): (used_at, push, one)
                for used_at, push, one in self._heap
                if self._is_idle_leaf(one) and one.used_at == used_at
            }
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)


def _path(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """From a node up to the root, the root left out."""
    while node is not None and node.depth:
        yield node
        node = node.parent
