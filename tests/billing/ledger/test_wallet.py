"""Deeds on money: booked once, taken back once, and never out of nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from billing.audit import violations
from billing.errors import IdempotencyMismatch, LedgerConflict, TransactionNotFound
from billing.funds import read_revisions
from billing.ledger.payers import AccountMode
from billing.ledger.statement import read_statement
from billing.ledger.transactions import BREAKAGE, CASH, PROMOTION, REVENUE, posted_nano
from billing.ledger.wallet import AMOUNT_NANO_MAX, Wallets
from billing.price_book import set_price
from billing.rollups import DAY_NS
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

COST = 1_010_000  # of the default row


@pytest.fixture
def wallets(database: Database, clock: SettableClock) -> Wallets:
    with database.write() as connection:
        set_price(connection, price())
    return Wallets(database, clock=clock)


@pytest.fixture
def balances(database: Database) -> Callable[[], dict[str, int]]:
    """The service's own accounts."""

    def read() -> dict[str, int]:
        with database.read() as connection:
            return {account.id: posted_nano(connection, account) for account in (CASH, PROMOTION, REVENUE, BREAKAGE)}

    return read


class TestTopUp:
    def test_it_is_in_the_wallet(self, wallets: Wallets, balances: Callable[[], dict[str, int]]) -> None:
        booked = wallets.top_up(ACCOUNT, 500, idempotency_key="k1", memo="invoice 7")
        assert (booked.source, booked.replayed) == (f"top-up:{ACCOUNT}:k1", False)
        assert wallets.show(ACCOUNT).wallet_nano == 500
        assert balances()["cash"] == -500

    def test_a_repeated_one_is_booked_once(self, wallets: Wallets, database: Database) -> None:
        sources = {wallets.top_up(ACCOUNT, 500, idempotency_key="k1").source for _ in range(3)}
        assert len(sources) == 1
        assert wallets.top_up(ACCOUNT, 500, idempotency_key="k1").replayed
        assert wallets.show(ACCOUNT).wallet_nano == 500
        assert violations(database) == []

    def test_another_amount_under_the_same_key_is_refused(self, wallets: Wallets) -> None:
        wallets.top_up(ACCOUNT, 500, idempotency_key="k1")
        with pytest.raises(IdempotencyMismatch):
            wallets.top_up(ACCOUNT, 501, idempotency_key="k1")
        assert wallets.show(ACCOUNT).wallet_nano == 500

    def test_accounts_do_not_share_keys(self, wallets: Wallets) -> None:
        wallets.top_up(ACCOUNT, 500, idempotency_key="k1")
        wallets.top_up(OTHER_ACCOUNT, 700, idempotency_key="k1")
        assert (wallets.show(ACCOUNT).wallet_nano, wallets.show(OTHER_ACCOUNT).wallet_nano) == (500, 700)

    @pytest.mark.parametrize("amount_nano", [0, -1, AMOUNT_NANO_MAX + 1])
    def test_an_amount_that_can_not_be_meant_is_refused(self, wallets: Wallets, amount_nano: int) -> None:
        with pytest.raises(LedgerConflict):
            wallets.top_up(ACCOUNT, amount_nano, idempotency_key="k1")

    @pytest.mark.parametrize("key", ["", "x" * 101, "a\nb", "ü"])
    def test_a_key_that_can_not_be_kept_is_refused(self, wallets: Wallets, key: str) -> None:
        with pytest.raises(LedgerConflict):
            wallets.top_up(ACCOUNT, 1, idempotency_key=key)

    @pytest.mark.parametrize("memo", ["x" * 201, "two\nlines"])
    def test_a_memo_that_can_not_be_kept_is_refused(self, wallets: Wallets, memo: str) -> None:
        with pytest.raises(LedgerConflict):
            wallets.top_up(ACCOUNT, 1, idempotency_key="k1", memo=memo)
        assert wallets.show(ACCOUNT).wallet_nano == 0

    def test_every_deed_raises_the_revision(self, wallets: Wallets, database: Database) -> None:
        wallets.top_up(ACCOUNT, 1, idempotency_key="k1")
        first = read_revisions(database)[ACCOUNT]
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        assert read_revisions(database)[ACCOUNT] > first


