"""Budgets: UTC calendar periods, every level held, nothing to reset and nothing forgotten."""

import asyncio
from datetime import UTC, datetime

import pytest

from billing.budgets import BudgetPeriod, Budgets
from billing.credit.process import ProcessCredit
from billing.errors import BudgetExceeded, BudgetNotFound, LedgerConflict
from billing.ledger.wallet import Wallets
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT
from tests.billing.credit.test_process import spending
from tests.billing.rows import event_row, post_rows
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

COST = 1_010_000


def ns(text: str) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return int(moment.timestamp()) * 10**9


@pytest.fixture
def budgets(database: Database, clock: SettableClock) -> Budgets:
    return Budgets(database, clock=clock)


@pytest.fixture
def credit(database: Database) -> ProcessCredit:
    async def nothing_to_flush() -> None:
        pass

    return ProcessCredit(database, nothing_to_flush)


class TestPeriods:
    @pytest.mark.parametrize(
        ("at", "start", "end"),
        [
            ("2027-02-28T23:59:59", "2027-02-01", "2027-03-01"),
            ("2027-03-01T00:00:00", "2027-03-01", "2027-04-01"),
            ("2028-02-29T12:00:00", "2028-02-01", "2028-03-01"),
            ("2026-12-31T23:59:59", "2026-12-01", "2027-01-01"),
            ("2026-01-31T00:00:00", "2026-01-01", "2026-02-01"),
        ],
    )
    def test_months_are_calendar_months(self, at: str, start: str, end: str) -> None:
        assert BudgetPeriod.MONTH.around(ns(at)) == (ns(start), ns(end))
        assert BudgetPeriod.MONTH.around(ns(at) + 999_999_999) == (ns(start), ns(end))

    def test_days_begin_at_midnight_utc(self) -> None:
        assert BudgetPeriod.DAY.around(ns("2026-07-31T14:59:59")) == (ns("2026-07-31"), ns("2026-08-01"))
        assert BudgetPeriod.DAY.around(ns("2026-08-01")) == (ns("2026-08-01"), ns("2026-08-02"))

    def test_a_total_has_no_end(self) -> None:
        start, end = BudgetPeriod.TOTAL.around(ns("2026-08-01"))
        assert (start, end) == (0, 2**63 - 1)


@over_both_databases
class TestStandings:
    def test_a_new_budget_counts_the_whole_current_period(
        self, budgets: Budgets, database: Database, clock: SettableClock
    ) -> None:
        clock.now_ns = ns("2026-11-20")
        post_rows(
            database,
            event_row(id="october", started_at_ns=ns("2026-10-31T23:59:59")),
            event_row(id="november", started_at_ns=ns("2026-11-01")),
        )
        assert budgets.add(ACCOUNT, 5 * COST, BudgetPeriod.MONTH).spent_nano == COST
        assert budgets.standings(ACCOUNT, ns("2026-10-15"))[0].spent_nano == COST

    def test_it_counts_its_own_key_and_model(self, budgets: Budgets, database: Database) -> None:
        post_rows(
            database,
            event_row(id="r1", key_id="1" * 32),
            event_row(id="r2", model="@cf/other"),
            event_row(id="r3", account_id=OTHER_ACCOUNT),
        )
        spent = [
            budgets.add(ACCOUNT, COST, BudgetPeriod.TOTAL, key_id=key_id, model=model).spent_nano
            for key_id, model in (
                (None, None),
                ("1" * 32, None),
                (None, MODEL),
                (KEY, "@cf/other"),
                ("1" * 32, "@cf/other"),
            )
        ]
        assert spent == [2 * COST, COST, COST, COST, 0]

    def test_a_removed_one_and_a_foreign_one_are_unknown(self, budgets: Budgets) -> None:
        mine = budgets.add(ACCOUNT, 1, BudgetPeriod.DAY).budget.id
        foreign = budgets.add(OTHER_ACCOUNT, 1, BudgetPeriod.DAY).budget.id
        budgets.remove(ACCOUNT, mine)
        assert budgets.standings(ACCOUNT) == []
        for budget_id in (mine, foreign, "none"):
            with pytest.raises(BudgetNotFound):
                budgets.remove(ACCOUNT, budget_id)

    @pytest.mark.parametrize("limit_nano", [-1, 10**16])
    def test_a_limit_that_can_not_be_meant_is_refused(self, budgets: Budgets, limit_nano: int) -> None:
        with pytest.raises(LedgerConflict):
            budgets.add(ACCOUNT, limit_nano, BudgetPeriod.DAY)


