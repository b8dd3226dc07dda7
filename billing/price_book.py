"""Prices: immutable, versioned rows, one in force per book, model and tier at any instant, and a snapshot of them.

The composition root refreshes the snapshot each second; requests read it without waiting. A model without a price has
none: zero is a price, absence is not. Rows only ever gain their end.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import sqlalchemy as sa

from billing.errors import BillingUnavailable, PriceConflict, PriceUnavailable
from billing.money import round_half_up
from billing.tables import prices
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, SERVICE, Actor
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

LIST_BOOK = "list"
STANDARD_TIER = "standard"

# Workers AI's own rate: 0.011 USD per 1,000 neurons, so a neuron is 11,000 nano-USD.
NANO_PER_NEURON = 11_000

# Every process reads the price book each second: it has a new price before that takes effect.
_NOTICE_NS = 2_000_000_000

# Ten thousand USD per million tokens, and somewhat more than as many neurons: beyond lies a slip of the keyboard, and
# requests whose micro-neurons would leave BIGINT.
_NANO_MAX = 10**13
_NEURONS_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Price:
    """One immutable row, in nano-USD and neurons per million tokens; in force in [effective_from_ns, effective_to_ns).

    A class that is not priced apart costs what its whole costs: cached input as input, reasoning as output.
    """

    version: int
    book: str
    model: str
    tier: str
    input_nano_per_m: int
    cached_input_nano_per_m: int | None
    output_nano_per_m: int
    reasoning_nano_per_m: int | None
    input_neurons_per_m: int
    cached_input_neurons_per_m: int | None
    output_neurons_per_m: int
    effective_from_ns: int
    effective_to_ns: int | None = None

    @property
    def cached_nano(self) -> int:
        return self.input_nano_per_m if self.cached_input_nano_per_m is None else self.cached_input_nano_per_m

    @property
    def reasoning_nano(self) -> int:
        return self.output_nano_per_m if self.reasoning_nano_per_m is None else self.reasoning_nano_per_m

    @property
    def cached_neurons(self) -> int:
        return self.input_neurons_per_m if self.cached_input_neurons_per_m is None else self.cached_input_neurons_per_m


class PriceBook:
    """The snapshot of every price row that this process prices by. Empty until the first refresh."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fingerprint: tuple[int, ...] | None = None
        self._by_version: Mapping[int, Price] = {}
        self._by_model: Mapping[str, tuple[Price, ...]] = {}

    async def refresh(self) -> None:
        """Read the rows again if there is anything new. Raises BillingUnavailable; the old snapshot then stays."""
        try:
            found = await self._database.call(self._read, self._fingerprint)
        except TenancyUnavailable as error:
            raise BillingUnavailable("Prices can't be read now.", retry_after_s=1) from error
        if found is None:
            return
        self._fingerprint, rows = found
        self._by_version = {price.version: price for price in rows}
        by_model: defaultdict[str, list[Price]] = defaultdict(list)
        for price in rows:
            if (price.book, price.tier) == (LIST_BOOK, STANDARD_TIER):
                by_model[price.model].append(price)
        self._by_model = {model: _newest_first(listed) for model, listed in by_model.items()}

    def price_in_force(self, model: str, at_ns: int) -> Price:
        """The list price of exactly this model at this instant. Raises PriceUnavailable: no prefix, no default."""
        for price in self._by_model.get(model, ()):
            if price.effective_from_ns <= at_ns:
                if price.effective_to_ns is None or at_ns < price.effective_to_ns:
                    return price
                break
        raise PriceUnavailable(f"The model {model!r} has no price, so it can't be used now.")

    def by_version(self, version: int) -> Price:
        """The row with which a request started. Raises PriceUnavailable if this snapshot does not know it."""
        price = self._by_version.get(version)
        if price is None:
            raise PriceUnavailable(f"There is no price of version {version}.")
        return price

    def _read(self, known: tuple[int, ...] | None) -> tuple[tuple[int, ...], list[Price]] | None:
        # Rows are added and gain an end, nothing else: these three numbers change with every change.
        summary = sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.max(prices.c.version), 0),
            sa.func.count(prices.c.effective_to_ns),
        ).select_from(prices)
        with self._database.read() as connection:
            fingerprint = tuple(connection.execute(summary).one())
            return None if fingerprint == known else (fingerprint, read_prices(connection))


def read_prices(connection: sa.Connection, *, model: str | None = None) -> list[Price]:
    """Every row, or every row of one model, oldest version first."""
    query = sa.select(prices).order_by(prices.c.version)
    if model is not None:
        query = query.where(prices.c.model == model)
    return [Price(**row) for row in connection.execute(query).mappings()]


def price_open_now(connection: sa.Connection, model: str) -> Price | None:
    """The list price that has no end yet, which a new one would follow; it may lie a moment ahead."""
    rows = read_prices(connection, model=model)
    listed = (price for price in rows if (price.book, price.tier) == (LIST_BOOK, STANDARD_TIER))
    return next((price for price in listed if price.effective_to_ns is None), None)


