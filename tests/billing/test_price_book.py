"""Price rows: one in force at any instant, none ever changed, absence is not zero."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.errors import BillingUnavailable, PriceConflict, PriceUnavailable
from billing.price_book import (
    Price,
    PriceBook,
    Tier,
    account_book,
    from_now,
    is_drastic,
    neurons_of,
    price_before,
    read_prices,
    seed_default_price,
    set_price,
)
from billing.tables import prices as prices_table
from tenancy.database import Database, open_database
from tests.billing.builders import ACCOUNT, MODEL, OTHER_ACCOUNT, price
from tests.examples import examples


def _set(database: Database, new: Price) -> Price:
    with database.write() as connection:
        return set_price(connection, new)


def _all(database: Database) -> list[Price]:
    with database.read() as connection:
        return read_prices(connection)


async def _book(database: Database) -> PriceBook:
    book = PriceBook(database)
    await book.refresh()
    return book


async def test_a_new_row_ends_the_one_before_it_at_its_own_beginning(database: Database) -> None:
    first = _set(database, price(effective_from_ns=100))
    second = _set(database, price(effective_from_ns=200, input_nano_per_m=7))
    book = await _book(database)
    assert book.price_in_force(MODEL, 100).version == first.version
    assert book.price_in_force(MODEL, 199).version == first.version
    assert book.price_in_force(MODEL, 200) == second
    assert book.price_in_force(MODEL, 10**18) == second


async def test_before_the_first_row_there_is_no_price(database: Database) -> None:
    _set(database, price(effective_from_ns=100))
    with pytest.raises(PriceUnavailable):
        (await _book(database)).price_in_force(MODEL, 99)


@pytest.mark.parametrize("model", [MODEL + "-x", MODEL[:-1], MODEL.upper(), "", "@cf/test"])
async def test_no_other_models_price_is_ever_taken(database: Database, model: str) -> None:
    _set(database, price())
    with pytest.raises(PriceUnavailable):
        (await _book(database)).price_in_force(model, 1)


async def test_a_price_of_zero_is_a_price(database: Database) -> None:
    _set(database, price(input_nano_per_m=0, output_nano_per_m=0))
    assert (await _book(database)).price_in_force(MODEL, 1).input_nano_per_m == 0


@pytest.mark.parametrize("from_ns", [0, 99, 100])
def test_a_row_that_begins_before_the_last_one_contradicts_it(database: Database, from_ns: int) -> None:
    _set(database, price(effective_from_ns=100))
    before = _all(database)
    with pytest.raises(PriceConflict):
        _set(database, price(effective_from_ns=from_ns))
    assert _all(database) == before


@pytest.mark.parametrize(
    "field", ["input_nano_per_m", "cached_input_nano_per_m", "output_nano_per_m", "output_neurons_per_m"]
)
@pytest.mark.parametrize("amount", [-1, 10**13 + 1])
def test_an_amount_out_of_range_is_refused(database: Database, field: str, amount: int) -> None:
    with pytest.raises(PriceConflict):
        _set(database, price(**{field: amount}))
    assert _all(database) == []


async def test_another_book_or_tier_is_not_the_list_price(database: Database) -> None:
    _set(database, price(book="org"))
    _set(database, price(tier="batch"))
    book = await _book(database)
    with pytest.raises(PriceUnavailable):
        book.price_in_force(MODEL, 1)
    assert book.by_version(1).book == "org"


async def test_a_request_keeps_the_version_it_began_with(database: Database) -> None:
    first = _set(database, price(effective_from_ns=100))
    _set(database, price(effective_from_ns=200, input_nano_per_m=7))
    book = await _book(database)
    assert book.by_version(first.version).input_nano_per_m == first.input_nano_per_m
    with pytest.raises(PriceUnavailable):
        book.by_version(99)


async def test_a_refresh_sees_a_new_row_and_a_closed_one(database: Database) -> None:
    book = await _book(database)
    with pytest.raises(PriceUnavailable):
        book.price_in_force(MODEL, 1)
    added = _set(database, price())
    await book.refresh()
    assert book.price_in_force(MODEL, 1) == added
    with database.write() as connection:
        connection.execute(prices_table.update().values(effective_to_ns=500))
    await book.refresh()
    with pytest.raises(PriceUnavailable):
        book.price_in_force(MODEL, 500)


async def test_a_refresh_without_news_keeps_the_snapshot(database: Database) -> None:
    _set(database, price())
    book = await _book(database)
    before = book._by_version
    await book.refresh()
    assert book._by_version is before


async def test_prices_stay_while_the_database_is_away(database: Database, database_url: str) -> None:
    _set(database, price())
    own = open_database(database_url)
    book = await _book(own)
    own.engine.dispose()
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE prices RENAME TO elsewhere")
    with pytest.raises(BillingUnavailable):
        await book.refresh()
    assert book.price_in_force(MODEL, 1).version == 1
    own.close()


def test_two_operators_at_once_leave_one_row_in_force(database: Database) -> None:
    outcomes: list[str] = []

    def operator(number: int) -> None:
        try:
            _set(database, price(effective_from_ns=100 + number))
            outcomes.append("set")
        except PriceConflict:
            outcomes.append("conflict")

    threads = [threading.Thread(target=operator, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = _all(database)
    assert len(outcomes) == 8
    assert len(rows) == outcomes.count("set")
    assert [row.effective_to_ns for row in rows].count(None) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
async def test_any_history_has_one_price_at_an_instant_and_keeps_the_past(
    database: Database, starts: list[int]
) -> None:
    with database.write() as connection:
        connection.execute(prices_table.delete())
    told: dict[int, int] = {}  # instant -> version that was in force when it was last in the past
    now = 0
    for start in starts:
        try:
            _set(database, price(effective_from_ns=start))
        except PriceConflict:
            pass
        else:
            told = {instant: version for instant, version in told.items() if instant < start}
            now = start
        rows = _all(database)
        book = await _book(database)
        for instant in range(62):
            in_force = [
                row
                for row in rows
                if row.effective_from_ns <= instant and (row.effective_to_ns is None or instant < row.effective_to_ns)
            ]
            assert len(in_force) <= 1
            if in_force:
                assert book.price_in_force(MODEL, instant) == in_force[0]
                if instant <= now:
                    assert told.setdefault(instant, in_force[0].version) == in_force[0].version


class TestWhatARequestIsCharged:
    """Of rows for an account, a tier and long prompts, told apart by what they charge for input."""

    async def _charged(self, database: Database, *rows: Price, **asked: Any) -> int:
        for row in rows:
            _set(database, row)
        return (await _book(database)).price_in_force(MODEL, 1_000, **asked).input_nano_per_m

    async def test_an_accounts_own_price_stands_before_the_list(self, database: Database) -> None:
        own = price(book=account_book(ACCOUNT), input_nano_per_m=3)
        assert await self._charged(database, price(input_nano_per_m=5), own, account_id=ACCOUNT) == 3
        assert await self._charged(database, account_id=OTHER_ACCOUNT) == 5
        assert await self._charged(database) == 5

    async def test_a_price_of_one_account_prices_nobody_else(self, database: Database) -> None:
        with pytest.raises(PriceUnavailable):
            await self._charged(database, price(book=account_book(ACCOUNT)), account_id=OTHER_ACCOUNT)

    async def test_a_tier_has_its_price_and_one_without_is_served_at_the_standard_one(self, database: Database) -> None:
        batch = price(tier="batch", input_nano_per_m=2)
        assert await self._charged(database, price(input_nano_per_m=4), batch, tier=Tier.BATCH) == 2
        assert await self._charged(database) == 4
        served = (await _book(database)).price_in_force(MODEL, 1_000, tier=Tier.PRIORITY)
        assert (served.tier, served.input_nano_per_m) == ("standard", 4)

    async def test_the_lists_batch_price_is_for_accounts_with_a_book_of_their_own_too(self, database: Database) -> None:
        rows = (price(), price(tier="batch", input_nano_per_m=2), price(book=account_book(ACCOUNT), input_nano_per_m=3))
        assert await self._charged(database, *rows, account_id=ACCOUNT, tier=Tier.BATCH) == 2
        own_batch = price(book=account_book(ACCOUNT), tier="batch", input_nano_per_m=1)
        assert await self._charged(database, own_batch, account_id=ACCOUNT, tier=Tier.BATCH) == 1

    @pytest.mark.parametrize(("prompt_tokens", "charged"), [(0, 1), (999, 1), (1_000, 2), (4_999, 2), (5_000, 3)])
    async def test_long_prompts_have_the_price_of_their_length(
        self, database: Database, prompt_tokens: int, charged: int
    ) -> None:
        rows = [price(prompt_tokens_from=least, input_nano_per_m=n) for n, least in ((1, 0), (2, 1_000), (3, 5_000))]
        assert await self._charged(database, *rows, prompt_tokens=prompt_tokens) == charged

    async def test_rows_of_different_places_follow_nobody(self, database: Database) -> None:
        for number, row in enumerate((price(), price(tier="batch"), price(book=account_book(ACCOUNT)))):
            _set(database, replace(row, effective_from_ns=10 - number))
        _set(database, price(prompt_tokens_from=7, effective_from_ns=1))
        assert all(row.effective_to_ns is None for row in _all(database))

    def test_a_first_row_of_a_model_begins_at_once_and_any_other_with_notice(self, database: Database) -> None:
        with database.write() as connection:
            assert from_now(connection, price(), 5).effective_from_ns == 5
            set_price(connection, price())
            for row in (price(), price(tier="batch"), price(book=account_book(ACCOUNT)), price(prompt_tokens_from=1)):
                assert from_now(connection, row, 5).effective_from_ns == 2_000_000_005

    @pytest.mark.parametrize(
        "beyond", [{"request_nano": -1}, {"request_nano": 10**12 + 1}, {"prompt_tokens_from": 10**9 + 1}]
    )
    def test_amounts_beyond_reason_are_refused(self, database: Database, beyond: dict[str, int]) -> None:
        with pytest.raises(PriceConflict):
            _set(database, price(**beyond))


class TestSeed:
    def test_the_first_price_derives_its_neurons(self, database: Database) -> None:
        seeded = seed_default_price(
            database,
            MODEL,
            input_nano_per_m=10_000_000,
            cached_input_nano_per_m=2_500_000,
            output_nano_per_m=40_000_000,
            now_ns=5,
        )
        assert seeded is not None
        assert (seeded.input_neurons_per_m, seeded.cached_input_neurons_per_m, seeded.output_neurons_per_m) == (
            909,
            227,
            3636,
        )
        assert _all(database) == [seeded]

    def test_an_operators_price_is_left_alone(self, database: Database) -> None:
        own = _set(database, price(book="org", input_nano_per_m=3))
        amounts = {"input_nano_per_m": 1, "cached_input_nano_per_m": None, "output_nano_per_m": 1}
        assert seed_default_price(database, MODEL, now_ns=5, **amounts) is None  # type: ignore[arg-type] # one dict for three
        assert _all(database) == [own]


def test_neurons_follow_the_published_rate() -> None:
    assert neurons_of(11_000_000) == 1_000  # 0.011 USD is 1,000 neurons
    assert neurons_of(0) == 0


@pytest.mark.parametrize(
    ("values", "drastic"),
    [
        ({}, False),
        ({"input_nano_per_m": 10_000_000_000}, False),
        ({"input_nano_per_m": 10_000_000_001}, True),
        ({"input_nano_per_m": 99_999_999, "cached_input_nano_per_m": 99_999_999}, True),
        ({"output_nano_per_m": 0}, True),
        ({"cached_input_nano_per_m": None}, False),
        ({"reasoning_nano_per_m": 1}, True),
    ],
)
def test_a_change_beyond_ten_times_is_drastic(values: dict[str, int | None], drastic: bool) -> None:  # noqa: FBT001 - a table's column
    assert is_drastic(price(), price(**values)) is drastic


def test_the_price_to_follow_is_the_one_without_an_end(database: Database) -> None:
    with database.read() as connection:
        assert price_before(connection, price()) is None
    _set(database, price(effective_from_ns=1))
    second = _set(database, price(effective_from_ns=2))
    with database.read() as connection:
        assert price_before(connection, price()) == second
