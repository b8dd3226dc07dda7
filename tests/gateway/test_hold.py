"""The one hold: taken in order, given back by whichever step refuses, settled once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InsufficientCredits
from gateway.hold import Hold, Holds, PageLedger
from tenancy.errors import ConcurrencyExceeded
from tenancy.meters.process import ProcessMeters
from tenancy.principal import Principal


class Wallet:
    """Credit with a fixed room; implements the three calls that a hold makes."""

    def __init__(self, room_nano: int) -> None:
        self.room_nano = room_nano
        self.held: dict[str, int] = {}
        self.settled: list[tuple[str, int]] = []

    async def hold(self, _spending: object, request_id: str, amount_nano: int, *, clamp: object = None) -> int:
        assert clamp is None, "nobody here has less than was asked"
        if sum(self.held.values()) + amount_nano > self.room_nano:
            raise InsufficientCredits("no room")
        self.held[request_id] = amount_nano
        return amount_nano

    async def extend(self, request_id: str, amount_nano: int) -> bool:
        if sum(self.held.values()) + amount_nano > self.room_nano:
            return False
        self.held[request_id] += amount_nano
        return True

    def settle(self, request_id: str, cost_nano: int) -> None:
        if self.held.pop(request_id, None) is not None:
            self.settled.append((request_id, cost_nano))

    def held_nano(self) -> int:
        return sum(self.held.values())


def principal(concurrency: int | None = None) -> Principal:
    return Principal(
        account_id="a" * 32, key_id="k", scopes=frozenset(), concurrency=concurrency, credit_limit_nano=None
    )


def holds(room_nano: int = 1000) -> tuple[Holds, ProcessMeters, Wallet]:
    meters, wallet = ProcessMeters(), Wallet(room_nano)
    return Holds(meters, wallet), meters, wallet  # type: ignore[arg-type]  # the wallet stands for billing.credit.Credit


async def test_money_that_is_refused_gives_the_slot_back() -> None:
    ours, meters, wallet = holds(room_nano=10)
    with pytest.raises(InsufficientCredits):
        await ours.open(principal(), "r1", 11, at_ns=0)
    assert (meters.live_slots(), wallet.held_nano(), ours.live) == (0, 0, {})


async def test_a_slot_that_is_refused_touches_no_money() -> None:
    ours, meters, wallet = holds()
    await ours.open(principal(concurrency=1), "r1", 5, at_ns=0)
    with pytest.raises(ConcurrencyExceeded):
        await ours.open(principal(concurrency=1), "r2", 5, at_ns=0)
    assert (meters.live_slots(), wallet.held_nano()) == (1, 5)


async def test_settling_closes_every_part_once() -> None:
    ours, meters, wallet = holds()
    ledger = PageLedger()
    hold = await ours.open(principal(), "r1", 5, at_ns=0)
    ledger.take("r1", 7, now=1.0)
    hold.pages_taken(ledger)
    await hold.settle(3)
    await hold.settle(3)
    assert wallet.settled == [("r1", 3)]
    assert (meters.live_slots(), wallet.held_nano(), ledger.held_pages, ours.live) == (0, 0, 0, {})


async def test_an_extension_that_does_not_fit_changes_nothing() -> None:
    ours, _, wallet = holds(room_nano=10)
    hold = await ours.open(principal(), "r1", 8, at_ns=0)
    assert not await hold.extend_money(3)
    assert await hold.extend_money(2)
    assert wallet.held_nano() == 10
    await hold.settle(10)


def test_pages_grow_with_what_the_engine_really_has_and_never_shrink() -> None:
    ledger = PageLedger()
    ledger.take("r1", 4, now=1.0)
    ledger.grow("r1", 6)
    ledger.grow("r1", 5)
    assert ledger.held_pages == 6
    ledger.grow("unknown", 9)
    assert ledger.held_pages == 6


def test_an_engine_that_started_anew_holds_nothing_for_anybody() -> None:
    ledger = PageLedger()
    ledger.take("r1", 10, now=1.0)
    ledger.clear()
    assert ledger.held_pages == 0
    assert not ledger.release("r1")


def test_a_snapshot_has_not_seen_what_was_taken_after_it() -> None:
    ledger = PageLedger()
    for number, taken_at in enumerate((1.0, 2.0, 3.0)):
        ledger.take(f"r{number}", 10, now=taken_at)
    assert [ledger.taken_since(moment) for moment in (0.5, 1.0, 2.5, 3.0)] == [30, 20, 10, 0]


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "grow", "release"]), st.integers(0, 5), st.integers(1, 50)), max_size=60
    )
)
def test_the_sum_always_equals_what_is_open(history: list[tuple[str, int, int]]) -> None:
    ledger = PageLedger()
    expected: dict[str, int] = {}
    for moment, (deed, who, pages) in enumerate(history):
        name = f"r{who}"
        if deed == "take" and name not in expected:
            ledger.take(name, pages, now=float(moment))
            expected[name] = pages
        elif deed == "grow":
            ledger.grow(name, pages)
            if name in expected:
                expected[name] = max(expected[name], pages)
        elif deed == "release":
            assert ledger.release(name) is (name in expected)
            expected.pop(name, None)
        assert ledger.held_pages == sum(expected.values())
        assert len(ledger) == len(expected)


async def test_a_settled_hold_takes_no_pages() -> None:
    ours, _, _ = holds()
    hold: Hold = await ours.open(principal(), "r1", 0, at_ns=0)
    await hold.settle(0)
    with pytest.raises(AssertionError):
        hold.pages_taken(PageLedger())
