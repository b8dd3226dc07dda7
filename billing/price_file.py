"""Price books as files: TOML (`[[price]]` tables) or CSV (one line a model), read whole or not at all.

`pagegate prices import` calls it. Amounts say their unit in the field's name, so that a price per token can't pass for
one per million: `input_usd_per_m = "0.27"` is decimal text, `input_neurons_per_m = 24545` a whole number.
"""

import csv
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from billing.errors import PriceConflict
from billing.money import parse_usd
from billing.price_book import Price, is_drastic, price_open_now, set_price, start_after, with_derived_neurons

_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_USD: Final = ("input_usd_per_m", "cached_input_usd_per_m", "output_usd_per_m", "reasoning_usd_per_m")
_NEURONS: Final = ("input_neurons_per_m", "cached_input_neurons_per_m", "output_neurons_per_m")
_NEEDED: Final = ("model", "input_usd_per_m", "output_usd_per_m")
_MODEL_CHARACTERS_MAX: Final = 200


class PriceFileInvalid(ValueError):
    """A file that is no price book; the message names the place and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Prices that were set, with their versions, and how many models had theirs already."""

    prices: tuple[Price, ...]
    unchanged: int


def read_price_file(path: Path) -> list[Price]:
    """The book's prices, not kept yet. Raises PriceFileInvalid."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PriceFileInvalid(f"{path} can't be read: {error.strerror}.") from error
    if len(data) > _FILE_BYTES_MAX:
        raise PriceFileInvalid(f"{path} is larger than {_FILE_BYTES_MAX} bytes.")
    try:
        text = data.decode()
        rows = _csv_rows(text) if path.suffix.lower() == ".csv" else _toml_rows(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise PriceFileInvalid(f"{path} is no price file: {error}.") from error
    prices = [_price(row, f"price {number}") for number, row in enumerate(rows, start=1)]
    models = [price.model for price in prices]
    twice = {model for model in models if models.count(model) > 1}
    if twice:
        raise PriceFileInvalid(f"A model has one price, but {', '.join(sorted(twice))} has more.")
    return prices


def import_prices(connection: sa.Connection, prices: Iterable[Price], *, now_ns: int, confirm: bool) -> Imported:
    """Set every price that differs from the one in force; in the caller's write transaction, so all or none.

    Raises PriceConflict, naming them, if prices change by more than ten times and that is not confirmed.
    """
    following = [(price_open_now(connection, price.model), price) for price in prices]
    changed = [(before, price) for before, price in following if before is None or _terms(before) != _terms(price)]
    drastic = [price.model for before, price in changed if before is not None and is_drastic(before, price)]
    if drastic and not confirm:
        raise PriceConflict(f"More than ten times more or less than before: {', '.join(drastic)}. Confirm it if meant.")
    kept = [
        set_price(connection, replace(price, effective_from_ns=start_after(before, now_ns)))
        for before, price in changed
    ]
    return Imported(tuple(kept), len(following) - len(changed))


def _toml_rows(text: str) -> list[dict[str, Any]]:
    document = tomllib.loads(text)
    rows = document.pop("price", None)
    if document or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise PriceFileInvalid("A price file holds [[price]] tables and nothing else.")
    return rows


def _csv_rows(text: str) -> list[dict[str, Any]]:
    """Empty fields count as absent; numbers are text in a CSV file."""
    reader = csv.DictReader(text.splitlines(), strict=True)
    rows = []
    for line in reader:
        if None in line or None in line.values():
            raise PriceFileInvalid(f"Line {reader.line_num} has another number of fields than the first line.")
        row: dict[str, Any] = {name: value.strip() for name, value in line.items() if value.strip()}
        for name in _NEURONS:
            if name in row:
                row[name] = _whole(row[name], f"line {reader.line_num}, {name}")
        rows.append(row)
    return rows


def _whole(text: str, place: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise PriceFileInvalid(f"{place}: {text!r} is no whole number.")
    return int(text)


def _price(row: dict[str, Any], place: str) -> Price:
    unknown = row.keys() - {"model", *_USD, *_NEURONS}
    missing = [name for name in _NEEDED if name not in row]
    if unknown or missing:
        fault = f"lacks {', '.join(missing)}" if missing else f"has no field named {', '.join(sorted(unknown))}"
        raise PriceFileInvalid(f"{place}: a price {fault}.")
    model = row["model"]
    if not isinstance(model, str) or not 1 <= len(model) <= _MODEL_CHARACTERS_MAX or not model.isprintable():
        raise PriceFileInvalid(f"{place}: a model is named by 1 to {_MODEL_CHARACTERS_MAX} printable characters.")
    price = with_derived_neurons(
        model,
        input_nano_per_m=_nano(row, "input_usd_per_m", place),
        cached_input_nano_per_m=_nano_if_any(row, "cached_input_usd_per_m", place),
        output_nano_per_m=_nano(row, "output_usd_per_m", place),
        reasoning_nano_per_m=_nano_if_any(row, "reasoning_usd_per_m", place),
        effective_from_ns=0,
    )
    neurons: dict[str, Any] = {name: _count(row, name, place) for name in _NEURONS if name in row}
    return replace(price, **neurons)


def _nano_if_any(row: dict[str, Any], name: str, place: str) -> int | None:
    return _nano(row, name, place) if name in row else None


def _nano(row: dict[str, Any], name: str, place: str) -> int:
    if not isinstance(row[name], str):  # a TOML float has been rounded already
        raise PriceFileInvalid(f'{place}, {name}: write the amount as text, such as "0.27".')
    try:
        return parse_usd(row[name])
    except ValueError as error:
        raise PriceFileInvalid(f"{place}, {name}: {error}") from error


def _count(row: dict[str, Any], name: str, place: str) -> int:
    value = row[name]
    if type(value) is not int or value < 0:
        raise PriceFileInvalid(f"{place}, {name}: neurons are a whole number, not negative.")
    return value


def _terms(price: Price) -> dict[str, Any]:
    """What a price says, whenever it begins."""
    return {name: value for name, value in asdict(price).items() if name.endswith("_per_m") or name in {"book", "tier"}}