@over_both_databases
class TestHolds:
    async def test_a_key_with_a_small_budget_under_a_rich_account_passes_once(
        self, budgets: Budgets, credit: ProcessCredit
    ) -> None:
        budgets.add(ACCOUNT, COST, BudgetPeriod.TOTAL, key_id=KEY)
        results = await asyncio.gather(
            *(credit.hold(spending(10**11), f"r{number}", COST) for number in range(50)), return_exceptions=True
        )
        assert [type(result) for result in results].count(BudgetExceeded) == 49
        await credit.hold(spending(10**11, key_id="1" * 32), "another key", COST)

    async def test_a_soft_one_refuses_nothing(self, budgets: Budgets, credit: ProcessCredit) -> None:
        budgets.add(ACCOUNT, 0, BudgetPeriod.TOTAL, hard=False)
        await credit.hold(spending(None), "r1", COST)

    async def test_an_extension_is_refused_where_a_hold_would_be(self, budgets: Budgets, credit: ProcessCredit) -> None:
        budgets.add(ACCOUNT, COST, BudgetPeriod.DAY)
        await credit.hold(spending(None), "r1", COST - 10)
        assert not await credit.extend("r1", 11)
        assert await credit.extend("r1", 10)
        credit.settle("r1", 500)
        await credit.hold(spending(None), "r2", COST - 500)

    async def test_what_was_spent_before_this_process_counts(
        self, budgets: Budgets, credit: ProcessCredit, database: Database
    ) -> None:
        at_ns = ns("2026-11-02T10:00:00")
        post_rows(database, event_row(started_at_ns=at_ns))
        budgets.add(ACCOUNT, 2 * COST, BudgetPeriod.DAY, model=MODEL)
        await credit.hold(spending(None, at_ns=at_ns), "r1", COST)
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(None, at_ns=at_ns), "r2", 1)

    async def test_a_daily_one_has_its_whole_amount_each_day(
        self, budgets: Budgets, credit: ProcessCredit, database: Database
    ) -> None:
        budgets.add(ACCOUNT, COST, BudgetPeriod.DAY)
        for day in (1, 2, 3):
            at_ns = ns(f"2026-11-0{day}T23:59:59")
            await credit.hold(spending(None, at_ns=at_ns), f"r{day}", COST)
            post_rows(database, event_row(id=f"r{day}", started_at_ns=at_ns))
            credit.settle(f"r{day}", COST)
            with pytest.raises(BudgetExceeded):
                await credit.hold(spending(None, at_ns=at_ns + 999_999_999), "again", 1)
        assert budgets.standings(ACCOUNT, ns("2026-11-02"))[0].spent_nano == COST

    async def test_one_for_an_end_user_has_its_whole_amount_each_day_and_binds_nobody_else(
        self, budgets: Budgets, database: Database, credit: ProcessCredit, clock: SettableClock
    ) -> None:
        clock.now_ns = ns("2026-11-01T12:00:00")
        budget = budgets.add(ACCOUNT, COST, BudgetPeriod.DAY, end_user="ada", model=MODEL).budget
        for day in (1, 2, 3):
            at_ns = ns(f"2026-11-0{day}T12:00:00")
            await credit.hold(spending(None, at_ns=at_ns, end_user="ada"), f"first {day}", COST)
            with pytest.raises(BudgetExceeded):
                await credit.hold(spending(None, at_ns=at_ns, end_user="ada"), f"second {day}", 1)
            await credit.hold(spending(None, at_ns=at_ns, end_user="bob"), f"of bob {day}", COST)
            await credit.hold(spending(None, at_ns=at_ns), f"of nobody {day}", COST)
            row = event_row(id=f"r{day}", started_at_ns=at_ns, end_user="ada")
            post_rows(
                database, row, row | {"id": f"b{day}", "end_user": "bob"}, row | {"id": f"n{day}", "end_user": None}
            )
            credit.settle(f"first {day}", COST)
        assert budgets.standings(ACCOUNT, ns("2026-11-02"))[0].spent_nano == COST == budget.limit_nano
        total = budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.TOTAL, end_user="ada", key_id=KEY)
        assert total.spent_nano == 3 * COST

    async def test_a_request_that_is_late_over_midnight_counts_for_its_own_day(
        self, budgets: Budgets, credit: ProcessCredit
    ) -> None:
        budgets.add(ACCOUNT, COST, BudgetPeriod.DAY)
        midnight = ns("2026-11-02")
        await credit.hold(spending(None, at_ns=midnight - 2), "yesterday's", COST)
        await credit.hold(spending(None, at_ns=midnight), "today's", COST)
        for at_ns in (midnight - 1, midnight + 1):
            with pytest.raises(BudgetExceeded):
                await credit.hold(spending(None, at_ns=at_ns), "too much", 1)
        credit.settle("yesterday's", 0)
        await credit.hold(spending(None, at_ns=midnight - 1), "late", COST)
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(None, at_ns=midnight + 1), "too much", 1)

    async def test_a_budget_set_while_requests_run_counts_what_they_hold(
        self, budgets: Budgets, credit: ProcessCredit
    ) -> None:
        await credit.hold(spending(None), "running", 600)
        budgets.add(ACCOUNT, 1_000, BudgetPeriod.TOTAL)
        await credit.refresh()
        with pytest.raises(BudgetExceeded, match=r"0\.0000004 are left"):
            await credit.hold(spending(None), "r2", 401)
        await credit.hold(spending(None), "r2", 400)

    async def test_a_removed_one_refuses_nothing_more(self, budgets: Budgets, credit: ProcessCredit) -> None:
        budget_id = budgets.add(ACCOUNT, 0, BudgetPeriod.TOTAL).budget.id
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(None), "r1", 1)
        budgets.remove(ACCOUNT, budget_id)
        await credit.refresh()
        await credit.hold(spending(None), "r1", 1)

    async def test_a_free_request_passes_an_exhausted_one(self, budgets: Budgets, credit: ProcessCredit) -> None:
        budgets.add(ACCOUNT, 0, BudgetPeriod.TOTAL)
        await credit.hold(spending(None), "free", 0)

    async def test_a_restart_refills_nothing(self, budgets: Budgets, database: Database, credit: ProcessCredit) -> None:
        budgets.add(ACCOUNT, COST, BudgetPeriod.TOTAL, model=MODEL)
        Wallets(database, clock=lambda: 1).top_up(ACCOUNT, 10**9, idempotency_key="rich")
        post_rows(database, event_row())
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending(None), "r1", 1)
