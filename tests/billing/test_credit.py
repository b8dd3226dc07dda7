"""Credit: never a nano-dollar above the limit, settled once, and right about what was spent before."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.credit import Credit
from billing.errors import BillingUnavailable, InsufficientCredits
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.tables import usage_events
from tenancy.database import Database, insert_missing
from tenancy.errors import TenancyUnavailable
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT, price, record
from tests.billing.rows import event_row


async def _nothing_to_flush() -> None:
    pass


@pytest.fixture
def credit(database: Database) -> Credit:
    return Credit(database, _nothing_to_flush)


def _spend(database: Database, request_id: str, cost_nano: int, account_id: str = ACCOUNT) -> None:
    with database.write() as connection:
        insert_missing(connection, usage_events, [event_row(id=request_id, account_id=account_id, cost_nano=cost_nano)])


async def test_exactly_those_that_fit_pass_of_two_hundred_at_once(credit: Credit) -> None:
    results = await asyncio.gather(
        *(credit.hold(ACCOUNT, 5_050_000, f"r{number}", 1_010_000) for number in range(200)),
        return_exceptions=True,
    )
    assert [type(result) for result in results].count(InsufficientCredits) == 195
    assert credit.held_nano() == 5_050_000


async def test_a_refusal_says_how_much_is_left_and_holds_nothing(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 400)
    with pytest.raises(InsufficientCredits, match=r"0\.000000601 USD, the account has 0\.0000006 left"):
        await credit.hold(ACCOUNT, 1_000, "r2", 601)
    await credit.hold(ACCOUNT, 1_000, "r3", 600)
    assert credit.held_nano() == 1_000


async def test_what_a_hold_did_not_use_comes_back(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 1_000)
    credit.settle("r1", 300)
    await credit.hold(ACCOUNT, 1_000, "r2", 700)
    with pytest.raises(InsufficientCredits):
        await credit.hold(ACCOUNT, 1_000, "r3", 1)


async def test_a_second_settle_changes_nothing(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 1_000)
    for _ in range(3):
        credit.settle("r1", 300)
    credit.settle("never held", 300)
    await credit.hold(ACCOUNT, 1_000, "r2", 700)
    assert credit.held_nano() == 700


async def test_a_cost_above_its_hold_counts_in_full(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 100)
    credit.settle("r1", 1_600)
    with pytest.raises(InsufficientCredits, match="has 0 left"):
        await credit.hold(ACCOUNT, 1_000, "r2", 0)


async def test_an_extension_fits_or_changes_nothing(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 400)
    assert credit.extend("r1", 600)
    assert not credit.extend("r1", 1)
    assert credit.held_nano() == 1_000
    credit.settle("r1", 0)
    assert credit.held_nano() == 0


async def test_without_a_limit_nothing_is_refused_and_holds_are_counted(credit: Credit) -> None:
    for number in range(100):
        await credit.hold(ACCOUNT, None, f"r{number}", 10**15)
        assert credit.extend(f"r{number}", 10**15)
    assert credit.held_nano() == 200 * 10**15


async def test_accounts_do_not_spend_each_others_money(credit: Credit) -> None:
    await credit.hold(ACCOUNT, 1_000, "r1", 1_000)
    await credit.hold(OTHER_ACCOUNT, 1_000, "r2", 1_000)


async def test_what_was_spent_before_this_process_counts(credit: Credit, database: Database) -> None:
    _spend(database, "old", 700)
    _spend(database, "others", 10**9, OTHER_ACCOUNT)
    with pytest.raises(InsufficientCredits):
        await credit.hold(ACCOUNT, 1_000, "r1", 301)
    await credit.hold(ACCOUNT, 1_000, "r2", 300)


async def test_records_that_are_not_drained_yet_count_too(
    database: Database, price_book: PriceBook, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool"))
    metering = Metering(spool, database, price_book)
    await metering.finish(record("old"), price())
    assert metering.lag_records() == 1
    credit = Credit(database, metering.flush)
    with pytest.raises(InsufficientCredits):
        await credit.hold(ACCOUNT, 1_010_000, "r1", 1)
    await credit.hold(ACCOUNT, 1_010_001, "r2", 1)
    spool.close()


async def test_first_uses_at_once_share_one_load(credit: Credit, database: Database) -> None:
    loads = 0
    real = credit._spent

    def counting(account_id: str, open_before: frozenset[str]) -> int:
        nonlocal loads
        loads += 1
        return real(account_id, open_before)

    credit._spent = counting  # type: ignore[method-assign] # counted, not replaced
    await asyncio.gather(*(credit.hold(ACCOUNT, 1_000, f"r{number}", 1) for number in range(50)))
    await credit.hold(ACCOUNT, 1_000, "later", 1)
    assert loads == 1


async def test_a_client_that_leaves_does_not_end_the_load_of_the_others(database: Database) -> None:
    gate = asyncio.Event()

    async def flush() -> None:
        await gate.wait()

    credit = Credit(database, flush)
    leaving, staying = (asyncio.create_task(credit.hold(ACCOUNT, 1_000, name, 1)) for name in ("leaving", "staying"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.set()
    await staying
    assert credit.held_nano() == 1


@pytest.mark.parametrize("trouble", [BillingUnavailable("away"), TenancyUnavailable("away")])
async def test_what_was_spent_must_be_known_before_a_limit_is_trusted(database: Database, trouble: Exception) -> None:
    failing = True

    async def flush() -> None:
        if failing:
            raise trouble

    credit = Credit(database, flush)
    with pytest.raises(BillingUnavailable):
        await credit.hold(ACCOUNT, 1_000, "r1", 1)
    await credit.hold(ACCOUNT, None, "unlimited", 1)
    failing = False
    await credit.hold(ACCOUNT, 1_000, "r1", 1)
    assert credit.held_nano() == 2


class TestALimitThatIsSetLater:
    """A request that began without a limit may be recorded before, while or after what was spent is read."""

    async def _credit(self, database: Database, flush: Callable[[], Awaitable[None]]) -> Credit:
        credit = Credit(database, flush)
        await credit.hold(ACCOUNT, None, "unlimited", 500)
        return credit

    async def _left(self, credit: Credit, limit_nano: int) -> int:
        low, high = 0, limit_nano
        while low < high:
            middle = (low + high + 1) // 2
            try:
                await credit.hold(ACCOUNT, limit_nano, "probe", middle)
            except InsufficientCredits:
                high = middle - 1
            else:
                credit.settle("probe", 0)
                low = middle
        return low

    async def test_it_settled_before(self, database: Database) -> None:
        credit = await self._credit(database, _nothing_to_flush)
        _spend(database, "unlimited", 300)
        credit.settle("unlimited", 300)
        assert await self._left(credit, 1_000) == 700

    @pytest.mark.parametrize("in_the_sum", [True, False])
    async def test_it_settles_while_the_sum_is_read(self, database: Database, in_the_sum: bool) -> None:  # noqa: FBT001 - a table's column
        opened: list[Credit] = []

        async def flush() -> None:
            if in_the_sum:
                _spend(database, "unlimited", 300)
            opened[0].settle("unlimited", 300)

        opened.append(await self._credit(database, flush))
        assert await self._left(opened[0], 1_000) == 700

    async def test_another_without_a_limit_waits_while_the_sum_is_read(self, database: Database) -> None:
        gate = asyncio.Event()

        async def flush() -> None:
            await gate.wait()

        credit = Credit(database, flush)
        limited = asyncio.create_task(credit.hold(ACCOUNT, 1_000, "limited", 0))
        await asyncio.sleep(0)
        unlimited = asyncio.create_task(credit.hold(ACCOUNT, None, "unlimited", 0))
        done, _ = await asyncio.wait([unlimited], timeout=0.02)
        assert not done
        gate.set()
        await asyncio.gather(limited, unlimited)
        credit.settle("unlimited", 300)
        assert await self._left(credit, 1_000) == 700

    async def test_it_is_recorded_before_and_settles_after(self, database: Database) -> None:
        credit = await self._credit(database, _nothing_to_flush)
        _spend(database, "unlimited", 300)
        assert await self._left(credit, 1_000) == 500
        credit.settle("unlimited", 300)
        assert await self._left(credit, 1_000) == 700

    async def test_it_is_recorded_and_settles_after(self, database: Database) -> None:
        credit = await self._credit(database, _nothing_to_flush)
        assert await self._left(credit, 1_000) == 500
        _spend(database, "unlimited", 300)
        credit.settle("unlimited", 300)
        assert await self._left(credit, 1_000) == 700


steps = st.lists(
    st.tuples(st.sampled_from(["hold", "extend", "settle"]), st.integers(0, 9), st.integers(0, 400)),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(steps, st.integers(0, 1_000))
async def test_any_history_stays_under_the_limit_at_every_instant(
    database: Database, history: list[tuple[str, int, int]], limit_nano: int
) -> None:
    credit = Credit(database, _nothing_to_flush)
    held: dict[int, int] = {}
    spent = 0
    for step, number, amount in history:
        name = f"r{number}"
        fits = spent + sum(held.values()) + amount <= limit_nano
        if step == "hold" and number not in held:
            if fits:
                await credit.hold(ACCOUNT, limit_nano, name, amount)
                held[number] = amount
            else:
                with pytest.raises(InsufficientCredits):
                    await credit.hold(ACCOUNT, limit_nano, name, amount)
        elif step == "extend" and number in held:
            assert credit.extend(name, amount) is fits
            held[number] += amount if fits else 0
        elif step == "settle":
            cost = min(amount, held.pop(number, 0))
            credit.settle(name, cost)
            credit.settle(name, cost)
            spent += cost
        assert credit.held_nano() == sum(held.values())
        assert spent + credit.held_nano() <= limit_nano
    for number in list(held):
        credit.settle(f"r{number}", 0)
    assert credit.held_nano() == 0
