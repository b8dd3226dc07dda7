"""Price books as files: TOML (`[[price]]` and `[[volume]]` tables) or CSV (one line a price), read whole or not at all.

`pagegate prices import` calls it. Amounts say their unit in the field's name, so that a price per token can't pass for
one per million: `input_usd_per_m = "0.27"` is decimal text, `input_neurons_per_m = 24545` a whole number. A row may be
for one tier (`tier = "batch"`), for long prompts (`prompt_tokens_from = 200001`) or for one account (`account_id`), and
may charge requests themselves (`request_usd = "0.0001"`). volume_file.py says what prices by volume look like.
"""

import csv
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from billing.errors import PriceConflict
from billing.price_book import (
    Place,
    Price,
    from_now,
    is_drastic,
    place_of,
    price_before,
    request_neurons_micro_of,
    set_price,
    with_derived_neurons,
)
from billing.price_fields import (
    PLACE_FIELDS,
    PriceFileInvalid,
    check_names,
    parse_whole,
    read_count,
    read_place,
    read_usd,
    read_usd_if_any,
)
from billing.volume_file import CSV_CLASS, CSV_WHOLE, read_volume_row, volume_rows_of_csv
from billing.volume_prices import (
    VolumePrice,
    base_price,
    is_drastic_volume,
    latest_like,
    same_terms,
    set_volume_price,
)

_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_USD: Final = ("input_usd_per_m", "cached_input_usd_per_m", "output_usd_per_m", "reasoning_usd_per_m")
_REQUEST: Final = "request_usd"
_NEURONS: Final = ("input_neurons_per_m", "cached_input_neurons_per_m", "output_neurons_per_m")
_WHOLE: Final = (*_NEURONS, "prompt_tokens_from", CSV_WHOLE)
_KNOWN: Final = PLACE_FIELDS | {_REQUEST, *_USD, *_NEURONS}
_NEEDED: Final = ("model", "input_usd_per_m", "output_usd_per_m")


