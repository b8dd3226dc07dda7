import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.kv.pages import PageAllocator


@given(total=st.integers(1, 40), moves=st.lists(st.tuples(st.booleans(), st.integers(0, 45)), max_size=80))
def test_no_history_of_taking_and_giving_back_loses_or_doubles_a_page(
    total: int, moves: list[tuple[bool, int]]
) -> None:
    allocator = PageAllocator(total, 16)
    owned: list[list[int]] = []
    for takes, number in moves:
        if takes:
            free_before = allocator.free_pages
            pages = allocator.allocate(number)
            assert (pages is None) == (number > free_before)
            if pages is not None:
                assert len(pages) == number
                owned.append(pages)
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


def test_freeing_a_page_twice_is_a_bug() -> None:
    allocator = PageAllocator(2, 16)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(AssertionError, match="not in use"):
        allocator.free(pages)


def test_integrity_notices_a_page_with_two_owners_and_a_lost_one() -> None:
    allocator = PageAllocator(4, 16)
    pages = allocator.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="two owners"):
        allocator.check_integrity([pages, pages[:1]])
    with pytest.raises(AssertionError, match="differ"):
        allocator.check_integrity([pages[:1]])


def test_the_page_freed_last_is_handed_out_first() -> None:
    allocator = PageAllocator(8, 16)
    first, second = allocator.allocate(2), allocator.allocate(1)
    assert first is not None
    assert second is not None
    allocator.free(first)
    assert allocator.allocate(1) == [first[-1]]
