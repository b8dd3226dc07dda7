"""What a volume costs by bands, to the millionth of a nano-dollar, and which schedule counts for which month."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import PriceConflict
from billing.ledger.periods import month_bounds
from billing.price_book import Place, Tier, place_of, set_price
from billing.volume_prices import (
    Band,
    TokenClass,
    VolumeMode,
    VolumePrice,
    in_force,
    is_drastic_volume,
    read_volume_prices,
    set_volume_price,
)
from tenancy.audit_log import read_audit_log
from tenancy.database import Database
from tests.billing.builders import MODEL, price
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

PLACE = Place("list", MODEL, Tier.STANDARD.value, 0)


def volume_price(*bands: tuple[int, int], **values: object) -> VolumePrice:
    defaults = {
        "version": 0,
        "place": PLACE,
        "token_class": TokenClass.OUTPUT,
        "mode": VolumeMode.GRADUATED,
        "bands": tuple(Band(start, nano) for start, nano in bands),
        "from_month": "2026-10",
    }
    return VolumePrice(**defaults | values)  # type: ignore[arg-type]  # of defaults, by name


@pytest.mark.parametrize(
    ("tokens", "graduated", "volume"),
    [
        (0, 0, 0),
        (1, 100, 100),
        (10, 1_000, 700),  # the tenth token still costs the first band's price; the volume has reached the second
        (11, 1_070, 770),
        (25, 1_000 + 10 * 70 + 5 * 3, 75),
    ],
)
def test_bands_are_half_open(tokens: int, graduated: int, volume: int) -> None:
    bands = ((0, 100), (10, 70), (20, 3))
    assert volume_price(*bands).numerator(tokens) == graduated
    assert volume_price(*bands, mode=VolumeMode.VOLUME).numerator(tokens) == volume


@given(
    starts=st.sets(st.integers(1, 60), max_size=5),
    nanos=st.lists(st.integers(0, 10**13), min_size=6, max_size=6),
    tokens=st.integers(0, 80),
)
def test_graduated_is_the_sum_of_each_tokens_own_price(starts: set[int], nanos: list[int], tokens: int) -> None:
    bands = tuple(zip((0, *sorted(starts)), nanos, strict=False))
    one_by_one = sum(next(nano for start, nano in reversed(bands) if start <= token) for token in range(tokens))
    assert volume_price(*bands).numerator(tokens) == one_by_one


def test_the_last_that_has_begun_counts_until_one_ends_it() -> None:
    first, second = volume_price((0, 1), version=1), volume_price((0, 2), version=2, from_month="2026-12")
    mended = volume_price((0, 3), version=3, from_month="2026-12")
    ended = volume_price(version=4, mode=VolumeMode.NONE, from_month="2027-02")
    where = (PLACE, TokenClass.OUTPUT)
    found = [in_force([ended, mended, second, first], month) for month in ("2026-09", "2026-11", "2027-01", "2027-02")]
    assert found == [{}, {where: first}, {where: mended}, {}]


def test_a_band_far_from_the_price_or_from_its_like_before_is_a_slip() -> None:
    cheap, dear = volume_price((0, 10**10), (5, 10**9 - 1)), volume_price((0, 10**10), (5, 10**10))
    assert is_drastic_volume(None, cheap, price())
    assert not is_drastic_volume(None, dear, price())
    assert is_drastic_volume(cheap, dear, price())


@over_both_databases
class TestSetting:
    @pytest.fixture
    def clock(self) -> SettableClock:
        return SettableClock(month_bounds("2026-11")[0] + 5)

    @pytest.fixture
    def priced(self, database: Database) -> Database:
        with database.write() as connection:
            set_price(connection, price())
        return database

    def test_it_is_kept_whole_and_begins_with_the_next_month(self, priced: Database, clock: SettableClock) -> None:
        wanted = volume_price((0, 10**10), (1_000_000, 7), from_month="")
        with priced.write() as connection:
            kept = set_volume_price(connection, wanted, clock=clock)
            assert read_volume_prices(connection, model=MODEL) == [kept]
            assert read_volume_prices(connection, model="@cf/another") == []
        assert (kept.bands, kept.from_month, kept.place) == (wanted.bands, "2026-12", place_of(price()))
        assert read_audit_log(priced, None)[0].action == "volume_price.set"

    def test_a_month_that_has_begun_keeps_what_it_was_told(self, priced: Database, clock: SettableClock) -> None:
        running, ahead = volume_price((0, 1), from_month="2026-11"), volume_price((0, 2), from_month="2026-12")
        with priced.write() as connection:
            for schedule in (running, ahead, ahead):
                set_volume_price(connection, schedule, clock=clock)
            for month in ("2026-10", "2026-11"):
                with pytest.raises(PriceConflict):
                    set_volume_price(connection, volume_price((0, 3), from_month=month), clock=clock)
        clock.now_ns = month_bounds("2026-12")[0]
        with priced.write() as connection, pytest.raises(PriceConflict):
            set_volume_price(connection, ahead, clock=clock)

    @pytest.mark.parametrize(
        "wrong",
        [
            volume_price(from_month="2026-12"),
            volume_price((1, 5), from_month="2026-12"),
            volume_price((0, 5), (7, 4), (7, 3), from_month="2026-12"),
            volume_price((0, 10**13 + 1), from_month="2026-12"),
            volume_price((0, 5), from_month="2026-12", mode=VolumeMode.NONE),
            volume_price((0, 5), from_month="2026-12", place=PLACE._replace(tier="batch")),
        ],
    )
    def test_what_prices_nothing_is_refused(self, priced: Database, clock: SettableClock, wrong: VolumePrice) -> None:
        with priced.write() as connection, pytest.raises(PriceConflict):
            set_volume_price(connection, wrong, clock=clock)