@dataclass(frozen=True, slots=True)
class PriceFile:
    """What a file says; nothing of it is kept yet."""

    prices: tuple[Price, ...]
    volume_prices: tuple[VolumePrice, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """Prices that were set, with their versions, and how many were as they are already."""

    prices: tuple[Price, ...]
    unchanged: int
    volume_prices: tuple[VolumePrice, ...] = ()


def read_price_file(path: Path) -> PriceFile:
    """Raises PriceFileInvalid."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PriceFileInvalid(f"{path} can't be read: {error.strerror}.") from error
    if len(data) > _FILE_BYTES_MAX:
        raise PriceFileInvalid(f"{path} is larger than {_FILE_BYTES_MAX} bytes.")
    try:
        text = data.decode()
        rows, volume_rows = _csv_rows(text) if path.suffix.lower() == ".csv" else _toml_rows(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, csv.Error) as error:
        raise PriceFileInvalid(f"{path} is no price file: {error}.") from error
    prices = [_price(row, f"price {number}") for number, row in enumerate(rows, start=1)]
    volumes = [read_volume_row(row, f"volume {number}") for number, row in enumerate(volume_rows, start=1)]
    kinds: Counter[tuple[object, ...]] = Counter((place_of(price),) for price in prices)
    kinds.update((volume.place, volume.token_class) for volume in volumes)
    twice = {place.model for (place, *_), count in kinds.items() if count > 1 and isinstance(place, Place)}
    if twice:
        raise PriceFileInvalid(f"A model has one price of a kind, but {', '.join(sorted(twice))} has more.")
    return PriceFile(tuple(prices), tuple(volumes))


def import_prices(connection: sa.Connection, file: PriceFile, *, now_ns: int, confirm: bool) -> Imported:
    """Set every price that differs from the one in force; in the caller's write transaction, so all or none.

    Raises PriceConflict, naming them, if prices change by more than ten times and that is not confirmed.
    """
    following = [(price_before(connection, price), price) for price in file.prices]
    changed = [(before, price) for before, price in following if before is None or _terms(before) != _terms(price)]
    drastic = [price.model for before, price in changed if before is not None and is_drastic(before, price)]
    _check_confirmed(drastic, confirm=confirm)
    # Begun together, by what there was before the file: its first row does not make its second one wait.
    begun = [from_now(connection, price, now_ns) for _, price in changed]
    kept = [set_price(connection, price) for price in begun]
    volumes = _import_volumes(connection, file.volume_prices, now_ns=now_ns, confirm=confirm)
    unchanged = len(following) - len(changed) + len(file.volume_prices) - len(volumes)
    return Imported(tuple(kept), unchanged, volumes)


def _import_volumes(
    connection: sa.Connection, volumes: Iterable[VolumePrice], *, now_ns: int, confirm: bool
) -> tuple[VolumePrice, ...]:
    """After the prices that they are about."""
    following = [(latest_like(connection, volume), volume) for volume in volumes]
    changed = [(before, volume) for before, volume in following if before is None or not same_terms(before, volume)]
    drastic = [
        volume.place.model
        for before, volume in changed
        if is_drastic_volume(before, volume, base_price(connection, volume))
    ]
    _check_confirmed(drastic, confirm=confirm)
    return tuple(set_volume_price(connection, volume, clock=lambda: now_ns) for _, volume in changed)


def _check_confirmed(drastic: list[str], *, confirm: bool) -> None:
    if drastic and not confirm:
        raise PriceConflict(f"More than ten times more or less than before: {', '.join(drastic)}. Confirm it if meant.")


_Rows = list[dict[str, Any]]


def _toml_rows(text: str) -> tuple[_Rows, _Rows]:
    """Of prices, and of prices by volume."""
    document = tomllib.loads(text)
    empty = not document
    found = [document.pop(name, []) for name in ("price", "volume")]
    if document or empty or not all(isinstance(rows, list) and all(map(_is_table, rows)) for rows in found):
        raise PriceFileInvalid("A price file holds [[volume]] and [[price]] tables and nothing else.")
    return found[0], found[1]


def _is_table(row: object) -> bool:
    return isinstance(row, dict)


def _csv_rows(text: str) -> tuple[_Rows, _Rows]:
    """As of TOML. Empty fields count as absent; numbers are text in a CSV file."""
    reader = csv.DictReader(text.splitlines(), strict=True)
    rows: _Rows = []
    bands: _Rows = []
    for line in reader:
        if None in line or None in line.values():
            raise PriceFileInvalid(f"Line {reader.line_num} has another number of fields than the first line.")
        row: dict[str, Any] = {name: value.strip() for name, value in line.items() if value.strip()}
        for name in _WHOLE:
            if name in row:
                row[name] = parse_whole(row[name], f"line {reader.line_num}, {name}")
        (bands if CSV_CLASS in row else rows).append(row)
    return rows, volume_rows_of_csv(bands)


def _price(row: dict[str, Any], place: str) -> Price:
    check_names(row, place, "price", known=_KNOWN, needed=_NEEDED)
    price = with_derived_neurons(
        read_place(row, place).model,
        input_nano_per_m=read_usd(row, "input_usd_per_m", place),
        cached_input_nano_per_m=read_usd_if_any(row, "cached_input_usd_per_m", place),
        output_nano_per_m=read_usd(row, "output_usd_per_m", place),
        reasoning_nano_per_m=read_usd_if_any(row, "reasoning_usd_per_m", place),
        effective_from_ns=0,
    )
    neurons: dict[str, Any] = {name: read_count(row, name, place) for name in _NEURONS if name in row}
    request_nano = read_usd_if_any(row, _REQUEST, place) or 0
    return replace(
        price,
        **read_place(row, place)._asdict(),
        request_nano=request_nano,
        request_neurons_micro=request_neurons_micro_of(request_nano),
        **neurons,
    )


def _terms(price: Price) -> dict[str, Any]:
    """What a price says, whenever it begins."""
    apart = {"version", "effective_from_ns", "effective_to_ns"}
    return {name: value for name, value in asdict(price).items() if name not in apart}
