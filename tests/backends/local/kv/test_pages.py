import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.kv.pages import PageAllocator
from backends.page_tags.table import UNTAGGED, Claim, TagTable


def tagged(total: int, page_size: int = 16) -> PageAllocator:
    return PageAllocator(total, page_size, tags=TagTable(total))


def taken(allocator: PageAllocator, count: int) -> Claim:
    claim = allocator.allocate(count)
    assert claim is not None
    return claim


@given(
    total=st.integers(1, 40),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 45)), max_size=80),
    with_tags=st.booleans(),
)
def test_no_history_of_taking_and_giving_back_loses_or_doubles_a_page(
    total: int, moves: list[tuple[bool, int]], *, with_tags: bool
) -> None:
    allocator = tagged(total) if with_tags else PageAllocator(total, 16)
    owned: list[Claim] = []
    for takes, number in moves:
        if takes:
            free_before = allocator.free_pages
            claim = allocator.allocate(number)
            assert (claim is None) == (number > free_before)
            if claim is not None:
                assert len(claim.pages) == len(claim.tags) == number
                owned.append(claim)
        elif owned:
            allocator.free(owned.pop(number % len(owned)))
        allocator.check_integrity(owned)
        assert allocator.free_pages + allocator.used_pages == total


def test_a_refused_allocation_takes_nothing() -> None:
    allocator = PageAllocator(3, 16)
    assert allocator.allocate(4) is None
    assert allocator.free_pages == 3


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_tokens_round_up_to_pages(tokens: int, pages: int) -> None:
    assert PageAllocator(4, 16).pages_for(tokens) == pages


def test_freeing_a_page_twice_is_a_bug_where_no_tag_tells_it() -> None:
    allocator = PageAllocator(2, 16)
    claim = taken(allocator, 1)
    allocator.free(claim)
    with pytest.raises(AssertionError, match="not in use"):
        allocator.free(claim)


def test_without_a_tag_table_every_claim_is_believed_and_no_tag_is_given() -> None:
    allocator = PageAllocator(2, 16)
    assert taken(allocator, 2).tags == [UNTAGGED, UNTAGGED]
    assert allocator.holds(0, 12345)


def test_a_stale_claim_frees_nothing_of_the_page_s_new_owner() -> None:
    allocator = tagged(1)
    old = taken(allocator, 1)
    allocator.free(old)
    new = taken(allocator, 1)
    allocator.free(old)
    assert allocator.used_pages == 1
    assert allocator.holds(new.pages[0], new.tags[0])
    assert not allocator.holds(old.pages[0], old.tags[0])
    allocator.check_integrity([old, new])


def test_a_free_page_of_a_stopped_request_leaves_circulation_at_once() -> None:
    allocator = tagged(3)
    claim = taken(allocator, 1)
    allocator.free(claim)
    assert allocator.abort(claim.pages) == claim.pages
    assert (allocator.free_pages, allocator.withheld_pages) == (2, 1)
    assert allocator.allocate(3) is None
    allocator.check_integrity([])


def test_a_page_in_quarantine_that_has_an_owner_stays_its_and_is_withheld_when_freed() -> None:
    allocator = tagged(2)
    owner = taken(allocator, 1)
    allocator.abort(owner.pages)
    assert allocator.holds(owner.pages[0], owner.tags[0])
    assert not allocator.shareable(owner.pages[0], owner.tags[0])
    allocator.check_integrity([owner])
    allocator.free(owner)
    assert (allocator.free_pages, allocator.used_pages, allocator.withheld_pages) == (1, 0, 1)


def test_a_page_that_is_refused_where_it_changes_hands_stops_nobody() -> None:
    allocator = tagged(2)
    allocator.refuse([1])
    assert allocator.quarantine.handovers_refused == 1
    assert allocator.quarantine.requests_aborted == 0
    assert allocator.free_pages == 1


def test_a_page_that_is_on_the_free_list_although_it_has_an_owner_makes_its_old_owner_stale() -> None:
    allocator = tagged(2)
    owner = taken(allocator, 1)
    allocator._free.append(owner.pages[0])
    twin = taken(allocator, 1)
    assert twin.pages == owner.pages
    assert allocator.holds(twin.pages[0], twin.tags[0])
    assert not allocator.holds(owner.pages[0], owner.tags[0])
    allocator.free(owner)
    assert allocator.used_pages == 1


def test_integrity_notices_a_page_with_two_owners_and_a_lost_one() -> None:
    allocator = PageAllocator(4, 16)
    claim = taken(allocator, 2)
    with pytest.raises(AssertionError, match="two owners"):
        allocator.check_integrity([claim, Claim(claim.pages[:1], claim.tags[:1])])
    with pytest.raises(AssertionError, match="differ"):
        allocator.check_integrity([Claim(claim.pages[:1], claim.tags[:1])])


def test_the_page_freed_last_is_handed_out_first() -> None:
    allocator = PageAllocator(8, 16)
    first = taken(allocator, 2)
    taken(allocator, 1)
    allocator.free(first)
    assert taken(allocator, 1).pages == [first.pages[-1]]
