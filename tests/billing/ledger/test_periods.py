"""Which month a fact is booked in, and that a closed one never changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from billing.ledger.periods import (
    UNDATED,
    booking_month,
    close_months,
    month_after,
    month_before,
    month_bounds,
    month_of,
)
from billing.ledger.transactions import CASH, Transaction, TransactionKind, moved, post, wallet_of
from billing.rollups import DAY_NS
from billing.tables import ledger_transactions
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT
from tests.tenancy.conftest import over_both_databases

FEBRUARY = month_bounds("2028-02")


class TestCalendar:
    def test_a_leap_february_has_29_days(self) -> None:
        assert FEBRUARY[1] - FEBRUARY[0] == 29 * DAY_NS

    def test_a_month_begins_at_its_first_nanosecond_and_ends_before_the_next(self) -> None:
        start_ns, end_ns = FEBRUARY
        assert [month_of(at) for at in (start_ns - 1, start_ns, end_ns - 1, end_ns)] == [
            "2028-01",
            "2028-02",
            "2028-02",
            "2028-03",
        ]

    def test_neighbours_cross_the_year(self) -> None:
        assert (month_after("2026-12"), month_before("2027-01")) == ("2027-01", "2026-12")

    @pytest.mark.parametrize("text", ["2026", "2026-13", "2026-1", "2026-11-01", "november", "", "+026-11"])
    def test_what_is_no_month_is_said(self, text: str) -> None:
        with pytest.raises(ValueError, match="is not a month"):
            month_bounds(text)

    @given(st.integers(0, 2**62))
    def test_every_instant_lies_in_its_month(self, at_ns: int) -> None:
        start_ns, end_ns = month_bounds(month_of(at_ns))
        assert start_ns <= at_ns < end_ns


class TestBookingMonth:
    def test_a_fact_is_booked_in_its_own_month(self) -> None:
        assert booking_month(FEBRUARY[0], None) == "2028-02"
        assert booking_month(FEBRUARY[0], "2028-01") == "2028-02"

    def test_a_late_one_goes_to_the_first_open_month(self) -> None:
        assert booking_month(FEBRUARY[0], "2028-02") == "2028-03"
        assert booking_month(FEBRUARY[0], "2028-05") == "2028-06"


def _booking(number: int, account: str = ACCOUNT, at_ns: int = FEBRUARY[0]) -> Transaction:
    entries = moved(CASH, wallet_of(account), 1)
    return Transaction(f"top-up:{account}:{number}", TransactionKind.TOP_UP, account, at_ns, entries)


def _months(database: Database) -> dict[str, str]:
    with database.read() as connection:
        rows = connection.execute(sa.select(ledger_transactions.c.source, ledger_transactions.c.month))
        return {row.source.rpartition(":")[2]: row.month for row in rows}


@over_both_databases
class TestClosing:
    def test_a_closed_month_takes_nothing_more(self, database: Database) -> None:
        with database.write() as connection:
            post(connection, [_booking(1)], 0)
        with database.write() as connection:
            assert close_months(connection, "2028-02", 0) == 1
        with database.write() as connection:
            post(connection, [_booking(2)], 0)
        assert _months(database) == {"1": "2028-02", "2": "2028-03"}

    def test_only_the_named_account_is_closed(self, database: Database) -> None:
        with database.write() as connection:
            post(connection, [_booking(1), _booking(2, OTHER_ACCOUNT)], 0)
            assert close_months(connection, "2028-02", 0, ACCOUNT) == 1
            post(connection, [_booking(3), _booking(4, OTHER_ACCOUNT)], 0)
        assert _months(database) == {"1": "2028-02", "2": "2028-02", "3": "2028-03", "4": "2028-02"}

    def test_every_earlier_month_with_bookings_closes_with_it(self, database: Database) -> None:
        with database.write() as connection:
            post(connection, [_booking(1), _booking(2, at_ns=month_bounds("2027-11")[0])], 0)
            assert close_months(connection, "2028-02", 0) == 2
            assert close_months(connection, "2028-02", 0) == 0

    def test_bookings_that_race_a_close_are_in_one_month_or_the_next_and_never_added_afterwards(
        self, database: Database
    ) -> None:
        def book(number: int) -> None:
            with database.write() as connection:
                post(connection, [_booking(number)], 0)

        def close(_: int) -> int:
            with database.write() as connection:
                close_months(connection, "2028-02", 0)
            with database.read() as connection:
                query = sa.select(sa.func.count()).where(ledger_transactions.c.month == "2028-02")
                return connection.scalar(query) or 0

        with ThreadPoolExecutor(5) as threads:
            booked = [threads.submit(book, number) for number in range(20)]
            closed = threads.submit(close, 0)
            booked += [threads.submit(book, number) for number in range(20, 40)]
            for future in booked:
                future.result()
            seen_by_close = closed.result()
        # Every one that was in the month when it closed is there, and no other has come since.
        in_month = [number for number, month in _months(database).items() if month == "2028-02"]
        assert seen_by_close == 0 or len(in_month) == seen_by_close
        assert len(_months(database)) == 40

    def test_what_a_process_of_the_version_before_booked_is_dated_first(self, database: Database) -> None:
        with database.write() as connection:
            post(connection, [_booking(1)], 0)
            connection.execute(ledger_transactions.update().values(month=UNDATED))
            assert close_months(connection, "2028-02", 0) == 1
        assert _months(database) == {"1": "2028-02"}
