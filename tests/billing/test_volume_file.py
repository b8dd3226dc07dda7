"""Prices by volume in price files: TOML and CSV say the same, and are set with the prices that they are about."""

from pathlib import Path

import pytest

from billing.errors import PriceConflict
from billing.ledger.periods import month_bounds
from billing.price_book import Place
from billing.price_fields import PriceFileInvalid
from billing.price_file import import_prices, read_price_file
from billing.volume_prices import Band, TokenClass, VolumeMode, read_volume_prices
from tenancy.database import Database
from tests.tenancy.conftest import over_both_databases

PRICE = """
[[price]]
model = "@cf/a"
input_usd_per_m = "0.27"
output_usd_per_m = "2"
"""
VOLUME = """
[[volume]]
model = "@cf/a"
token_class = "output"
mode = "graduated"
bands = [{ tokens_from = 0, usd_per_m = "2" }, { tokens_from = 1_000_000_000, usd_per_m = "1.5" }]
"""
CSV = (
    "model,input_usd_per_m,output_usd_per_m,tier,volume_class,volume_mode,volume_tokens_from,volume_usd_per_m,"
    "volume_month\n"
    "@cf/a,0.27,2,,,,,,\n"
    "@cf/a,,,,output,graduated,0,2,\n"
    "@cf/a,,,,output,graduated,1000000000,1.5,\n"
    "@cf/a,,,batch,input,none,,,2027-01\n"
)
NOW_NS = month_bounds("2026-11")[0]


def read(folder: Path, text: str, name: str = "book.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_both_forms_are_read_alike_and_exactly(tmp_path: Path) -> None:
    (schedule,) = read_price_file(read(tmp_path, VOLUME)).volume_prices
    first, second = read_price_file(read(tmp_path, CSV, "book.csv")).volume_prices
    assert first == schedule
    assert (schedule.token_class, schedule.mode, schedule.from_month) == (TokenClass.OUTPUT, VolumeMode.GRADUATED, "")
    assert schedule.bands == (Band(0, 2_000_000_000), Band(10**9, 1_500_000_000))
    assert (second.place, second.mode, second.bands, second.from_month) == (
        Place("list", "@cf/a", "batch", 0),
        VolumeMode.NONE,
        (),
        "2027-01",
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (VOLUME.replace('"output"', '"outputs"'), "volume 1, token_class: one of input, cached_input, output"),
        (VOLUME.replace('"graduated"', '"steps"'), "volume 1, mode: one of graduated, volume, none"),
        (VOLUME.replace('mode = "graduated"', ""), "volume 1: a volume price lacks mode"),
        (VOLUME + 'from_month = "2026-13"', "volume 1, from_month: '2026-13' is not a month"),
        (VOLUME.replace('"1.5"', "1.5"), "volume 1, band 2, usd_per_m: write the amount as text"),
        (VOLUME.replace("tokens_from = 0", "tokens_from = -1"), "volume 1, band 1, tokens_from: a whole number"),
        (VOLUME.replace("usd_per_m", "usd_per_token"), "volume 1, band 1: a band lacks usd_per_m"),
        (VOLUME.replace("bands = [", "bands = [1, "), "volume 1, bands: tables of tokens_from and usd_per_m"),
        (VOLUME + VOLUME, "@cf/a has more"),
    ],
)
def test_what_is_no_price_by_volume_is_said_with_its_place(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(PriceFileInvalid) as refusal:
        read_price_file(read(tmp_path, text))
    assert found in str(refusal.value)


@over_both_databases
class TestImport:
    def test_it_is_set_with_its_price_and_not_again(self, tmp_path: Path, database: Database) -> None:
        file = read_price_file(read(tmp_path, PRICE + VOLUME))
        with database.write() as connection:
            first = import_prices(connection, file, now_ns=NOW_NS, confirm=False)
            again = import_prices(connection, file, now_ns=NOW_NS, confirm=False)
            kept = read_volume_prices(connection)
        assert (len(first.prices), first.unchanged, again.unchanged, again.volume_prices) == (1, 0, 2, ())
        assert kept == list(first.volume_prices)
        assert kept[0].from_month == "2026-12"

    def test_without_a_price_of_its_kind_nothing_of_the_file_is_set(self, tmp_path: Path, database: Database) -> None:
        file = read_price_file(read(tmp_path, PRICE + VOLUME.replace("@cf/a", "@cf/b")))
        with pytest.raises(PriceConflict, match="needs a price"), database.write() as connection:
            import_prices(connection, file, now_ns=NOW_NS, confirm=False)

    def test_a_band_per_token_instead_of_per_million_wants_to_be_confirmed(
        self, tmp_path: Path, database: Database
    ) -> None:
        file = read_price_file(read(tmp_path, PRICE + VOLUME.replace('"1.5"', '"0.0000015"')))
        with database.write() as connection, pytest.raises(PriceConflict, match="@cf/a"):
            import_prices(connection, file, now_ns=NOW_NS, confirm=False)
        with database.write() as connection:
            assert len(import_prices(connection, file, now_ns=NOW_NS, confirm=True).volume_prices) == 1
