"""SGLang's book-keeping in small: allocations, row writes, releases, and whose pages are whose before a pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backends.sglang import page_steps
from backends.sglang.page_guard import PageGuard
from backends.sglang.page_steps import PADDING_PAGE, Writes

PAGE = 4
ROW_TOKENS = 32


class Pools:
    """An allocator and a table of rows as SGLang has them, reporting to a guard. First freed, first handed out."""

    def __init__(self, pages: int, rows: int = 6) -> None:
        self.row_slots = torch.zeros((rows, ROW_TOKENS), dtype=torch.int32)
        self.guard = PageGuard(self.row_slots, pages=pages, page_tokens=PAGE)
        self.free = list(range(1, pages + 1))

    def allocate(self) -> int:
        page = self.free.pop(0)
        self.guard.handed_out(slots_of(page))
        return page

    def release(self, *pages: int) -> None:
        self.free += self.guard.released(torch.tensor(pages, dtype=torch.int64)).tolist()

    def take_row(self, row: int) -> None:
        self.guard.row_taken(row)

    def write(self, row: int, column: int, page: int, *, tokens: int = PAGE, at: int = 0) -> None:
        """Point `tokens` positions of a column at a page, beginning with its position `at`."""
        first = column * PAGE + at
        self.row_slots[row, first : first + tokens] = slots_of(page)[at : at + tokens].to(torch.int32)
        self.guard.written_run(row, first, first + tokens)

    def failed(self, *rows: int, length: int = PAGE) -> list[int]:
        """Whoever fails a pass in which each of these rows writes its last token, by position in `rows`."""
        slots = self.row_slots[list(rows), length - 1].to(torch.int64) if rows else torch.zeros(0, dtype=torch.int64)
        lengths = torch.full((len(rows),), length, dtype=torch.int64)
        return self.guard.check_decode(torch.tensor(rows, dtype=torch.int64), lengths, slots).failed()


def slots_of(page: int) -> Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


def with_a_request(pools: Pools, row: int = 1) -> int:
    """A request in `row` that owns the page of its first column."""
    pools.take_row(row)
    page = pools.allocate()
    pools.write(row, 0, page)
    return page


class TestOwners:
    def test_read_their_own_pages(self) -> None:
        pools = Pools(8)
        with_a_request(pools, 1)
        with_a_request(pools, 2)
        assert pools.failed(1, 2) == []

    def test_share_a_prefix_page_after_their_rows_are_pointed_at_it(self) -> None:
        pools = Pools(8)
        shared, own = with_a_request(pools, 1), with_a_request(pools, 2)
        pools.write(2, 0, shared)  # the prefix cache keeps one of two equal pages,
        pools.release(own)  # and frees the other
        assert pools.failed(1, 2) == []

    def test_get_new_tags_when_a_row_is_used_again(self) -> None:
        pools = Pools(2)
        page = with_a_request(pools)
        pools.release(page)
        pools.allocate()
        assert with_a_request(pools) == page
        assert pools.failed(1) == []

    def test_only_columns_in_use_count(self) -> None:
        pools = Pools(8)
        page = with_a_request(pools)
        pools.write(1, 1, pools.allocate(), tokens=1)
        pools.release(int(pools.row_slots[1, PAGE]) // PAGE)
        assert page != PADDING_PAGE
        assert pools.failed(1, length=PAGE) == []
        assert pools.failed(1, length=PAGE + 1) == [0]


class TestStaleHolders:
    def test_are_found_when_their_page_is_free(self) -> None:
        pools = Pools(8)
        pools.release(with_a_request(pools))
        assert pools.failed(1) == [0]

    def test_are_found_when_somebody_else_has_their_page(self) -> None:
        pools = Pools(1)
        page = with_a_request(pools, 1)
        pools.release(page)
        assert with_a_request(pools, 2) == page
        assert pools.failed(1, 2) == [0]
        assert pools.failed(2, 1) == [1]

    def test_are_not_forgiven_by_the_next_write_into_the_page(self) -> None:
        pools = Pools(1)
        pools.take_row(1)
        page = pools.allocate()
        pools.write(1, 0, page, tokens=1)
        pools.release(page)
        assert with_a_request(pools, 2) == page
        pools.write(1, 0, page, tokens=1, at=1)
        assert pools.failed(1, 2, length=2) == [0]

    def test_are_found_when_a_free_page_is_put_into_their_row(self) -> None:
        pools = Pools(8)
        pools.take_row(1)
        pools.write(1, 0, 5)
        assert pools.failed(1) == [0]

    def test_are_found_when_a_row_changed_behind_our_back(self) -> None:
        pools = Pools(8)
        with_a_request(pools, 1)
        other = with_a_request(pools, 2)
        pools.row_slots[1, :PAGE] = pools.row_slots[2, :PAGE]
        assert other != PADDING_PAGE
        assert pools.failed(1, 2) == [0]

    def test_are_found_when_an_owned_page_is_handed_out_again(self) -> None:
        pools = Pools(8)
        page = with_a_request(pools)
        pools.guard.handed_out(slots_of(page))
        assert pools.failed(1) == [0]

    def test_are_found_after_a_flush(self) -> None:
        pools = Pools(8)
        with_a_request(pools)
        pools.guard.cleared()
        assert pools.failed(1) == [0]


class TestContainment:
    def test_a_stopped_row_touches_padding_and_the_new_owner_keeps_its_page(self) -> None:
        pools = Pools(1)
        page = with_a_request(pools, 1)
        pools.release(page)
        with_a_request(pools, 2)
        assert pools.guard.contain(1, PAGE) == [page]
        assert pools.row_slots[1, :PAGE].tolist() == [0, 0, 0, 0]
        pools.release(int(pools.row_slots[1, 0]) // PAGE)  # the stopped request ends
        assert pools.failed(2) == []

    def test_a_quarantined_page_is_never_handed_out_again(self) -> None:
        pools = Pools(1)
        page = with_a_request(pools, 1)
        pools.release(page)
        with_a_request(pools, 2)
        pools.guard.contain(1, PAGE)
        pools.release(page)
        assert pools.free == []

    def test_a_page_that_is_released_twice_is_free_once(self) -> None:
        pools = Pools(1)
        page = with_a_request(pools)
        pools.release(page, page)
        pools.release(page)
        assert pools.free == [page]

    def test_the_padding_page_is_never_free(self) -> None:
        pools = Pools(1)
        pools.release(PADDING_PAGE)
        assert pools.free == [1]

    def test_a_stopped_row_stays_stale_whatever_is_written_into_it(self) -> None:
        """Its next pass may be under way, and rewrite its row from what the scheduler remembers of its prompt."""
        pools = Pools(1)
        page = with_a_request(pools, 1)
        pools.release(page)
        with_a_request(pools, 2)
        pools.guard.contain(1, PAGE)
        pools.write(1, 0, page)
        assert pools.failed(1, 2) == [0]


class TestWrites:
    def test_that_do_not_go_where_the_row_says_fail(self) -> None:
        pools = Pools(8)
        page = with_a_request(pools, 1)
        elsewhere = torch.tensor([slots_of(page)[-1] + 1])
        verdict = pools.guard.check_decode(torch.tensor([1]), torch.tensor([PAGE]), elsewhere)
        assert verdict.failed() == [0]
        assert elsewhere.tolist() == [PADDING_PAGE]

    def test_of_a_failed_request_go_to_padding_and_the_others_stay(self) -> None:
        """Prompts: 4 tokens of one request, 3 of another, 4 of a third; the second's page is foreign."""
        pools = Pools(8)
        pages = [with_a_request(pools, row) for row in (1, 2, 3)]
        pools.release(pages[1])
        slots = torch.cat([slots_of(pages[0]), slots_of(pages[1])[:3], slots_of(pages[2])])
        writes = Writes(slots.clone(), torch.tensor([4, 7, 11]))
        verdict = pools.guard.check(torch.tensor([1, 2, 3]), torch.tensor([4, 3, 4]), writes)
        assert verdict.failed() == [1]
        assert writes.slots.tolist() == [*slots[:4].tolist(), 0, 0, 0, *slots[7:].tolist()]


