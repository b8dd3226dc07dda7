"""Prices by volume in price files: `[[volume]]` tables of TOML, or a CSV line a band. price_file.py reads with it.

[[volume]]
model = "@cf/example/model"        # tier, account_id, prompt_tokens_from as a price's
token_class = "output"             # input, cached_input, output, reasoning
mode = "graduated"                 # each band at its price; "volume": all at the price of the band reached; "none"
from_month = "2027-01"             # without it, the month after this one
bands = [{ tokens_from = 0, usd_per_m = "2" }, { tokens_from = 1_000_000_000, usd_per_m = "1.5" }]
"""

from collections.abc import Iterable
from typing import Any, Final

from billing.ledger.periods import month_bounds
from billing.price_fields import PLACE_FIELDS, PriceFileInvalid, check_names, read_count, read_place, read_usd
from billing.volume_prices import Band, TokenClass, VolumeMode, VolumePrice

# A CSV line with a class is a band: its columns, and what they are in TOML.
CSV_CLASS: Final = "volume_class"
CSV_WHOLE: Final = "volume_tokens_from"
_CSV_TERMS: Final = {CSV_CLASS: "token_class", "volume_mode": "mode", "volume_month": "from_month"}
_CSV_BAND: Final = {CSV_WHOLE: "tokens_from", "volume_usd_per_m": "usd_per_m"}
_KNOWN: Final = PLACE_FIELDS | {"token_class", "mode", "from_month", "bands"}
_BAND: Final = ("tokens_from", "usd_per_m")


def read_volume_row(row: dict[str, Any], place: str) -> VolumePrice:
    """One schedule, not kept yet; from_month is "" where the row names none. Raises PriceFileInvalid."""
    check_names(row, place, "volume price", known=_KNOWN, needed=("model", "token_class", "mode"))
    for name, known in (("token_class", TokenClass), ("mode", VolumeMode)):
        if row[name] not in set(known):
            raise PriceFileInvalid(f"{place}, {name}: one of {', '.join(known)}.")
    from_month = row.get("from_month", "")
    if from_month:
        try:
            month_bounds(str(from_month))
        except ValueError as error:
            raise PriceFileInvalid(f"{place}, from_month: {error}") from error
    bands = row.get("bands", [])
    if not isinstance(bands, list) or not all(isinstance(band, dict) for band in bands):
        raise PriceFileInvalid(f"{place}, bands: tables of {' and '.join(_BAND)}.")
    return VolumePrice(
        version=0,
        place=read_place(row, place),
        token_class=TokenClass(row["token_class"]),
        mode=VolumeMode(row["mode"]),
        bands=tuple(_band(band, f"{place}, band {number}") for number, band in enumerate(bands, start=1)),
        from_month=str(from_month),
    )


def volume_rows_of_csv(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines that are bands, put together as TOML has them: those of one schedule say the same but for the band."""
    rows: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}
    for line in lines:
        terms = {_CSV_TERMS.get(name, name): value for name, value in line.items() if name not in _CSV_BAND}
        row = rows.setdefault(tuple(sorted(terms.items())), terms | {"bands": []})
        band = {name: line[column] for column, name in _CSV_BAND.items() if column in line}
        if band:
            row["bands"].append(band)
    return list(rows.values())


def _band(band: dict[str, Any], place: str) -> Band:
    check_names(band, place, "band", known=frozenset(_BAND), needed=_BAND)
    return Band(read_count(band, "tokens_from", place), read_usd(band, "usd_per_m", place))