class TestAtOnce:
    """Deeds by several threads, each on a connection of its own."""

    def test_the_same_deed_is_booked_once(self, wallets: Wallets, database: Database) -> None:
        with ThreadPoolExecutor(6) as threads:
            deeds = [threads.submit(wallets.top_up, ACCOUNT, 500, idempotency_key="k") for _ in range(12)]
        assert sorted(deed.result().replayed for deed in deeds) == [False] + [True] * 11
        assert wallets.show(ACCOUNT).wallet_nano == 500
        assert violations(database) == []

    def test_a_grant_is_used_up_and_no_further_by_postings_side_by_side(
        self, wallets: Wallets, database: Database
    ) -> None:
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        wallets.grant(ACCOUNT, 3 * COST, idempotency_key="g")
        with ThreadPoolExecutor(6) as threads:
            posts = [threads.submit(post_rows, database, event_row(id=f"r{number}")) for number in range(8)]
        for post in posts:
            post.result()
        view = wallets.show(ACCOUNT)
        assert (view.grants[0].left_nano, view.wallet_nano) == (0, -5 * COST)
        assert violations(database) == []


class TestGrants:
    def test_a_repeated_one_is_given_once_and_other_terms_are_refused(
        self, wallets: Wallets, clock: SettableClock
    ) -> None:
        later = clock() + DAY_NS
        wallets.grant(ACCOUNT, 500, idempotency_key="g", expires_at_ns=later)
        assert wallets.grant(ACCOUNT, 500, idempotency_key="g", expires_at_ns=later).replayed
        for amount, priority, expiry in ((501, 0, later), (500, 1, later), (500, 0, None)):
            with pytest.raises(IdempotencyMismatch):
                wallets.grant(ACCOUNT, amount, idempotency_key="g", priority=priority, expires_at_ns=expiry)
        (grant,) = wallets.show(ACCOUNT).grants
        assert (grant.amount_nano, grant.left_nano, grant.expires_at_ns) == (500, 500, later)

    def test_one_that_has_expired_already_is_refused(self, wallets: Wallets, clock: SettableClock) -> None:
        with pytest.raises(LedgerConflict):
            wallets.grant(ACCOUNT, 500, idempotency_key="g", expires_at_ns=clock())

    def test_they_are_used_by_priority_then_expiry_and_before_the_wallet(
        self, wallets: Wallets, database: Database, clock: SettableClock
    ) -> None:
        now = clock()
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        wallets.top_up(ACCOUNT, COST, idempotency_key="t")
        wallets.grant(ACCOUNT, 400_000, idempotency_key="never expires")
        wallets.grant(ACCOUNT, 400_000, idempotency_key="soon", expires_at_ns=now + 10)
        wallets.grant(ACCOUNT, 400_000, idempotency_key="last", priority=9, expires_at_ns=now + 5)
        post_rows(database, event_row(started_at_ns=now))
        left = {(grant.priority, grant.expires_at_ns): grant.left_nano for grant in wallets.show(ACCOUNT).grants}
        assert left == {(0, now + 10): 0, (0, None): 0, (9, now + 5): 190_000}
        post_rows(database, event_row(id="r2", started_at_ns=now))
        assert wallets.show(ACCOUNT).wallet_nano == COST - (COST - 190_000)
        assert violations(database) == []

    @pytest.mark.load
    def test_what_is_left_expires_a_day_late_and_once(
        self, wallets: Wallets, clock: SettableClock, balances: Callable[[], dict[str, int]], database: Database
    ) -> None:
        wallets.grant(ACCOUNT, 500, idempotency_key="g", expires_at_ns=clock() + 10)
        clock.now_ns += DAY_NS
        assert wallets.expire_due() == 0
        clock.now_ns += 10
        assert wallets.expire_due() == 1
        assert wallets.expire_due() == 0
        assert balances() == {"cash": 0, "promotion": -500, "revenue": 0, "breakage": 500}
        assert wallets.show(ACCOUNT).grants[0].left_nano == 0
        assert violations(database) == []

    def test_usage_from_before_an_expiry_is_still_paid_by_the_grant_and_later_usage_is_not(
        self, wallets: Wallets, database: Database, clock: SettableClock
    ) -> None:
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        expiry = clock() + 10
        wallets.grant(ACCOUNT, 3 * COST, idempotency_key="g", expires_at_ns=expiry)
        clock.now_ns = expiry + 1_000
        post_rows(database, event_row(started_at_ns=expiry - 1), event_row(id="r2", started_at_ns=expiry))
        view = wallets.show(ACCOUNT)
        assert (view.grants[0].left_nano, view.wallet_nano) == (2 * COST, -COST)


