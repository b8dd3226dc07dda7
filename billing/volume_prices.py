"""Prices by a month's volume: immutable schedules of bands, and what a volume costs by one.

A schedule belongs to the place of a price (book, model, tier, length of prompt) and to one class of its tokens.
Requests are charged at the price, as if there were none; when a month closes, invoices/volumes.py books the difference.
price_file.py and the command line set schedules. Amounts are nano-USD per million tokens.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

import orjson
import sqlalchemy as sa

from billing.errors import PriceConflict
from billing.ledger.periods import month_after, month_of
from billing.price_book import NANO_PER_M_MAX, Place, Price, account_of, place_of, read_prices
from billing.tables import volume_prices
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor

_BANDS_MAX: Final = 50
_TOKENS_MAX: Final = 10**15


class TokenClass(StrEnum):
    """What tokens are priced as: each token of a request is of one class."""

    INPUT = "input"
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"
    REASONING = "reasoning"


class VolumeMode(StrEnum):
    """GRADUATED: each band's tokens cost that band's price. VOLUME: all tokens cost the price of the band reached.

    NONE: from its month on, the price alone counts again.
    """

    GRADUATED = "graduated"
    VOLUME = "volume"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Band:
    """From so many tokens of the month on, up to the next band."""

    tokens_from: int
    nano_per_m: int


@dataclass(frozen=True, slots=True)
class VolumePrice:
    """One immutable schedule. from_month: the first month that it counts for, such as "2026-12"."""

    version: int
    place: Place
    token_class: TokenClass
    mode: VolumeMode
    bands: tuple[Band, ...]
    from_month: str

    def numerator(self, tokens: int) -> int:
        """What a month's tokens of this class cost, in millionths of a nano-USD: exact."""
        assert self.bands, "a schedule that ended prices nothing"
        reached = [band for band in self.bands if band.tokens_from <= tokens]
        if self.mode is VolumeMode.VOLUME:
            return tokens * reached[-1].nano_per_m
        ends = [band.tokens_from for band in reached[1:]] + [tokens]
        return sum((end - band.tokens_from) * band.nano_per_m for band, end in zip(reached, ends, strict=True))


def read_volume_prices(connection: sa.Connection, *, model: str | None = None) -> list[VolumePrice]:
    """Every schedule, or those of one model, oldest version first."""
    query = sa.select(volume_prices).order_by(volume_prices.c.version)
    if model is not None:
        query = query.where(volume_prices.c.model == model)
    return [_read(row) for row in connection.execute(query).mappings()]


def in_force(schedules: Iterable[VolumePrice], month: str) -> dict[tuple[Place, TokenClass], VolumePrice]:
    """Which schedule counts for the tokens of a month, by place and class; none where one has ended."""
    latest: dict[tuple[Place, TokenClass], VolumePrice] = {}
    for schedule in sorted(schedules, key=lambda one: (one.from_month, one.version)):
        if schedule.from_month <= month:
            latest[schedule.place, schedule.token_class] = schedule
    return {where: schedule for where, schedule in latest.items() if schedule.mode is not VolumeMode.NONE}


def same_terms(one: VolumePrice, other: VolumePrice) -> bool:
    """Whether they say the same of the same tokens, whenever they begin."""
    return replace(one, version=0, from_month="") == replace(other, version=0, from_month="")


def latest_like(connection: sa.Connection, schedule: VolumePrice) -> VolumePrice | None:
    """The schedule of the same tokens that begins last; it may lie ahead."""
    same = [
        one
        for one in read_volume_prices(connection, model=schedule.place.model)
        if (one.place, one.token_class) == (schedule.place, schedule.token_class)
    ]
    return max(same, key=lambda one: (one.from_month, one.version), default=None)


def is_drastic_volume(before: VolumePrice | None, after: VolumePrice, price: Price, *, factor: int = 10) -> bool:
    """Whether a band is more than `factor` from the price, or from the same band before: most likely a slip."""
    base_nano = _base_nano(price, after.token_class)
    known = {} if before is None else {band.tokens_from: band.nano_per_m for band in before.bands}
    pairs = ((known.get(band.tokens_from, base_nano), band.nano_per_m) for band in after.bands)
    return any(max(pair) > factor * min(pair) for pair in pairs)


