"""Price books as files: read exactly, whole or not at all, and importing again changes nothing."""

from pathlib import Path

import pytest

from billing.errors import PriceConflict
from billing.price_book import NANO_PER_NEURON, read_prices
from billing.price_fields import PriceFileInvalid
from billing.price_file import import_prices, read_price_file
from billing.rating import rate
from billing.usage import TokenUsage
from tenancy.database import Database
from tests.tenancy.conftest import over_both_databases

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "examples" / "prices-workers-ai.toml"
TOML = """
[[price]]
model = "@cf/a"
input_usd_per_m = "0.27"
cached_input_usd_per_m = "0.000000001"
output_usd_per_m = "2"
input_neurons_per_m = 24545
"""
CSV = (
    "model,input_usd_per_m,cached_input_usd_per_m,output_usd_per_m,input_neurons_per_m\n"
    "@cf/a,0.27,0.000000001,2,24545\n"
)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.toml"
    path.write_text(TOML)
    return path


def test_both_forms_are_read_alike_and_exactly(book: Path, tmp_path: Path) -> None:
    (tmp_path / "book.csv").write_text(CSV)
    (price,) = read_price_file(book).prices
    assert read_price_file(tmp_path / "book.csv").prices == (price,)
    assert (price.input_nano_per_m, price.cached_input_nano_per_m, price.output_nano_per_m) == (
        270_000_000,
        1,
        2_000_000_000,
    )
    assert price.reasoning_nano_per_m is None
    assert (price.input_neurons_per_m, price.output_neurons_per_m) == (24545, 181_818)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1", "[[price]] tables and nothing else"),
        ("price = 1", "[[price]] tables and nothing else"),
        ("[[price]", "is no price file"),
        (TOML.replace('model = "@cf/a"', ""), "lacks model"),
        (TOML.replace("output_usd_per_m", "output_usd_per_token"), "lacks output_usd_per_m"),
        (TOML + 'batch_usd_per_m = "1"', "no field named batch_usd_per_m"),
        (TOML + 'tier = "night"', "price 1, tier: one of standard, batch, priority"),
        (TOML + 'account_id = "A"', "price 1, account_id: 32 lower-case"),
        (TOML + "prompt_tokens_from = -1", "price 1, prompt_tokens_from: a whole number"),
        (TOML + "request_usd = 1", "price 1, request_usd: write the amount as text"),
        (TOML.replace('"0.27"', "0.27"), "price 1, input_usd_per_m: write the amount as text"),
        (TOML.replace('"0.27"', '"1e3"'), "price 1, input_usd_per_m"),
        (TOML.replace('"0.27"', '"-1"'), "price 1, input_usd_per_m"),
        (TOML.replace("24545", "-1"), "price 1, input_neurons_per_m"),
        (TOML.replace("24545", "true"), "price 1, input_neurons_per_m"),
        (TOML.replace("24545", "2.5"), "price 1, input_neurons_per_m"),
        (TOML.replace("@cf/a", ""), "a model is named"),
        (TOML + TOML, "@cf/a has more"),
    ],
)
def test_what_is_no_price_book_is_said_with_its_place(book: Path, text: str, found: str) -> None:
    book.write_text(text)
    with pytest.raises(PriceFileInvalid) as refusal:
        read_price_file(book)
    assert found in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CSV + "@cf/b,1,2\n", "Line 3"),
        (CSV + "@cf/b,1,2,3,4,5\n", "Line 3"),
        (CSV.replace("24545", "2.5"), "input_neurons_per_m"),
        (CSV.replace("24545", "٣"), "input_neurons_per_m"),
        (CSV.replace("0.27", ""), "lacks input_usd_per_m"),
        ('model\n"@cf/a', "is no price file"),
    ],
)
def test_what_is_no_csv_price_book_is_said_with_its_place(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "book.csv"
    path.write_text(text)
    with pytest.raises(PriceFileInvalid) as refusal:
        read_price_file(path)
    assert found in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("none.toml", "bytes.toml"):
        with pytest.raises(PriceFileInvalid):
            read_price_file(tmp_path / name)


def test_a_row_may_be_for_a_tier_an_account_or_long_prompts_and_charge_requests(tmp_path: Path) -> None:
    (tmp_path / "book.csv").write_text(
        "model,input_usd_per_m,output_usd_per_m,tier,account_id,prompt_tokens_from,request_usd\n"
        "@cf/a,1,2,,,,\n"
        "@cf/a,0.5,1,batch,,,\n"
        f"@cf/a,0.9,2,,{'a' * 32},,0.000011\n"
        "@cf/a,2,4,,,200001,\n"
    )
    prices = read_price_file(tmp_path / "book.csv").prices
    assert [(price.book, price.tier, price.prompt_tokens_from) for price in prices] == [
        ("list", "standard", 0),
        ("list", "batch", 0),
        ("account:" + "a" * 32, "standard", 0),
        ("list", "standard", 200_001),
    ]
    assert (prices[2].request_nano, prices[2].request_neurons_micro) == (11_000, 1_000_000)


@over_both_databases
class TestImport:
    def test_a_book_of_many_kinds_is_set_at_once_and_not_again(self, tmp_path: Path, database: Database) -> None:
        kinds = ("", 'tier = "batch"', f'account_id = "{"b" * 32}"', "prompt_tokens_from = 9", 'tier = "priority"')
        (tmp_path / "book.toml").write_text("".join(TOML + kind + "\n" for kind in kinds))
        prices = read_price_file(tmp_path / "book.toml")
        with database.write() as connection:
            first = import_prices(connection, prices, now_ns=1_000, confirm=False)
            again = import_prices(connection, prices, now_ns=2_000, confirm=False)
        assert {price.effective_from_ns for price in first.prices} == {1_000}
        assert (len(first.prices), len(again.prices), again.unchanged) == (5, 0, 5)

    def test_importing_again_changes_nothing(self, book: Path, database: Database) -> None:
        prices = read_price_file(book)
        with database.write() as connection:
            first = import_prices(connection, prices, now_ns=1_000, confirm=False)
            again = import_prices(connection, prices, now_ns=2_000, confirm=False)
            assert (len(first.prices), first.unchanged) == (1, 0)
            assert (len(again.prices), again.unchanged) == (0, 1)
            assert len(read_prices(connection)) == 1

    def test_a_change_follows_the_price_in_force_with_notice(self, book: Path, database: Database) -> None:
        with database.write() as connection:
            import_prices(connection, read_price_file(book), now_ns=1_000, confirm=False)
            book.write_text(TOML.replace("0.27", "0.28"))
            (after,) = import_prices(connection, read_price_file(book), now_ns=5_000, confirm=False).prices
            before, _ = read_prices(connection)
        assert before.effective_to_ns == after.effective_from_ns == 2_000_005_000

    def test_a_slip_by_more_than_ten_times_keeps_the_whole_file_out(self, book: Path, database: Database) -> None:
        with database.write() as connection:
            import_prices(connection, read_price_file(book), now_ns=1_000, confirm=False)
        book.write_text(TOML.replace("0.27", "270000") + TOML.replace("@cf/a", "@cf/b"))
        prices = read_price_file(book)
        with pytest.raises(PriceConflict, match="@cf/a"), database.write() as connection:
            import_prices(connection, prices, now_ns=5_000, confirm=False)
        with database.write() as connection:
            assert len(read_prices(connection)) == 1
        book.write_text(TOML.replace("0.27", "2.8"))
        prices = read_price_file(book)
        with database.write() as connection:
            assert len(import_prices(connection, prices, now_ns=5_000, confirm=True).prices) == 1


class TestWorkersAi:
    def test_the_published_example_comes_out_to_the_last_digit(self) -> None:
        book = {price.model: price for price in read_price_file(EXAMPLE).prices}
        charge = rate(TokenUsage(6377, 2861, 349), book["@cf/moonshotai/kimi-k2.6"])
        assert charge.neurons_micro == 303_655_824 + 41_613_245 + 126_908_964
        assert charge.cost_nano == 3516 * 950 + 2861 * 160 + 349 * 4000

    def test_dollars_and_neurons_agree_as_they_are_published(self) -> None:
        prices = read_price_file(EXAMPLE).prices
        assert len(prices) == 37
        for price in prices:
            for nano, neurons in (
                (price.input_nano_per_m, price.input_neurons_per_m),
                (price.output_nano_per_m, price.output_neurons_per_m),
            ):
                # Dollars are rounded to three decimals: half a thousandth, and the hundredth that they may differ by.
                assert abs(nano - neurons * NANO_PER_NEURON) <= 500_000 + nano // 50, price.model
