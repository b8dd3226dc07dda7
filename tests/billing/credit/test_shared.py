"""Several processes hold against one account: together never more than there is, and all of it can be used."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.budgets import BudgetPeriod, Budgets
from billing.credit.protocol import Spending
from billing.credit.shared import SharedCredit
from billing.errors import BillingUnavailable, BudgetExceeded, InsufficientCredits
from billing.ledger.payers import AccountMode, HoldMode
from billing.ledger.posting import post_usage
from billing.ledger.wallet import Wallets
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.tables import allowances
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tenancy.key_groups import KeyGroups
from tests.billing.builders import ACCOUNT, KEY, MODEL, facts, price, record
from tests.billing.rows import event_row, wipe
from tests.examples import examples
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

NOW_NS = 1_795_867_200_000_000_000  # 2026-11-28T12:00:00Z
COST = 1_010_000
LEASE_S = 60


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOW_NS)


@dataclass
class Process:
    """A gateway's credit, and what its drain would post. ended: rows of usage_events that are not in SQL yet."""

    database: Database
    credit: SharedCredit
    ended: list[dict[str, Any]] = field(default_factory=list)

    async def hold(self, name: str, amount_nano: int, **values: Any) -> None:
        await self.credit.hold(spending(**values), name, amount_nano)

    def settle(self, name: str, cost_nano: int, **values: Any) -> None:
        self.ended.append(event_row(id=name, started_at_ns=NOW_NS, cost_nano=cost_nano, neurons_micro=0, **values))
        self.credit.settle(name, cost_nano)

    async def post(self) -> None:
        async with self.credit.lock:
            amounts = await self.database.call(self._post)
            self.credit.posted([row["id"] for row in self.ended], amounts)
        self.ended = []

    def _post(self) -> Any:
        with self.database.write() as connection:
            fresh = post_usage(connection, self.ended, NOW_NS)
            return self.credit.post(connection, fresh)


Start = Callable[..., Process]


@pytest.fixture
def start(database: Database, clock: SettableClock) -> Start:
    def begin(name: str = "p1", **options: Any) -> Process:
        credit = SharedCredit(database, name, lease_s=LEASE_S, clock=clock, **options)
        credit._lease_until_ns = clock.now_ns + 55 * 10**9  # as open does, without asking the database
        return Process(database, credit)

    return begin


@pytest.fixture
def wallets(database: Database, clock: SettableClock) -> Wallets:
    wallets = Wallets(database, clock=clock)
    wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
    return wallets


def spending(**values: Any) -> Spending:
    defaults: dict[str, Any] = {
        "account_id": ACCOUNT,
        "groups": KeyGroups(values.pop("key_id", KEY), ACCOUNT),
        "model": MODEL,
        "at_ns": NOW_NS,
        "limit_nano": None,
    }
    return Spending(**defaults | values)


def set_aside(database: Database) -> int:
    with database.read() as connection:
        return int(connection.scalar(sa.select(sa.func.coalesce(sa.func.sum(allowances.c.amount_nano), 0))) or 0)


async def test_exactly_those_that_fit_pass_over_four_processes(start: Start, wallets: Wallets) -> None:
    wallets.top_up(ACCOUNT, 5 * COST, idempotency_key="t")
    processes = [start(f"p{number}") for number in range(4)]
    results = await asyncio.gather(
        *(processes[number % 4].hold(f"r{number}", COST) for number in range(100)), return_exceptions=True
    )
    assert [type(result) for result in results].count(type(None)) == 5
    assert [type(result) for result in results].count(InsufficientCredits) == 95
    assert sum(process.credit.held_nano() for process in processes) == 5 * COST


async def test_a_refusal_says_how_much_is_left_and_holds_nothing(start: Start, wallets: Wallets) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    process = start()
    await process.hold("r1", 400)
    with pytest.raises(InsufficientCredits, match=r"0\.000000601 USD, the account has 0\.0000006 left"):
        await process.hold("r2", 601)
    await process.hold("r3", 600)
    assert process.credit.held_nano() == 1_000


