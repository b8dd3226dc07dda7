"""Price books as files: TOML (`[[price]]` tables) or CSV (one line a price), read whole or not at all.

`pagegate prices import` calls it. Amounts say their unit in the field's name, so that a price per token can't pass for
one per million: `input_usd_per_m = "0.27"` is decimal text, `input_neurons_per_m = 24545` a whole number. A row may be
for one tier (`tier = "batch"`), for long prompts (`prompt_tokens_from = 200001`) or for one account (`account_id`), and
may charge requests themselves (`request_usd = "0.0001"`).
"""

import csv
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from billing.errors import PriceConflict
from billing.money import parse_usd
from billing.price_book import (
    Price,
    Tier,
    account_book,
    from_now,
    is_drastic,
    price_before,
    request_neurons_micro_of,
    set_price,
    with_derived_neurons,
)

_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_USD: Final = ("input_usd_per_m", "cached_input_usd_per_m", "output_usd_per_m", "reasoning_usd_per_m")
_REQUEST: Final = "request_usd"
_PROMPT_FROM: Final = "prompt_tokens_from"
_NEURONS: Final = ("input_neurons_per_m", "cached_input_neurons_per_m", "output_neurons_per_m")
_WHOLE: Final = (*_NEURONS, _PROMPT_FROM)
_KNOWN: Final = frozenset({"model", "account_id", "tier", _PROMPT_FROM, _REQUEST, *_USD, *_NEURONS})
_ACCOUNT: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
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
    places = Counter((price.model, price.book, price.tier, price.prompt_tokens_from) for price in prices)
    twice = {place[0] for place, count in places.items() if count > 1}
    if twice:
        raise PriceFileInvalid(f"A model has one price of a kind, but {', '.join(sorted(twice))} has more.")
    return prices


def import_prices(connection: sa.Connection, prices: Iterable[Price], *, now_ns: int, confirm: bool) -> Imported:
    """Set every price that differs from the one in force; in the caller's write transaction, so all or none.

    Raises PriceConflict, naming them, if prices change by more than ten times and that is not confirmed.
    """
    following = [(price_before(connection, price), price) for price in prices]
    changed = [(before, price) for before, price in following if before is None or _terms(before) != _terms(price)]
    drastic = [price.model for before, price in changed if before is not None and is_drastic(before, price)]
    if drastic and not confirm:
        raise PriceConflict(f"More than ten times more or less than before: {', '.join(drastic)}. Confirm it if meant.")
    # Begun together, by what there was before the file: its first row does not make its second one wait.
    begun = [from_now(connection, price, now_ns) for _, price in changed]
    kept = [set_price(connection, price) for price in begun]
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
        for name in _WHOLE:
            if name in row:
                row[name] = _whole(row[name], f"line {reader.line_num}, {name}")
        rows.append(row)
    return rows


def _whole(text: str, place: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise PriceFileInvalid(f"{place}: {text!r} is no whole number.")
    return int(text)


def _price(row: dict[str, Any], place: str) -> Price:
    unknown = row.keys() - _KNOWN
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
    request_nano = _nano_if_any(row, _REQUEST, place) or 0
    return replace(
        price,
        **_place(row, place),
        request_nano=request_nano,
        request_neurons_micro=request_neurons_micro_of(request_nano),
        **neurons,
    )


def _place(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Where in the books the price stands, as far as the row says."""
    found: dict[str, Any] = {}
    if "tier" in row:
        if row["tier"] not in set(Tier):
            raise PriceFileInvalid(f"{place}, tier: one of {', '.join(Tier)}.")
        found["tier"] = row["tier"]
    if "account_id" in row:
        if not isinstance(row["account_id"], str) or _ACCOUNT.fullmatch(row["account_id"]) is None:
            raise PriceFileInvalid(f"{place}, account_id: 32 lower-case hexadecimal digits.")
        found["book"] = account_book(row["account_id"])
    if _PROMPT_FROM in row:
        found[_PROMPT_FROM] = _count(row, _PROMPT_FROM, place)
    return found


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
        raise PriceFileInvalid(f"{place}, {name}: a whole number, not negative.")
    return value


def _terms(price: Price) -> dict[str, Any]:
    """What a price says, whenever it begins."""
    apart = {"version", "effective_from_ns", "effective_to_ns"}
    return {name: value for name, value in asdict(price).items() if name not in apart}
