"""Prices: immutable, versioned rows, and a snapshot of them, which says what a request is charged.

At any instant one row is in force per book, model, tier and length of prompt. An account's own book stands before the
list; a tier without a price of its own is served at the standard one, and recorded so. A model without a price has
none: zero is a price, absence is not. Rows only ever gain their end. The composition root refreshes the snapshot each
second; requests read it without waiting.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

import sqlalchemy as sa

from billing.errors import BillingUnavailable, PriceConflict, PriceUnavailable
from billing.money import MICRO_PER_NEURON, round_half_up
from billing.tables import prices
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, SERVICE, Actor
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

LIST_BOOK: Final = "list"


class Tier(StrEnum):
    """How a request is served, which may have its own price: at once, when there is room, or before others."""

    STANDARD = "standard"
    BATCH = "batch"
    PRIORITY = "priority"


# Workers AI's own rate: 0.011 USD per 1,000 neurons, so a neuron is 11,000 nano-USD.
NANO_PER_NEURON = 11_000

# Every process reads the price book each second: it has a new price before that takes effect.
_NOTICE_NS = 2_000_000_000

# Ten thousand USD per million tokens, and somewhat more than as many neurons: beyond lies a slip of the keyboard, and
# requests whose micro-neurons would leave BIGINT.
NANO_PER_M_MAX: Final = 10**13
_NEURONS_MAX = 10**9
# A thousand USD, and as many micro-neurons, for one request.
_REQUEST_NANO_MAX = 10**12
_REQUEST_NEURONS_MICRO_MAX = 10**14
_PROMPT_TOKENS_MAX = 10**9


@dataclass(frozen=True, slots=True)
class Price:
    """One immutable row, in nano-USD and neurons per million tokens; in force in [effective_from_ns, effective_to_ns).

    A class that is not priced apart costs what its whole costs: cached input as input, reasoning as output.
    prompt_tokens_from: the row is for prompts of at least so many tokens, and prices all of theirs. request_nano,
    request_neurons_micro: what a request costs beside its tokens, in nano-USD and millionths of a neuron.
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
    prompt_tokens_from: int = 0
    request_nano: int = 0
    request_neurons_micro: int = 0

    def in_force(self, at_ns: int) -> bool:
        return self.effective_from_ns <= at_ns and (self.effective_to_ns is None or at_ns < self.effective_to_ns)

    @property
    def cached_nano(self) -> int:
        return self.input_nano_per_m if self.cached_input_nano_per_m is None else self.cached_input_nano_per_m

    @property
    def reasoning_nano(self) -> int:
        return self.output_nano_per_m if self.reasoning_nano_per_m is None else self.reasoning_nano_per_m

    @property
    def cached_neurons(self) -> int:
        return self.input_neurons_per_m if self.cached_input_neurons_per_m is None else self.cached_input_neurons_per_m


class Place(NamedTuple):
    """Where a price stands in the books: at an instant at most one row of a place is in force."""

    book: str
    model: str
    tier: str
    prompt_tokens_from: int


_Found = tuple[str, str, str]  # book, model, tier: a place but for the length of prompts