async def test_what_one_process_does_not_use_another_can_within_seconds(
    start: Start, wallets: Wallets, clock: SettableClock, database: Database
) -> None:
    wallets.top_up(ACCOUNT, 1_000_000, idempotency_key="t")
    first, second = start("p1"), start("p2")
    await first.hold("r1", 1_000)
    assert set_aside(database) > 1_000  # more than one request's worth, while there is plenty
    first.credit.settle("r1", 0)
    clock.advance_s(3)
    await first.credit.tend()
    assert set_aside(database) == 0
    await second.hold("r2", 1_000_000)


async def test_many_requests_ask_the_database_a_few_times(
    start: Start, wallets: Wallets, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallets.top_up(ACCOUNT, 10**15, idempotency_key="t")
    process = start()
    calls = 0
    written = SharedCredit._written

    def counting(credit: SharedCredit, deed: Callable[..., Any]) -> Any:
        nonlocal calls
        calls += 1
        return written(credit, deed)

    monkeypatch.setattr(SharedCredit, "_written", counting)
    for number in range(640):
        await process.hold(f"r{number}", COST)
    assert calls <= 10


async def test_costs_that_are_posted_leave_the_balance_once(
    start: Start, wallets: Wallets, clock: SettableClock, database: Database
) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    first, second = start("p1"), start("p2")
    await first.hold("r1", 600)
    first.settle("r1", 300)
    with pytest.raises(InsufficientCredits):
        await second.hold("too much", 701)
    await first.post()
    assert wallets.show(ACCOUNT).wallet_nano == 700
    clock.advance_s(3)
    await first.credit.tend()
    assert set_aside(database) == 0
    await second.hold("r2", 700)


async def test_a_record_may_be_posted_before_it_is_settled(start: Start, wallets: Wallets) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    process = start()
    await process.hold("r1", 1_000)
    process.ended.append(event_row(id="r1", cost_nano=300, neurons_micro=0))
    await process.post()
    process.credit.settle("r1", 300)
    await process.hold("r2", 700)
    with pytest.raises(InsufficientCredits):
        await process.hold("r3", 1)


async def test_a_dead_process_keeps_its_allowance_for_a_lease(
    start: Start, wallets: Wallets, clock: SettableClock
) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    await start("dead").hold("r1", 600)
    living = start("p2")
    with pytest.raises(InsufficientCredits):
        await living.hold("r2", 401)
    clock.advance_s(LEASE_S - 1)
    with pytest.raises(InsufficientCredits):
        await living.hold("r2", 401)
    clock.advance_s(1)
    await living.hold("r2", 1_000)


async def test_a_living_process_keeps_its_allowance_for_as_long_as_a_stream_runs(
    start: Start, wallets: Wallets, clock: SettableClock
) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    streaming, other = start("p1"), start("p2")
    await streaming.hold("a long stream", 600)
    for _ in range(20):
        clock.advance_s(LEASE_S // 3)
        await streaming.credit.tend()
        with pytest.raises(InsufficientCredits):
            await other.hold("r2", 401)
    assert await streaming.credit.extend("a long stream", 400)
    assert not await streaming.credit.extend("a long stream", 1)


async def test_a_process_that_begins_again_is_free_of_its_past(
    start: Start, wallets: Wallets, database: Database
) -> None:
    wallets.top_up(ACCOUNT, 1_000, idempotency_key="t")
    await start("p1").hold("r1", 1_000)
    again = start("p1")
    await again.credit.open()
    assert set_aside(database) == 0
    await again.hold("r2", 1_000)


async def test_a_hard_budget_is_never_overspent_and_is_noted(
    start: Start, database: Database, clock: SettableClock
) -> None:
    budgets = Budgets(database, clock=clock)
    budget = budgets.add(ACCOUNT, 5 * COST, BudgetPeriod.MONTH, key_id=KEY).budget
    budgets.add(ACCOUNT, 2 * COST, BudgetPeriod.DAY, key_id="another key")
    noted: list[tuple[str, str, int, int]] = []
    processes = [start(f"p{number}", note_exhausted=lambda *told: noted.append(told)) for number in range(2)]
    results = await asyncio.gather(
        *(processes[number % 2].hold(f"r{number}", COST) for number in range(20)), return_exceptions=True
    )
    assert [type(result) for result in results].count(BudgetExceeded) == 15
    assert {told[1] for told in noted} == {budget.id}
    from_ns, _ = BudgetPeriod.MONTH.around(NOW_NS)
    assert {told[2] for told in noted} == {from_ns}
    await processes[0].hold("a month later", COST, at_ns=NOW_NS + 31 * 86_400 * 10**9)


async def test_an_end_users_budget_is_shared_by_processes_and_bounds_nobody_else(
    start: Start, database: Database, clock: SettableClock
) -> None:
    Budgets(database, clock=clock).add(ACCOUNT, 1_000, BudgetPeriod.MONTH, end_user="ada")
    first, second = start("p1"), start("p2")
    await first.hold("r1", 600, end_user="ada")
    with pytest.raises(BudgetExceeded):
        await second.hold("too much", 401, end_user="ada")
    await second.hold("of bob", 10_000, end_user="bob")
    second.settle("of bob", 10_000, end_user="bob")
    first.settle("r1", 300, end_user="ada")
    await first.post()
    await second.post()
    clock.advance_s(3)
    await first.credit.tend()
    assert set_aside(database) == 0
    await second.hold("r2", 700, end_user="ada")
    with pytest.raises(BudgetExceeded):
        await first.hold("r3", 1, end_user="ada")


async def test_a_request_that_costs_nothing_outlives_what_is_put_away(start: Start, wallets: Wallets) -> None:
    wallets.top_up(ACCOUNT, 1, idempotency_key="t")
    process = start()
    await process.hold("free", 0)
    await process.credit.tend()
    process.settle("free", 0)
    await process.post()
    await process.credit.tend()
    assert process.credit.held_nano() == 0


async def test_a_credit_limit_counts_what_is_owed(start: Start) -> None:
    process = start()
    await process.hold("r1", 400, limit_nano=1_000)
    process.settle("r1", 400)
    await process.post()
    with pytest.raises(InsufficientCredits):
        await process.hold("r2", 601, limit_nano=1_000)
    await process.hold("r3", 600, limit_nano=1_000)


async def test_without_any_bound_nothing_is_set_aside(start: Start, database: Database) -> None:
    process = start()
    for number in range(10):
        await process.hold(f"r{number}", 10**15)
    assert set_aside(database) == 0
    assert process.credit.held_nano() == 10**16


async def test_a_new_budget_is_noticed(start: Start, database: Database, clock: SettableClock) -> None:
    process = start()
    await process.hold("r1", COST)
    Budgets(database, clock=clock).add(ACCOUNT, COST, BudgetPeriod.TOTAL)
    await process.credit.refresh()
    with pytest.raises(BudgetExceeded):
        await process.hold("r2", 2 * COST)


async def test_without_the_database_work_goes_on_inside_the_allowance_until_the_lease_ends(
    start: Start, wallets: Wallets, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallets.top_up(ACCOUNT, 10**12, idempotency_key="t")
    process = start()
    await process.hold("r0", 1_000)

    async def away(*_: object) -> None:
        raise TenancyUnavailable("away")

    monkeypatch.setattr(process.database, "call", away)
    for number in range(1, 40):
        await process.hold(f"r{number}", 1_000)
    with pytest.raises(BillingUnavailable):
        await process.hold("more than it has", 10**9)
    clock.advance_s(LEASE_S)
    with pytest.raises(BillingUnavailable):
        await process.hold("after the lease", 1_000)
    assert process.credit.held_nano() == 40_000


async def test_metering_posts_against_it(
    start: Start,
    wallets: Wallets,
    *,
    database: Database,
    price_book: PriceBook,
    tmp_path: Path,
    clock: SettableClock,
) -> None:
    wallets.top_up(ACCOUNT, 2 * COST, idempotency_key="t")
    process = start()
    spool = Spool(tmp_path / "spool")
    metering = Metering(spool, database, price_book, allowances=process.credit)
    for name in ("r1", "r2"):
        await process.hold(name, COST)
        metering.begin(facts(name))
        charge = await metering.finish(record(name), price())
        process.credit.settle(name, charge.cost_nano)
    await metering.flush()
    assert wallets.show(ACCOUNT).wallet_nano == 0
    clock.advance_s(3)
    await process.credit.tend()
    assert set_aside(database) == 0
    with pytest.raises(InsufficientCredits):
        await process.hold("r3", 1)
    spool.close()


steps = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "extend", "settle", "settle", "post", "tend", "wait", "die"]),
        st.integers(0, 2),
        st.integers(0, 400),
    ),
    max_size=40,
)


