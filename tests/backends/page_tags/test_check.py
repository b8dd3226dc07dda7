import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.page_tags.check import StepCheck, mismatches
from backends.page_tags.table import TAG_MAX, UNTAGGED, Claim, TagTable


def claim(table: TagTable, pages: list[int]) -> Claim:
    return Claim(pages, table.allocate(pages))


def test_owners_of_their_pages_pass() -> None:
    table = TagTable(8)
    check = StepCheck(table)
    assert check.stale_pages([claim(table, [1, 2]), claim(table, [3]), Claim([], [])]) == {}
    assert check.pairs_checked == 3


def test_a_page_that_changed_hands_fails_its_old_holder_alone() -> None:
    table = TagTable(8)
    check = StepCheck(table)
    old, bystander = claim(table, [1, 2, 3]), claim(table, [4])
    table.free([2])
    new = claim(table, [2])
    assert check.stale_pages([bystander, old, new]) == {1: [2]}


def test_a_freed_page_is_stale_before_anybody_else_has_it() -> None:
    table = TagTable(8)
    old = claim(table, [5, 6])
    table.free([5, 6])
    assert StepCheck(table).stale_pages([old]) == {0: [5, 6]}


def test_a_shared_page_fails_everyone_who_holds_it() -> None:
    table = TagTable(8)
    first = claim(table, [1])
    second = Claim([1, 2], [*first.tags, *table.allocate([2])])
    table.free([1])
    assert StepCheck(table).stale_pages([first, second]) == {0: [1], 1: [1]}


def test_expecting_no_tag_is_stale_even_on_a_page_that_has_none() -> None:
    table = TagTable(2)
    assert StepCheck(table).stale_pages([Claim([0], [UNTAGGED])]) == {0: [0]}


def test_tags_past_the_signed_range_compare_by_their_bits() -> None:
    table = TagTable(1)
    table.memory[0] = TAG_MAX - 1
    held = claim(table, [0])
    assert held.tags == [TAG_MAX]
    check = StepCheck(table)
    assert check.stale_pages([held]) == {}
    assert check.stale_pages([Claim([0], [TAG_MAX - 2])]) == {0: [0]}


def test_no_pairs_are_no_verdicts() -> None:
    assert StepCheck(TagTable(1)).stale_pages([]) == {}


def test_the_comparison_says_which_pairs_differ() -> None:
    tags, pages = torch.tensor([0, 1, 3, 5], dtype=torch.int32), torch.tensor([1, 2, 3, 0])
    expected = torch.tensor([1, 1, 5, UNTAGGED], dtype=torch.int32)
    assert mismatches(tags, pages, expected).tolist() == [False, True, False, True]


@pytest.mark.load
@given(st.data())
def test_in_any_history_exactly_the_stale_holders_fail(data: st.DataObject) -> None:
    """Requests come, share pages of others and go; some go on using pages that were freed under them."""
    table = TagTable(12)
    check = StepCheck(table)
    holders: list[dict[int, int]] = []  # page -> tag, by request
    for _ in range(data.draw(st.integers(1, 25))):
        page = data.draw(st.integers(0, 11))
        if table.owned(page) and data.draw(st.booleans()):
            table.free([page])
        elif not table.owned(page):
            holders.append({page: table.allocate([page])[0]})
        elif holders:
            data.draw(st.sampled_from(holders))[page] = table.tag(page)
        found = check.stale_pages([Claim(list(held), list(held.values())) for held in holders])
        expected = {
            position: [page for page, tag in held.items() if table.tag(page) != tag]
            for position, held in enumerate(holders)
        }
        assert found == {position: pages for position, pages in expected.items() if pages}
