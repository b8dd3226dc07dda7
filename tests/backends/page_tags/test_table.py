import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.page_tags.table import TAG_MAX, UNTAGGED, TagTable


def test_every_change_of_hands_changes_the_tag() -> None:
    table = TagTable(4)
    seen = {table.tag(2)}
    for _ in range(50):
        [tag] = table.allocate([2])
        assert table.owned(2)
        assert tag not in seen
        seen.add(tag)
        table.free([2])
        assert not table.owned(2)
        assert table.tag(2) not in seen
        seen.add(table.tag(2))


def test_tags_come_back_in_the_order_of_the_pages() -> None:
    table = TagTable(4)
    table.allocate([3])
    table.free([3])
    assert table.allocate([3, 0]) == [table.tag(3), table.tag(0)]
    assert table.tag(3) != table.tag(0)


def test_the_last_generation_is_followed_by_one_that_is_free_and_not_zero() -> None:
    table = TagTable(1)
    table.memory[0] = TAG_MAX - 1
    assert table.allocate([0]) == [TAG_MAX]
    table.free([0])
    assert table.tag(0) not in (UNTAGGED, TAG_MAX)
    assert not table.owned(0)
    assert table.allocate([0])[0] != UNTAGGED


def test_a_page_that_is_freed_or_handed_out_twice_is_a_bug() -> None:
    table = TagTable(2)
    with pytest.raises(AssertionError, match="page 1 is freed twice"):
        table.free([1])
    table.allocate([1])
    with pytest.raises(AssertionError, match="page 1 is handed out twice"):
        table.allocate([1])


def test_clear_takes_every_owner_away_and_touches_nothing_else() -> None:
    table = TagTable(3)
    given_tags = table.allocate([0, 2])
    table.clear()
    assert [table.owned(page) for page in range(3)] == [False, False, False]
    assert table.tag(1) == UNTAGGED
    assert [table.tag(0), table.tag(2)] != given_tags


@given(st.lists(st.integers(0, 7), max_size=200), st.integers(0, TAG_MAX))
def test_in_any_history_only_the_last_holder_of_a_page_knows_its_tag(steps: list[int], start: int) -> None:
    """Each step frees the page if it has an owner and hands it out if it has none."""
    table = TagTable(8)
    for page in range(8):
        table.memory[page] = start - start % 2  # free, anywhere in the range: the wrap is within reach
    remembered: dict[int, list[int]] = {page: [] for page in range(8)}
    for page in steps:
        if table.owned(page):
            table.free([page])
            assert table.tag(page) not in remembered[page]
        else:
            [tag] = table.allocate([page])
            assert tag not in remembered[page]
            assert tag != UNTAGGED
            remembered[page].append(tag)
