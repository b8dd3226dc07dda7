from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from backends.local.kv.pages import PageAllocator
from backends.local.kv.prefix import PrefixCache, PrefixNode
from backends.page_tags.table import Claim, TagTable

PAGE = 2


@dataclass
class Holder:
    """What a sequence is to the cache: its table, and the node that it holds."""

    scope: str
    tokens: list[int]
    node: PrefixNode | None
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)

    @property
    def own(self) -> Claim:
        shared = 0 if self.node is None else self.node.depth
        return Claim(self.pages[shared:], self.tags[shared:])


class Tree:
    """A cache, its allocator and whoever holds something; what is written on each page is known."""

    def __init__(self, pages: int = 16) -> None:
        self.tags = TagTable(pages)
        self.allocator = PageAllocator(pages, PAGE, tags=self.tags)
        self.cache = PrefixCache(self.allocator)
        self.holders: list[Holder] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}

    def start(self, scope: str, tokens: list[int]) -> Holder | None:
        node = self.cache.lock_longest(scope, tokens)
        holder = Holder(scope, tokens, node)
        shared = self.cache.claim(node)
        missing = self.allocator.pages_for(len(tokens)) - len(shared.pages)
        if not self.cache.evict(missing):
            self.cache.unlock(node)
            return None
        claim = self.allocator.allocate(missing)
        assert claim is not None
        holder.pages, holder.tags = [*shared.pages, *claim.pages], [*shared.tags, *claim.tags]
        for at, page in enumerate(holder.pages):
            content = (scope, tuple(tokens[: (at + 1) * PAGE]))
            if at < len(shared.pages):
                assert self.written[page] == content, "a hit gives pages of exactly these tokens in this scope"
            self.written[page] = content
        self.holders.append(holder)
        return holder

    def share(self, holder: Holder) -> None:
        holder.node = self.cache.adopt(holder.scope, holder.tokens, holder.node, holder.pages, holder.tags)
        for at in range(len(holder.tokens) // PAGE):
            assert self.written[holder.pages[at]] == (holder.scope, tuple(holder.tokens[: (at + 1) * PAGE]))

    def end(self, holder: Holder, *, share: bool = True) -> None:
        if share:
            self.share(holder)
        self.holders.remove(holder)
        self.allocator.free(holder.own)
        self.cache.unlock(holder.node)

    def run(self, scope: str, tokens: list[int]) -> int:
        """From start to end; how many pages were found."""
        holder = self.start(scope, tokens)
        assert holder is not None
        found = 0 if holder.node is None else holder.node.depth
        self.end(holder)
        return found

    def check(self) -> None:
        self.cache.check_integrity()
        owned = [holder.own for holder in self.holders]
        self.allocator.check_integrity([*owned, *self.cache.claims(holder.node for holder in self.holders)])


def test_the_longest_cached_beginning_is_found_and_the_last_token_is_left_to_compute() -> None:
    tree = Tree()
    assert tree.run("a", [1, 2, 3, 4, 5]) == 0
    assert tree.run("a", [1, 2, 3, 4, 9]) == 2
    assert tree.run("a", [1, 2, 3, 4]) == 1, "all four are cached, but one token must give the logits"
    assert tree.run("a", [1, 2, 8, 8]) == 1
    assert tree.run("a", [2, 1, 3, 4, 5]) == 0
    tree.check()


def test_another_scope_never_meets_them() -> None:
    tree = Tree()
    tree.run("a", [1, 2, 3, 4, 5])
    assert tree.run("b", [1, 2, 3, 4, 5]) == 0
    assert tree.run("a", [1, 2, 3, 4, 5]) == 2
    assert tree.run("b", [1, 2, 3, 4, 5]) == 2
    tree.check()


def test_what_nobody_holds_is_evictable_and_what_somebody_reads_is_not() -> None:
    tree = Tree(pages=4)
    tree.run("a", [1, 2, 3, 4, 5])
    assert (tree.cache.pages, tree.cache.evictable_pages) == (2, 2)
    reader = tree.start("a", [1, 2, 3, 4, 5])
    assert reader is not None
    assert tree.cache.evictable_pages == 0
    assert not tree.cache.evict(2)
    tree.end(reader)
    assert tree.cache.evict(4)
    assert tree.cache.pages == 0
    tree.check()


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    tree = Tree(pages=6)
    for tokens in ([1, 1, 7], [2, 2, 7], [3, 3, 7]):
        tree.run("a", tokens)
    tree.run("a", [1, 1, 8])
    assert tree.cache.evict(tree.allocator.free_pages + 1)
    assert tree.run("a", [1, 1, 9]) == 1
    assert tree.run("a", [3, 3, 9]) == 1
    assert tree.run("a", [2, 2, 9]) == 0, "it was the one that nobody had asked for longest"


def test_a_twin_s_page_is_given_back_when_the_tree_has_it_already() -> None:
    tree = Tree()
    first, second = tree.start("a", [1, 2, 3]), tree.start("a", [1, 2, 3])
    assert first is not None
    assert second is not None
    assert first.pages[0] != second.pages[0]
    tree.share(first)
    used = tree.allocator.used_pages
    tree.share(second)
    assert second.pages[0] == first.pages[0]
    assert tree.allocator.used_pages == used - 1
    tree.check()


def test_a_node_whose_page_changed_hands_is_not_handed_over_and_all_after_it_is_forgotten() -> None:
    tree = Tree()
    tree.run("a", [1, 2, 3, 4, 5, 6, 7])
    second = tree.cache.lock_longest("a", [1, 2, 3, 4, 5])
    assert second is not None
    tree.cache.unlock(second)
    # Somebody's bug frees the page under the tree, and another request gets it.
    tree.allocator.free(second.claim)
    thief = tree.allocator.allocate(1)
    assert thief is not None
    assert thief.pages == [second.page]
    assert tree.run("a", [1, 2, 3, 4, 5, 6, 8]) == 1
    assert tree.allocator.quarantine.handovers_refused == 1
    assert second.page in tree.allocator.quarantine
    assert not second.attached
    tree.allocator.free(thief)
    tree.check()
    assert tree.allocator.withheld_pages == 1


def test_a_part_that_is_cut_off_under_its_readers_goes_when_the_last_of_them_does() -> None:
    tree = Tree()
    tree.run("a", [1, 2, 3, 4, 5])
    one, other = tree.start("a", [1, 2, 3, 4, 5]), tree.start("a", [1, 2, 3, 4, 6])
    assert one is not None
    assert other is not None
    tree.cache.condemn(one.node, [one.pages[0]])
    assert tree.cache.pages == 0
    tree.check()
    tree.end(one, share=False)
    tree.check()
    tree.end(other)
    tree.check()
    assert tree.allocator.used_pages == 0
    assert tree.cache.pages == 0, "nothing is added to a part that was cut off"


def test_a_page_in_quarantine_is_not_shared() -> None:
    tree = Tree()
    holder = tree.start("a", [1, 2, 3, 4, 5])
    assert holder is not None
    tree.allocator.abort([holder.pages[1]])
    tree.end(holder)
    assert tree.cache.pages == 1
    tree.check()


def test_asking_again_and_again_keeps_the_order_of_eviction_small() -> None:
    tree = Tree()
    for _ in range(500):
        tree.run("a", [1, 2, 3, 4, 5])
    assert len(tree.cache._heap) < 100
    tree.check()


moves = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "share", "end", "abort", "free_under"]),
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(0, 99),
    ),
    max_size=40,
)