@pytest.mark.load
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(25))
@given(steps, st.integers(0, 1_500))
async def test_any_history_of_three_processes_stays_within_the_balance(
    database: Database, clock: SettableClock, start: Start, history: list[tuple[str, int, int]], balance_nano: int
) -> None:
    wipe(database)
    clock.now_ns = NOW_NS
    wallets = Wallets(database, clock=clock)
    wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
    if balance_nano:
        wallets.top_up(ACCOUNT, balance_nano, idempotency_key="t")
    processes = [start(f"p{number}") for number in range(3)]
    open_holds: list[dict[str, int]] = [{}, {}, {}]
    spent = 0
    for serial, (step, number, amount) in enumerate(history):
        process, mine = processes[number], open_holds[number]
        name = next(iter(mine), None)
        if step == "hold":
            try:
                await process.hold(f"r{serial}", amount)
                mine[f"r{serial}"] = amount
            except InsufficientCredits:
                pass
        elif step == "extend" and name is not None:
            mine[name] += amount if await process.credit.extend(name, amount) else 0
        elif step == "settle" and name is not None:
            cost = min(amount, mine.pop(name))
            process.settle(name, cost)
            spent += cost
        elif step == "post":
            await process.post()
        elif step == "tend":
            await process.credit.tend()
        elif step == "wait":
            clock.advance_s(amount / 40)
            for one in processes:
                await one.credit.tend()
        elif step == "die":
            # It comes back, posts what its spool has, and its running requests are gone.
            ended = process.ended
            processes[number] = process = start(f"p{number}")
            open_holds[number] = {}
            process.ended = ended
            await process.post()
            await process.credit.open()
        held = sum(sum(holds.values()) for holds in open_holds)
        assert sum(one.credit.held_nano() for one in processes) == held
        assert spent + held <= balance_nano
        assert wallets.show(ACCOUNT).wallet_nano >= set_aside(database)
    for process, mine in zip(processes, open_holds, strict=True):
        for name in mine:
            process.settle(name, 0)
        await process.post()
    clock.advance_s(3)
    for process in processes:
        await process.credit.tend()
    assert wallets.show(ACCOUNT).wallet_nano == balance_nano - spent
    if balance_nano > spent:
        await processes[0].hold("the rest", balance_nano - spent)


async def test_processes_that_clamp_together_hold_all_there_is_and_no_more(start: Start, wallets: Wallets) -> None:
    wallets.set_hold_mode(ACCOUNT, HoldMode.CLAMP)
    wallets.top_up(ACCOUNT, 5 * COST, idempotency_key="t")
    processes = [start(f"p{number}") for number in range(3)]
    held, refused = 0, 0
    for number in range(9):
        process = processes[number % 3]
        try:
            held += await process.credit.hold(
                spending(), f"r{number}", 2 * COST, clamp=lambda left: left // COST * COST
            )
        except InsufficientCredits:
            refused += 1
    assert (held, sum(process.credit.held_nano() for process in processes)) == (5 * COST, 5 * COST)
    assert refused > 0