class TestReversals:
    def test_usage_goes_back_where_it_came_from_once(
        self, wallets: Wallets, database: Database, balances: Callable[[], dict[str, int]], clock: SettableClock
    ) -> None:
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        wallets.top_up(ACCOUNT, 10_000_000, idempotency_key="t")
        wallets.grant(ACCOUNT, 10_000, idempotency_key="g")
        post_rows(database, event_row())
        clock.advance_s(1)
        booked = wallets.reverse(ACCOUNT, "usage:request-1", memo="wrong price")
        assert wallets.reverse(ACCOUNT, "usage:request-1").replayed
        view = wallets.show(ACCOUNT)
        assert (view.wallet_nano, view.grants[0].left_nano) == (10_000_000, 10_000)
        assert balances()["revenue"] == 0
        assert violations(database) == []
        newest = read_statement(database, ACCOUNT, 1)[0]
        assert (newest.source, newest.reverses, newest.memo) == (booked.source, "usage:request-1", "wrong price")

    def test_postpaid_usage_is_owed_no_more(self, wallets: Wallets, database: Database) -> None:
        post_rows(database, event_row())
        assert wallets.show(ACCOUNT).owed_nano == COST
        wallets.reverse(ACCOUNT, "usage:request-1")
        assert wallets.show(ACCOUNT).owed_nano == 0

    def test_money_that_is_spent_can_not_be_taken_back(self, wallets: Wallets, database: Database) -> None:
        wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
        wallets.top_up(ACCOUNT, COST, idempotency_key="t")
        post_rows(database, event_row())
        with pytest.raises(LedgerConflict):
            wallets.reverse(ACCOUNT, f"top-up:{ACCOUNT}:t")
        assert violations(database) == []

    def test_an_unused_grant_can_be_taken_back_and_a_reversal_can_not(self, wallets: Wallets) -> None:
        source = wallets.grant(ACCOUNT, 500, idempotency_key="g").source
        reversal = wallets.reverse(ACCOUNT, source).source
        assert wallets.show(ACCOUNT).grants[0].left_nano == 0
        with pytest.raises(LedgerConflict):
            wallets.reverse(ACCOUNT, reversal)

    def test_a_foreign_transaction_is_as_unknown_as_none(self, wallets: Wallets) -> None:
        source = wallets.top_up(OTHER_ACCOUNT, 500, idempotency_key="t").source
        messages = set()
        for asked in (source, "usage:none"):
            with pytest.raises(TransactionNotFound) as refusal:
                wallets.reverse(ACCOUNT, asked)
            messages.add(refusal.value.message)
        assert len(messages) == 1
        assert wallets.show(OTHER_ACCOUNT).wallet_nano == 500


def test_a_statement_shows_each_transaction_once_newest_first(wallets: Wallets, database: Database) -> None:
    for number in range(7):
        wallets.top_up(ACCOUNT, 1 + number, idempotency_key=f"t{number}")
    wallets.top_up(OTHER_ACCOUNT, 1, idempotency_key="foreign")
    seen: list[str] = []
    before: tuple[int, str] | None = None
    while page := read_statement(database, ACCOUNT, 3, before):
        seen += [line.source.rpartition(":")[2] for line in page]
        before = (page[-1].posted_at_ns, page[-1].source)
    assert seen == [f"t{number}" for number in reversed(range(7))]
    assert read_statement(database, ACCOUNT, 1)[0].entries == (("cash", -7), (f"wallet:{ACCOUNT}", 7))
