"""`pagegate prices`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]
_MODEL = "@cf/test/model"


def test_a_price_in_dollars_is_kept_as_nano_dollars(answer: Answer) -> None:
    row = answer("prices", "set", _MODEL, "--input", "0.01", "--cached-input", "0.0025", "--output", "0.04")
    assert (row["input_nano_per_m"], row["cached_input_nano_per_m"], row["output_nano_per_m"]) == (
        10_000_000,
        2_500_000,
        40_000_000,
    )
    assert (row["input_neurons_per_m"], row["cached_input_neurons_per_m"], row["output_neurons_per_m"]) == (
        909,
        227,
        3636,
    )
    assert (row["version"], row["reasoning_usd"], row["effective_to"]) == (1, None, None)


def test_nano_dollars_and_neurons_can_be_given_as_they_are(answer: Answer) -> None:
    row = answer("prices", "set", _MODEL, "--nano", "--input", "10", "--output", "0", "--input-neurons", "7")
    assert (row["input_usd"], row["output_usd"], row["input_neurons_per_m"]) == ("0.00000001", "0", 7)


def test_a_new_price_follows_the_old_one_without_a_gap(answer: Answer) -> None:
    answer("prices", "set", _MODEL, "--input", "1", "--output", "1")
    answer("prices", "set", _MODEL, "--input", "2", "--output", "2")
    answer("prices", "set", "@cf/other/model", "--input", "5", "--output", "5")
    first, second = answer("prices", "list", _MODEL)
    assert first["effective_to"] == second["effective_from"]
    assert second["effective_to"] is None
    assert len(answer("prices", "list")) == 3


def test_a_change_beyond_ten_times_wants_to_be_confirmed(pagegate: Pagegate, answer: Answer) -> None:
    answer("prices", "set", _MODEL, "--input", "0.01", "--output", "0.04")
    code, out, err = pagegate("prices", "set", _MODEL, "--input", "10000", "--output", "0.04")
    assert (code, out) == (2, "")
    assert "--confirm" in err
    assert len(answer("prices", "list")) == 1
    answer("prices", "set", _MODEL, "--input", "10000", "--output", "0.04", "--confirm")
    assert len(answer("prices", "list")) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "1"],
        ["--input", "-1", "--output", "1"],
        ["--input", "1e3", "--output", "1"],
        ["--input", "0.0000000001", "--output", "1"],
        ["--input", "nan", "--output", "1"],
        ["--nano", "--input", "0.5", "--output", "1"],
        ["--input", "1", "--output", "1", "--input-neurons", "-1"],
    ],
)
def test_a_price_that_is_no_amount_is_a_usage_error(pagegate: Pagegate, answer: Answer, options: list[str]) -> None:
    code, out, _ = pagegate("prices", "set", _MODEL, *options)
    assert (code, out) == (2, "")
    assert answer("prices", "list") == []


def test_a_price_out_of_range_is_one_sentence(pagegate: Pagegate) -> None:
    code, out, err = pagegate("prices", "set", _MODEL, "--input", "10001", "--output", "1")
    assert (code, out) == (1, "")
    assert err.startswith("pagegate: Per million tokens a price lies between")


def test_a_table_names_each_model(pagegate: Pagegate, answer: Answer) -> None:
    answer("prices", "set", _MODEL, "--input", "0.01", "--output", "0.04")
    code, out, _ = pagegate("prices", "list")
    assert code == 0
    assert _MODEL in out


def test_a_book_is_imported_whole_and_once(answer: Answer, pagegate: Pagegate, tmp_path: Path) -> None:
    book = tmp_path / "book.csv"
    book.write_text("model,input_usd_per_m,output_usd_per_m\n@cf/a,1,2\n@cf/b,3,4\n")
    first = answer("prices", "import", str(book))
    assert [(row["model"], row["output_usd"], row["usd_of_1000_in_1000_out"]) for row in first["set"]] == [
        ("@cf/a", "2", "0.003"),
        ("@cf/b", "4", "0.007"),
    ]
    assert answer("prices", "import", str(book)) == {"set": [], "volume_set": [], "unchanged": 2}
    code, out, _ = pagegate("prices", "import", str(book))
    assert (code, "2 unchanged" in out) == (0, True)


def test_a_slip_in_a_book_wants_to_be_confirmed(answer: Answer, pagegate: Pagegate, tmp_path: Path) -> None:
    book = tmp_path / "book.csv"
    for amount in ("1", "1000000"):
        book.write_text(f"model,input_usd_per_m,output_usd_per_m\n@cf/a,{amount},2\n")
        if amount == "1":
            answer("prices", "import", str(book))
    code, _, err = pagegate("prices", "import", str(book))
    assert (code, "@cf/a" in err) == (1, True)
    assert len(answer("prices", "list")) == 1


def test_a_file_that_is_no_book_is_a_usage_error(pagegate: Pagegate, tmp_path: Path) -> None:
    code, _, err = pagegate("prices", "import", str(tmp_path / "none.toml"))
    assert (code, "can't be read" in " ".join(err.split())) == (2, True)


def test_prices_by_volume_are_imported_and_listed(answer: Answer, pagegate: Pagegate, tmp_path: Path) -> None:
    book = tmp_path / "book.csv"
    book.write_text(
        "model,input_usd_per_m,output_usd_per_m,volume_class,volume_mode,volume_tokens_from,volume_usd_per_m\n"
        f"{_MODEL},1,2,,,,\n{_MODEL},,,output,volume,0,2\n{_MODEL},,,output,volume,1000,1\n"
    )
    imported = answer("prices", "import", str(book))
    listed = answer("prices", "volume", _MODEL)
    assert imported["volume_set"] == listed
    assert [(row["token_class"], row["mode"], row["bands"]) for row in listed] == [
        ("output", "volume", "0: 2, 1000: 1")
    ]
    code, out, _ = pagegate("prices", "volume")
    assert (code, "1000: 1" in out) == (0, True)