def test_pages_of_one_token_are_pages_too() -> None:
    row_slots = torch.zeros((2, 4), dtype=torch.int32)
    guard = PageGuard(row_slots, pages=4, page_tokens=1)
    slots = torch.tensor([2, 3])
    guard.handed_out(slots)
    row_slots[1, :2] = slots.to(torch.int32)
    guard.written(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert guard.check_decode(torch.tensor([1]), torch.tensor([2]), slots[1:].clone()).failed() == []
    assert guard.released(torch.tensor([3])).tolist() == [3]
    assert guard.check_decode(torch.tensor([1]), torch.tensor([2]), slots[1:].clone()).failed() == [0]


def test_a_rehearsal_leaves_no_trace() -> None:
    pools = Pools(2)
    pools.guard.rehearse()
    with_a_request(pools, 1)
    with_a_request(pools, 2)
    assert pools.failed(1, 2) == []
    assert pools.failed(3) == [0]


def test_counts_the_pages_that_it_compares() -> None:
    pools = Pools(8)
    pools.guard.count(torch.tensor([1, PAGE, PAGE + 1]))
    assert pools.guard.pairs_checked == 4


@pytest.mark.load
@given(st.data())
def test_in_any_history_exactly_those_who_lost_a_page_are_found(data: st.DataObject) -> None:
    """Requests come and go and share pages; now and then a page is freed under whoever has it."""
    pools = Pools(10, rows=5)
    # By row: the page of each column, and whether it was lost.
    held: dict[int, list[int]] = {}
    lost: dict[int, set[int]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        row = data.draw(st.integers(1, 4))
        deed = data.draw(st.sampled_from(["grow", "share", "end", "steal"]))
        if row not in held:
            pools.take_row(row)
            held[row], lost[row] = [], set()
        columns = held[row]
        if deed == "grow" and pools.free and len(columns) < ROW_TOKENS // PAGE:
            columns.append(pools.allocate())
            pools.write(row, len(columns) - 1, columns[-1])
        elif deed == "share" and len(columns) < ROW_TOKENS // PAGE:
            sharers = [r for r in held if held[r] and r != row and not lost[r]]
            if sharers:
                columns.append(held[data.draw(st.sampled_from(sharers))][0])
                pools.write(row, len(columns) - 1, columns[-1])
        elif deed == "end":
            others = {page for r, pages in held.items() if r != row for page in pages}
            pools.release(*[p for c, p in enumerate(columns) if p not in others and c not in lost[row]])
            del held[row], lost[row]
        elif deed == "steal" and columns and not lost[row]:
            page = columns[-1]
            pools.release(page)
            for r, pages in held.items():
                lost[r] |= {c for c, p in enumerate(pages) if p == page}
        for r, pages in held.items():
            if pages:
                stale = page_steps.stale_columns(pools.guard.book, r, len(pages) * PAGE)
                assert stale.nonzero().flatten().tolist() == sorted(lost[r]), (r, pages)
                assert pools.failed(r, length=len(pages) * PAGE) == ([0] if lost[r] else [])