def set_volume_price(
    connection: sa.Connection,
    schedule: VolumePrice,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> VolumePrice:
    """Add a schedule, and return it with its version (the one given is ignored). from_month "": the next month.

    Runs in the caller's write transaction. Raises PriceConflict for one that would change what a month that has begun
    was told to cost: the running month can be named only where it has no schedule yet.
    """
    running = month_of(clock())
    schedule = replace(schedule, from_month=schedule.from_month or month_after(running))
    _check(schedule)
    audit_log.wait_turn(connection)
    base_price(connection, schedule)
    latest = latest_like(connection, schedule)
    if schedule.from_month < running or (latest is not None and schedule.from_month < latest.from_month):
        raise PriceConflict(
            f"A volume price of {schedule.place.model!r} can't begin before the running month or an earlier one."
        )
    if latest is not None and schedule.from_month == running:
        raise PriceConflict(f"{schedule.place.model!r} has volume prices: others begin with the next month.")
    values = {
        **schedule.place._asdict(),
        "token_class": schedule.token_class.value,
        "mode": schedule.mode.value,
        "bands": orjson.dumps([[band.tokens_from, band.nano_per_m] for band in schedule.bands]).decode(),
        "from_month": schedule.from_month,
    }
    inserted = connection.execute(volume_prices.insert().values(values)).inserted_primary_key
    assert inserted is not None, "an insert of one row tells its key"
    kept = replace(schedule, version=int(inserted[0]))
    audit_log.record(
        connection,
        at_ns=clock(),
        by=by,
        account_id=account_of(schedule.place.book),
        action="volume_price.set",
        subject=schedule.place.model,
        version=kept.version,
        tier=schedule.place.tier,
        token_class=schedule.token_class.value,
        mode=schedule.mode.value,
        from_month=schedule.from_month,
    )
    return kept


def base_price(connection: sa.Connection, schedule: VolumePrice) -> Price:
    """The price that the schedule is about: the one without an end. Raises PriceConflict if there is none."""
    rows = read_prices(connection, model=schedule.place.model)
    open_ones = (row for row in rows if row.effective_to_ns is None and place_of(row) == schedule.place)
    found = next(open_ones, None)
    if found is None:
        raise PriceConflict(f"A volume price of {schedule.place.model!r} needs a price of the same kind.")
    return found


def _base_nano(price: Price, token_class: TokenClass) -> int:
    return {
        TokenClass.INPUT: price.input_nano_per_m,
        TokenClass.CACHED_INPUT: price.cached_nano,
        TokenClass.OUTPUT: price.output_nano_per_m,
        TokenClass.REASONING: price.reasoning_nano,
    }[token_class]


def _check(schedule: VolumePrice) -> None:
    bands = schedule.bands
    if schedule.mode is VolumeMode.NONE:
        if bands:
            raise PriceConflict("A volume price of the mode 'none' has no bands.")
        return
    starts = [band.tokens_from for band in bands]
    if not 1 <= len(bands) <= _BANDS_MAX or starts[0] != 0 or any(one >= other for one, other in pairwise(starts)):
        raise PriceConflict(f"Bands are 1 to {_BANDS_MAX}, the first from 0 tokens, each from more than the last.")
    if starts[-1] > _TOKENS_MAX or any(not 0 <= band.nano_per_m <= NANO_PER_M_MAX for band in bands):
        raise PriceConflict(f"A band begins at {_TOKENS_MAX} tokens at most, and costs 0 to {NANO_PER_M_MAX} nano-USD.")


def _read(row: sa.RowMapping) -> VolumePrice:
    return VolumePrice(
        version=row["version"],
        place=Place(row["book"], row["model"], row["tier"], row["prompt_tokens_from"]),
        token_class=TokenClass(row["token_class"]),
        mode=VolumeMode(row["mode"]),
        bands=tuple(Band(tokens_from, nano_per_m) for tokens_from, nano_per_m in orjson.loads(row["bands"])),
        from_month=row["from_month"],
    )
