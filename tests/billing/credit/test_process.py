"""ProcessCredit: never a nano-dollar above the limit, settled once, and right about what was spent before."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.budgets import BudgetPeriod, Budgets
from billing.credit.process import ProcessCredit
from billing.credit.protocol import Spending
from billing.errors import BillingUnavailable, BudgetExceeded, InsufficientCredits
from billing.funds import Funds, read_funds
from billing.ledger.payers import AccountMode, HoldMode
from billing.ledger.wallet import Wallets
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.spool import Spool
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tenancy.key_groups import KeyGroups
from tests.billing.builders import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT, price, record
from tests.billing.rows import event_row, post_rows
from tests.examples import examples
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

NOW_NS = 1_795_867_200_000_000_000  # 2026-11-28T12:00:00Z


def spending(limit_nano: int | None, **values: Any) -> Spending:
    """key_id: of a key in the account's default project, which was not rotated."""
    defaults: dict[str, Any] = {
        "account_id": ACCOUNT,
        "groups": KeyGroups(values.pop("key_id", KEY), ACCOUNT),
        "model": MODEL,
        "at_ns": NOW_NS,
    }
    return Spending(**defaults | values, limit_nano=limit_nano)


async def _nothing_to_flush() -> None:
    pass


@pytest.fixture
def credit(database: Database) -> ProcessCredit:
    return ProcessCredit(database, _nothing_to_flush)


def _spend(database: Database, request_id: str, cost_nano: int, account_id: str = ACCOUNT) -> None:
    post_rows(database, event_row(id=request_id, account_id=account_id, cost_nano=cost_nano))


async def test_exactly_those_that_fit_pass_of_two_hundred_at_once(credit: ProcessCredit) -> None:
    results = await asyncio.gather(
        *(credit.hold(spending(5_050_000), f"r{number}", 1_010_000) for number in range(200)),
        return_exceptions=True,
    )
    assert [type(result) for result in results].count(InsufficientCredits) == 195
    assert credit.held_nano() == 5_050_000


async def test_a_refusal_says_how_much_is_left_and_holds_nothing(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 400)
    with pytest.raises(InsufficientCredits, match=r"0\.000000601 USD, the account has 0\.0000006 left"):
        await credit.hold(spending(1_000), "r2", 601)
    await credit.hold(spending(1_000), "r3", 600)
    assert credit.held_nano() == 1_000


async def test_what_a_hold_did_not_use_comes_back(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 1_000)
    credit.settle("r1", 300)
    await credit.hold(spending(1_000), "r2", 700)
    with pytest.raises(InsufficientCredits):
        await credit.hold(spending(1_000), "r3", 1)


async def test_a_second_settle_changes_nothing(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 1_000)
    for _ in range(3):
        credit.settle("r1", 300)
    credit.settle("never held", 300)
    await credit.hold(spending(1_000), "r2", 700)
    assert credit.held_nano() == 700


async def test_a_cost_above_its_hold_counts_in_full(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 100)
    credit.settle("r1", 1_600)
    assert credit.over_hold_nano == 1_500
    with pytest.raises(InsufficientCredits, match="has 0 left"):
        await credit.hold(spending(1_000), "r2", 1)
    await credit.hold(spending(1_000), "free", 0)


async def test_an_extension_fits_or_changes_nothing(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 400)
    assert await credit.extend("r1", 600)
    assert not await credit.extend("r1", 1)
    assert credit.held_nano() == 1_000
    credit.settle("r1", 0)
    assert credit.held_nano() == 0


async def test_without_a_limit_nothing_is_refused_and_holds_are_counted(credit: ProcessCredit) -> None:
    for number in range(100):
        await credit.hold(spending(None), f"r{number}", 10**15)
        assert await credit.extend(f"r{number}", 10**15)
    assert credit.held_nano() == 200 * 10**15


async def test_accounts_do_not_spend_each_others_money(credit: ProcessCredit) -> None:
    await credit.hold(spending(1_000), "r1", 1_000)
    await credit.hold(spending(1_000, account_id=OTHER_ACCOUNT), "r2", 1_000)