class PriceBook:
    """The snapshot of every price row that this process prices by. Empty until the first refresh."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fingerprint: tuple[int, ...] | None = None
        self._by_version: Mapping[int, Price] = {}
        self._by_place: Mapping[_Found, tuple[Price, ...]] = {}

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
        by_place: defaultdict[_Found, list[Price]] = defaultdict(list)
        for price in rows:
            by_place[price.book, price.model, price.tier].append(price)
        self._by_place = {place: _longest_first(listed) for place, listed in by_place.items()}

    def price_in_force(
        self,
        model: str,
        at_ns: int,
        *,
        account_id: str | None = None,
        tier: Tier = Tier.STANDARD,
        prompt_tokens: int = 0,
    ) -> Price:
        """What exactly this model costs the account at this instant; the list's price without an account.

        The price's tier is the one served: the standard one where the wanted one has no price of its own. Raises
        PriceUnavailable: no other model's price, no default.
        """
        for served in (tier, Tier.STANDARD):
            if account_id is not None:
                own = self._find((account_book(account_id), model, served), at_ns, prompt_tokens)
                if own is not None:
                    return own
            listed = self._find((LIST_BOOK, model, served), at_ns, prompt_tokens)
            if listed is not None:
                return listed
        raise PriceUnavailable(f"The model {model!r} has no price, so it can't be used now.")

    def _find(self, place: _Found, at_ns: int, prompt_tokens: int) -> Price | None:
        for price in self._by_place.get(place, ()):
            if price.prompt_tokens_from <= prompt_tokens and price.in_force(at_ns):
                return price
        return None

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


def price_before(connection: sa.Connection, price: Price) -> Price | None:
    """The row without an end that this one would follow; it may lie a moment ahead."""
    rows = read_prices(connection, model=price.model)
    same = (row for row in rows if place_of(row) == place_of(price))
    return next((row for row in same if row.effective_to_ns is None), None)


def from_now(connection: sa.Connection, price: Price, now_ns: int) -> Price:
    """As it begins if it is set now: at once for a model that has none, else when every process knows of it."""
    before = price_before(connection, price)
    if before is None and not read_prices(connection, model=price.model):
        return replace(price, effective_from_ns=now_ns)
    follows_ns = 0 if before is None else before.effective_from_ns
    return replace(price, effective_from_ns=max(now_ns, follows_ns) + _NOTICE_NS)


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
    same = sa.and_(
        prices.c.book == price.book,
        prices.c.model == price.model,
        prices.c.tier == price.tier,
        prices.c.prompt_tokens_from == price.prompt_tokens_from,
    )
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
        account_id=account_of(price.book),
        action="price.set",
        subject=price.model,
        version=int(inserted[0]),
        tier=price.tier,
        prompt_tokens_from=price.prompt_tokens_from,
        request_nano=price.request_nano,
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
        tier=Tier.STANDARD.value,
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
        (before.request_nano, after.request_nano),
    )
    return any(max(pair) > factor * min(pair) for pair in pairs)


def neurons_of(nano_per_m: int) -> int:
    """Neurons per million tokens for an amount in nano-USD per million tokens."""
    return round_half_up(nano_per_m, NANO_PER_NEURON)


def request_neurons_micro_of(request_nano: int) -> int:
    """Millionths of a neuron for an amount in nano-USD."""
    return round_half_up(request_nano * MICRO_PER_NEURON, NANO_PER_NEURON)


def place_of(price: Price) -> Place:
    return Place(price.book, price.model, price.tier, price.prompt_tokens_from)


def account_book(account_id: str) -> str:
    """The name of the account's own book."""
    return f"account:{account_id}"


def account_of(book: str) -> str | None:
    """Whose book it is; None for the list."""
    kind, _, account_id = book.partition(":")
    return account_id if kind == "account" else None


def _longest_first(listed: list[Price]) -> tuple[Price, ...]:
    """By the length of prompts that they ask for, then the newest first."""
    return tuple(sorted(listed, key=lambda price: (-price.prompt_tokens_from, -price.effective_from_ns)))


def _check(price: Price) -> None:
    nano = (price.input_nano_per_m, price.cached_nano, price.output_nano_per_m, price.reasoning_nano)
    neurons = (price.input_neurons_per_m, price.cached_neurons, price.output_neurons_per_m)
    if min(*nano, *neurons) < 0 or max(nano) > NANO_PER_M_MAX or max(neurons) > _NEURONS_MAX:
        raise PriceConflict(
            f"Per million tokens a price lies between 0 and {NANO_PER_M_MAX} nano-USD, "
            f"and 0 and {_NEURONS_MAX} neurons."
        )
    if not (
        0 <= price.request_nano <= _REQUEST_NANO_MAX
        and 0 <= price.request_neurons_micro <= _REQUEST_NEURONS_MICRO_MAX
        and 0 <= price.prompt_tokens_from <= _PROMPT_TOKENS_MAX
    ):
        raise PriceConflict(
            f"A request costs between 0 and {_REQUEST_NANO_MAX} nano-USD, "
            f"and {_REQUEST_NEURONS_MICRO_MAX} micro-neurons."
        )
    assert price.tier in set(Tier), "tiers are the known ones"
    assert price.effective_to_ns is None, "a new price has no end yet"