@given(moves=moves, pages=st.integers(5, 14))
def test_in_any_history_hits_are_right_and_no_page_is_lost(
    moves: list[tuple[str, str, list[int], int]], pages: int
) -> None:
    """Few tokens, so that prefixes meet; pages are freed under whoever holds them, and all those stop."""
    tree = Tree(pages)
    for move, scope, tokens, number in moves:
        if move == "start":
            tree.start(scope, tokens)
        elif move == "free_under":
            free_under_somebody(tree, number)
        elif tree.holders:
            holder = tree.holders[number % len(tree.holders)]
            if move == "share":
                tree.share(holder)
            else:
                tree.end(holder, share=move == "end")
        tree.check()
        assert tree.allocator.free_pages + tree.allocator.used_pages + tree.allocator.withheld_pages == pages
    for holder in list(tree.holders):
        tree.end(holder)
    tree.cache.clear()
    tree.check()
    assert tree.allocator.used_pages == tree.cache.pages == 0


def free_under_somebody(tree: Tree, number: int) -> None:
    """A page in use is freed by somebody's bug; whoever remembers it finds out in its next step, and ends."""
    in_use = sorted(tree.allocator._used)
    if not in_use:
        return
    page = in_use[number % len(in_use)]
    tree.allocator.free(Claim([page], [tree.tags.tag(page)]))
    for holder in list(tree.holders):
        stale = [one for one, tag in zip(holder.pages, holder.tags, strict=True) if not tree.allocator.holds(one, tag)]
        if stale:
            tree.cache.condemn(holder.node, stale)
            tree.allocator.abort(stale)
            tree.end(holder, share=False)