async def test_what_was_spent_before_this_process_counts(credit: ProcessCredit, database: Database) -> None:
    _spend(database, "old", 700)
    _spend(database, "others", 10**9, OTHER_ACCOUNT)
    with pytest.raises(InsufficientCredits):
        await credit.hold(spending(1_000), "r1", 301)
    await credit.hold(spending(1_000), "r2", 300)


async def test_records_that_are_not_drained_yet_count_too(
    database: Database, price_book: PriceBook, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spool = Spool(tmp_path_factory.mktemp("spool"))
    metering = Metering(spool, database, price_book)
    await metering.finish(record("old"), price())
    assert metering.lag_records() == 1
    credit = ProcessCredit(database, metering.flush)
    with pytest.raises(InsufficientCredits):
        await credit.hold(spending(1_010_000), "r1", 1)
    await credit.hold(spending(1_010_001), "r2", 1)
    spool.close()


async def test_first_uses_at_once_share_one_load(credit: ProcessCredit, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = 0

    def counting(*args: Any, **options: Any) -> Funds:
        nonlocal loads
        loads += 1
        return read_funds(*args, **options)

    monkeypatch.setattr("billing.credit.process.read_funds", counting)
    await asyncio.gather(*(credit.hold(spending(1_000), f"r{number}", 1) for number in range(50)))
    await credit.hold(spending(1_000), "later", 1)
    assert loads == 1


async def test_a_client_that_leaves_does_not_end_the_load_of_the_others(database: Database) -> None:
    gate = asyncio.Event()

    async def flush() -> None:
        await gate.wait()

    credit = ProcessCredit(database, flush)
    leaving, staying = (asyncio.create_task(credit.hold(spending(1_000), name, 1)) for name in ("leaving", "staying"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.set()
    await staying
    assert credit.held_nano() == 1


@pytest.mark.parametrize("trouble", [BillingUnavailable("away"), TenancyUnavailable("away")])
async def test_funds_must_be_known_before_anything_is_held(database: Database, trouble: Exception) -> None:
    failing = True

    async def flush() -> None:
        if failing:
            raise trouble

    credit = ProcessCredit(database, flush)
    with pytest.raises(BillingUnavailable):
        await credit.hold(spending(1_000), "r1", 1)
    failing = False
    await credit.hold(spending(1_000), "r1", 1)
    assert credit.held_nano() == 1


class TestFundsThatAreReadAgain:
    """A request that runs meanwhile may be recorded before, while or after they are read."""

    flush: Callable[[], Awaitable[None]] = staticmethod(_nothing_to_flush)

    @pytest.fixture
    async def running(self, database: Database) -> ProcessCredit:
        """One request holds 500; whatever is known of the account is to be read again."""

        async def flush() -> None:
            await self.flush()

        credit = ProcessCredit(database, flush)
        await credit.hold(spending(1_000), "running", 500)
        Wallets(database, clock=lambda: 1).set_mode(ACCOUNT, AccountMode.POSTPAID)
        await credit.refresh()
        return credit

    async def _left(self, credit: ProcessCredit) -> int:
        low, high = 0, 1_000
        while low < high:
            middle = (low + high + 1) // 2
            try:
                await credit.hold(spending(1_000), "probe", middle)
            except InsufficientCredits:
                high = middle - 1
            else:
                credit.settle("probe", 0)
                low = middle
        return low

    async def test_it_settled_before(self, running: ProcessCredit, database: Database) -> None:
        _spend(database, "running", 300)
        running.settle("running", 300)
        assert await self._left(running) == 700

    @pytest.mark.parametrize("in_the_sum", [True, False])
    async def test_it_settles_while_they_are_read(
        self,
        running: ProcessCredit,
        database: Database,
        in_the_sum: bool,  # noqa: FBT001 - a table's column
    ) -> None:
        async def flush() -> None:
            if in_the_sum:
                _spend(database, "running", 300)
            running.settle("running", 300)

        self.flush = flush
        assert await self._left(running) == 700

    async def test_another_waits_while_they_are_read(self, running: ProcessCredit) -> None:
        gate = asyncio.Event()

        async def flush() -> None:
            await gate.wait()

        self.flush = flush
        others = [asyncio.create_task(running.hold(spending(limit), f"r{limit}", 0)) for limit in (1_000, None)]
        done, _ = await asyncio.wait(others, timeout=0.02)
        assert not done
        gate.set()
        await asyncio.gather(*others)
        assert await self._left(running) == 500

    async def test_it_is_recorded_before_and_settles_after(self, running: ProcessCredit, database: Database) -> None:
        _spend(database, "running", 300)
        assert await self._left(running) == 500
        running.settle("running", 300)
        assert await self._left(running) == 700

    async def test_it_is_recorded_and_settles_after(self, running: ProcessCredit, database: Database) -> None:
        assert await self._left(running) == 500
        _spend(database, "running", 300)
        running.settle("running", 300)
        assert await self._left(running) == 700


class TestWallet:
    """A prepaid account holds against what it has, whatever its credit limit says."""

    @pytest.fixture
    def wallets(self, database: Database) -> Wallets:
        wallets = Wallets(database, clock=lambda: NOW_NS)
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        return wallets

    async def test_parallel_requests_do_not_overdraw_it(self, credit: ProcessCredit, wallets: Wallets) -> None:
        wallets.top_up(ACCOUNT, 5_050_000, idempotency_key="first")
        results = await asyncio.gather(
            *(credit.hold(spending(None), f"r{number}", 1_010_000) for number in range(200)), return_exceptions=True
        )
        assert [type(result) for result in results].count(InsufficientCredits) == 195
        assert credit.held_nano() == 5_050_000

    async def test_an_empty_one_refuses_all_but_what_is_free(self, credit: ProcessCredit, wallets: Wallets) -> None:
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(None), "priced", 1)
        await credit.hold(spending(None), "free", 0)

    async def test_a_top_up_is_noticed(self, credit: ProcessCredit, wallets: Wallets) -> None:
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(None), "r1", 1)
        wallets.top_up(ACCOUNT, 10, idempotency_key="first")
        await credit.refresh()
        await credit.hold(spending(None), "r1", 10)

    async def test_a_budget_that_is_set_while_funds_are_read_is_not_overlooked(
        self, credit: ProcessCredit, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        was_read, may_end = threading.Event(), threading.Event()

        def slow(*args: Any, **options: Any) -> Funds:
            funds = read_funds(*args, **options)
            was_read.set()
            assert may_end.wait(60)
            return funds

        monkeypatch.setattr("billing.credit.process.read_funds", slow)
        first = asyncio.create_task(credit.hold(spending(None), "first", 0))
        assert await asyncio.to_thread(was_read.wait, 60)
        Budgets(database, clock=lambda: NOW_NS).add(ACCOUNT, 5, BudgetPeriod.DAY)
        await credit.refresh()
        may_end.set()
        await first
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(None), "second", 6)

    async def test_a_reading_that_outlasts_looks_for_deeds_is_the_last_where_there_was_none(
        self, credit: ProcessCredit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loop, reads = asyncio.get_running_loop(), 0

        def slow(*args: Any, **options: Any) -> Funds:
            nonlocal reads
            reads += 1
            asyncio.run_coroutine_threadsafe(credit.refresh(), loop).result(60)
            return read_funds(*args, **options)

        monkeypatch.setattr("billing.credit.process.read_funds", slow)
        await credit.hold(spending(None), "r1", 0)
        assert reads == 1

    async def test_a_grant_counts_until_it_expires(self, credit: ProcessCredit, wallets: Wallets) -> None:
        wallets.grant(ACCOUNT, 100, idempotency_key="welcome", expires_at_ns=NOW_NS + 50)
        wallets.top_up(ACCOUNT, 10, idempotency_key="first")
        await credit.hold(spending(None, at_ns=NOW_NS + 49), "before", 105)
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(None, at_ns=NOW_NS + 50), "at", 1)
        credit.settle("before", 0)
        await credit.hold(spending(None, at_ns=NOW_NS + 50), "after", 10)

    async def test_a_cost_beyond_it_is_charged_and_the_next_request_is_refused(
        self, credit: ProcessCredit, wallets: Wallets, database: Database
    ) -> None:
        wallets.top_up(ACCOUNT, 1_000, idempotency_key="first")
        await credit.hold(spending(None), "r1", 1_000)
        _spend(database, "r1", 3_000)
        credit.settle("r1", 3_000)
        assert wallets.show(ACCOUNT).wallet_nano == -2_000
        wallets.top_up(ACCOUNT, 2_000, idempotency_key="second")
        await credit.refresh()
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(None), "r2", 1)


steps = st.lists(
    st.tuples(st.sampled_from(["hold", "extend", "settle"]), st.integers(0, 9), st.integers(0, 400)),
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
@given(steps, st.integers(0, 1_000))
async def test_any_history_stays_under_the_limit_at_every_instant(
    database: Database, history: list[tuple[str, int, int]], limit_nano: int
) -> None:
    credit = ProcessCredit(database, _nothing_to_flush)
    held: dict[int, int] = {}
    spent = 0
    for step, number, amount in history:
        name = f"r{number}"
        fits = amount == 0 or spent + sum(held.values()) + amount <= limit_nano
        if step == "hold" and number not in held:
            if fits:
                await credit.hold(spending(limit_nano), name, amount)
                held[number] = amount
            else:
                with pytest.raises(InsufficientCredits):
                    await credit.hold(spending(limit_nano), name, amount)
        elif step == "extend" and number in held:
            assert await credit.extend(name, amount) is fits
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


class TestClamping:
    """An account that would rather have a shorter answer holds what is left, in whole outputs of seven here."""

    @staticmethod
    def in_sevens(left_nano: int) -> int:
        return left_nano // 7 * 7

    @pytest.fixture
    def wallets(self, database: Database) -> Wallets:
        wallets = Wallets(database, clock=lambda: NOW_NS)
        wallets.set_hold_mode(ACCOUNT, HoldMode.CLAMP)
        return wallets

    async def test_it_holds_what_is_left_and_then_is_refused(self, wallets: Wallets, credit: ProcessCredit) -> None:
        assert wallets.show(ACCOUNT).hold_mode is HoldMode.CLAMP
        assert await credit.hold(spending(100), "r1", 60, clamp=self.in_sevens) == 60
        assert await credit.hold(spending(100), "r2", 60, clamp=self.in_sevens) == 35
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(100), "r3", 60, clamp=self.in_sevens)
        assert credit.held_nano() == 95

    async def test_the_least_that_any_limit_leaves_is_held_and_nobody_is_told_of_a_refusal(
        self, database: Database, wallets: Wallets
    ) -> None:
        assert wallets
        told: list[str] = []
        credit = ProcessCredit(database, _nothing_to_flush, lambda _account, budget, *_: told.append(budget))
        budgets = Budgets(database, clock=lambda: NOW_NS)
        for limit_nano in (50, 30):
            budgets.add(ACCOUNT, limit_nano, BudgetPeriod.DAY)
        assert await credit.hold(spending(45), "r1", 60, clamp=self.in_sevens) == 28
        assert told == []
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(45), "r2", 60, clamp=self.in_sevens)
        assert len(told) == 1

    async def test_other_accounts_and_holds_without_a_clamp_are_refused(
        self, wallets: Wallets, credit: ProcessCredit
    ) -> None:
        assert wallets
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(100, account_id=OTHER_ACCOUNT), "r1", 101, clamp=self.in_sevens)
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(100), "r2", 101)
        wallets.set_hold_mode(ACCOUNT, HoldMode.REFUSE)
        await credit.refresh()
        with pytest.raises(InsufficientCredits):
            await credit.hold(spending(100), "r3", 101, clamp=self.in_sevens)
