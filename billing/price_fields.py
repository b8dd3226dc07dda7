"""Fields of price files' rows, read exactly. price_file.py and volume_file.py use it; place: says where a fault is."""

import re
from typing import Any, Final

from billing.money import parse_usd
from billing.price_book import LIST_BOOK, Place, Tier, account_book

PLACE_FIELDS: Final = frozenset({"model", "account_id", "tier", "prompt_tokens_from"})
_ACCOUNT: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MODEL_CHARACTERS_MAX: Final = 200
_DIGITS_MAX: Final = 18


class PriceFileInvalid(ValueError):
    """A file that is no price book; the message names the place and what is wrong there."""


def check_names(row: dict[str, Any], place: str, what: str, *, known: frozenset[str], needed: tuple[str, ...]) -> None:
    """Raises PriceFileInvalid for a field that is not known, or one that is needed and missing."""
    unknown = row.keys() - known
    missing = [name for name in needed if name not in row]
    if unknown or missing:
        fault = f"lacks {', '.join(missing)}" if missing else f"has no field named {', '.join(sorted(unknown))}"
        raise PriceFileInvalid(f"{place}: a {what} {fault}.")


def read_place(row: dict[str, Any], place: str) -> Place:
    """Where in the books the row stands; what it does not say is the list, the standard tier, prompts of any length."""
    model = row["model"]
    if not isinstance(model, str) or not 1 <= len(model) <= _MODEL_CHARACTERS_MAX or not model.isprintable():
        raise PriceFileInvalid(f"{place}: a model is named by 1 to {_MODEL_CHARACTERS_MAX} printable characters.")
    tier = row.get("tier", Tier.STANDARD.value)
    if tier not in set(Tier):
        raise PriceFileInvalid(f"{place}, tier: one of {', '.join(Tier)}.")
    book = LIST_BOOK
    if "account_id" in row:
        if not isinstance(row["account_id"], str) or _ACCOUNT.fullmatch(row["account_id"]) is None:
            raise PriceFileInvalid(f"{place}, account_id: 32 lower-case hexadecimal digits.")
        book = account_book(row["account_id"])
    return Place(book, model, tier, read_count(row, "prompt_tokens_from", place, missing=0))


def read_usd(row: dict[str, Any], name: str, place: str) -> int:
    """Nano-USD of decimal text."""
    if not isinstance(row[name], str):  # a TOML float has been rounded already
        raise PriceFileInvalid(f'{place}, {name}: write the amount as text, such as "0.27".')
    try:
        return parse_usd(row[name])
    except ValueError as error:
        raise PriceFileInvalid(f"{place}, {name}: {error}") from error


def read_usd_if_any(row: dict[str, Any], name: str, place: str) -> int | None:
    return read_usd(row, name, place) if name in row else None


def read_count(row: dict[str, Any], name: str, place: str, *, missing: int | None = None) -> int:
    """A whole number; `missing` where the row has none and that is given."""
    value = row[name] if missing is None else row.get(name, missing)
    if type(value) is not int or value < 0:
        raise PriceFileInvalid(f"{place}, {name}: a whole number, not negative.")
    return value


def parse_whole(text: str, place: str) -> int:
    """Of a CSV file's field, where numbers are text."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise PriceFileInvalid(f"{place}: {text!r} is no whole number.")
    return int(text)