def start_after(before: Price | None, now_ns: int) -> int:
    """When a price that is set now begins: at once for a model that has none, else when every process knows of it."""
    return now_ns if before is None else max(now_ns, before.effective_from_ns) + _NOTICE_NS


def set_price(
    connection: sa.Connection,
    price: Price,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Price:
    """Add a row, end the one it follows, and return it with its version (the one given is ignored).

    Runs in the caller's write transaction. Raises PriceConflict if it would begin before the row it follows, so that no
    instant has two prices and none that passed changes its own.
    """
    _check(price)
    audit_log.wait_turn(connection)  # a file of prices is many entries in one transaction: no two of them cross
    same = sa.and_(prices.c.book == price.book, prices.c.model == price.model, prices.c.tier == price.tier)
    latest = (
        connection.execute(
            sa.select(prices).where(same).order_by(prices.c.effective_from_ns.desc()).limit(1),
        )
        .mappings()
        .first()
    )
    if latest is not None:
        end_ns = latest["effective_to_ns"]
        if price.effective_from_ns <= latest["effective_from_ns"] or (
            end_ns is not None and price.effective_from_ns < end_ns
        ):
            raise PriceConflict(f"A price of {price.model!r} that begins later or at the same instant exists already.")
        if end_ns is None:
            connection.execute(
                prices.update()
                .where(prices.c.version == latest["version"])
                .values(effective_to_ns=price.effective_from_ns),
            )
    values = asdict(price)
    del values["version"]
    inserted = connection.execute(prices.insert().values(values)).inserted_primary_key
    assert inserted is not None, "an insert of one row tells its key"
    audit_log.record(
        connection,
        at_ns=clock(),
        by=by,
        account_id=None,
        action="price.set",
        subject=price.model,
        version=int(inserted[0]),
        input_nano_per_m=price.input_nano_per_m,
        output_nano_per_m=price.output_nano_per_m,
    )
    return replace(price, version=int(inserted[0]))


def seed_default_price(
    database: Database,
    model: str,
    *,
    input_nano_per_m: int,
    cached_input_nano_per_m: int | None,
    output_nano_per_m: int,
    now_ns: int,
) -> Price | None:
    """Give the model its first price, neurons derived; None if it has, or ever had, any: an operator's word stands."""
    with database.write() as connection:
        if read_prices(connection, model=model):
            return None
        return set_price(
            connection,
            with_derived_neurons(
                model,
                input_nano_per_m=input_nano_per_m,
                cached_input_nano_per_m=cached_input_nano_per_m,
                output_nano_per_m=output_nano_per_m,
                reasoning_nano_per_m=None,
                effective_from_ns=now_ns,
            ),
            by=SERVICE,
        )


def with_derived_neurons(
    model: str,
    *,
    input_nano_per_m: int,
    cached_input_nano_per_m: int | None,
    output_nano_per_m: int,
    reasoning_nano_per_m: int | None,
    effective_from_ns: int,
) -> Price:
    """A list price, not yet kept, whose neurons follow from its dollars."""
    cached = cached_input_nano_per_m
    return Price(
        version=0,
        book=LIST_BOOK,
        model=model,
        tier=STANDARD_TIER,
        input_nano_per_m=input_nano_per_m,
        cached_input_nano_per_m=cached,
        output_nano_per_m=output_nano_per_m,
        reasoning_nano_per_m=reasoning_nano_per_m,
        input_neurons_per_m=neurons_of(input_nano_per_m),
        cached_input_neurons_per_m=None if cached is None else neurons_of(cached),
        output_neurons_per_m=neurons_of(output_nano_per_m),
        effective_from_ns=effective_from_ns,
    )


def is_drastic(before: Price, after: Price, *, factor: int = 10) -> bool:
    """Whether a class changes by more than `factor`, up or down, or to or from nothing: most likely a slip."""
    pairs = (
        (before.input_nano_per_m, after.input_nano_per_m),
        (before.cached_nano, after.cached_nano),
        (before.output_nano_per_m, after.output_nano_per_m),
        (before.reasoning_nano, after.reasoning_nano),
    )
    return any(max(pair) > factor * min(pair) for pair in pairs)


def neurons_of(nano_per_m: int) -> int:
    """Neurons per million tokens for an amount in nano-USD per million tokens."""
    return round_half_up(nano_per_m, NANO_PER_NEURON)


def _newest_first(listed: list[Price]) -> tuple[Price, ...]:
    return tuple(sorted(listed, key=lambda price: price.effective_from_ns, reverse=True))


def _check(price: Price) -> None:
    nano = (price.input_nano_per_m, price.cached_nano, price.output_nano_per_m, price.reasoning_nano)
    neurons = (price.input_neurons_per_m, price.cached_neurons, price.output_neurons_per_m)
    if min(*nano, *neurons) < 0 or max(nano) > _NANO_MAX or max(neurons) > _NEURONS_MAX:
        raise PriceConflict(
            f"Per million tokens a price lies between 0 and {_NANO_MAX} nano-USD, and 0 and {_NEURONS_MAX} neurons."
        )
    assert price.effective_to_ns is None, "a new price has no end yet"
