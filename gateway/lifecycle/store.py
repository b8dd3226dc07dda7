"""Units in SQL: who owns one, how it stands, what is wished of it. Synchronous, as all stores.

A change is compared and swapped by its version, so that of two who saw the same row one alone changes it. An owner's
changes also name its fence: one that was taken over while it slept changes nothing more. A wish is anybody's.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, Protocol, TypeVar

import sqlalchemy as sa

from gateway.lifecycle.states import By, Depth, Record, StartLimits, State, Unit, Wish, Wished, advance
from gateway.lifecycle.tables import unit_starts, unit_uses, units
from tenancy import audit_log
from tenancy.audit_log import Actor
from tenancy.database import Database, insert_missing

T = TypeVar("T")

_SECOND_NS: Final = 1_000_000_000
_OWN: Final = tuple(field.name for field in fields(Record) if field.name != "unit")
_LEASE: Final = frozenset({"owner", "fence", "lease_until_ns"})
# Wishes of one unit that meet at once: each round one of them gets through.
_ROUNDS_MAX: Final = 50


class Call(Protocol):
    """Runs a synchronous function of a store. Raises TenancyUnavailable, and what the function raises."""

    def __call__(self, function: Callable[..., T], *args: Any) -> Awaitable[T]: ...


class UnitStore:
    """lease_s: how long a unit stays its owner's without a sign of life. clock: Unix nanoseconds; those of several
    gateways may differ by a part of the lease.
    """

    def __init__(self, database: Database, *, lease_s: float, clock: Callable[[], int], limits: StartLimits) -> None:
        self._database = database
        self._lease_ns = round(lease_s * _SECOND_NS)
        self._clock = clock
        self._limits = limits

    def add(self, wishes: Iterable[tuple[Unit, Wish]]) -> None:
        """Units that the deployment names. One that is known stays as it is, but for the wish that it be awake.

        One that is new has that wish from the start and is not told of it again: who has seen it may wish otherwise.
        """
        wishes, now_ns = list(wishes), self._clock()
        with self._database.write() as connection:
            known = [
                (unit, wish)
                for unit, wish in wishes
                if not insert_missing(
                    connection,
                    units,
                    [_row(Record(unit, since_ns=now_ns, wish=wish, wish_since_ns=now_ns, version=1))],
                )
            ]
        for unit, wish in known:
            if wish is Wish.AWAKE:
                self.wish(unit, Wished(wish, By.DEPLOYMENT))

    def all(self) -> list[Record]:
        query = sa.select(units).order_by(units.c.model, units.c.name, units.c.place)
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def standing(self, places: Sequence[str], elsewhere: Collection[tuple[str, str]] = ()) -> list[Record]:
        """Those of these places. elsewhere: models and names of units that other places have; those with an owner."""
        chosen: sa.ColumnElement[bool] = units.c.place.in_(places)
        if elsewhere:
            named = sa.tuple_(units.c.model, units.c.name).in_(sorted(elsewhere))
            owned = sa.and_(units.c.place.not_in(places), units.c.lease_until_ns > self._clock())
            chosen = sa.or_(chosen, sa.and_(named, owned))
        query = sa.select(units).where(chosen)
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def of(self, wanted: Sequence[Unit]) -> list[Record]:
        """Those of these units that are known."""
        if not wanted:
            return []
        keys = sa.tuple_(units.c.model, units.c.name, units.c.place)
        query = sa.select(units).where(keys.in_([(unit.model, unit.name, unit.place) for unit in wanted]))
        with self._database.read() as connection:
            return [_record(row) for row in connection.execute(query).mappings()]

    def take(self, unit: Unit, owner: str) -> Record | None:
        """Own it from now on, under a new fence. None: somebody else does, or it is not known.

        owner: names one life of one process, so that a process that starts anew is another owner; one that knows that
        its predecessor is dead says so by `free_place`.
        """
        with self._database.write() as connection:
            record = _find(connection, unit)
            now_ns = self._clock()
            if record is None or (record.owner not in {None, owner} and now_ns < record.lease_until_ns):
                return None
            taken = replace(record, owner=owner, fence=record.fence + 1, lease_until_ns=now_ns + self._lease_ns)
            return _swap(connection, record, taken, lease=True)

    def renew(self, owner: str) -> set[Unit]:
        """A sign of life for all that it owns; those it still owns."""
        mine = units.c.owner == owner
        with self._database.write() as connection:
            connection.execute(units.update().where(mine).values(lease_until_ns=self._clock() + self._lease_ns))
            query = sa.select(units.c.model, units.c.name, units.c.place).where(mine)
            return {Unit(*row) for row in connection.execute(query)}

    def save(self, was: Record, now: Record) -> Record | None:
        """An owner's change. None: the row has changed since it was `was`, or is another's: read it again."""
        with self._database.write() as connection:
            return _swap(connection, was, now)

    def free(self, record: Record) -> None:
        """Its owner gives it up: whoever comes next need not wait for the lease to end."""
        with self._database.write() as connection:
            mine = _is(record.unit), units.c.owner == record.owner, units.c.fence == record.fence
            connection.execute(units.update().where(*mine).values(owner=None, lease_until_ns=0))

    def free_place(self, place: str) -> None:
        """Whoever owned units of this place is dead, as the caller knows for certain."""
        with self._database.write() as connection:
            connection.execute(units.update().where(units.c.place == place).values(owner=None, lease_until_ns=0))

    def forget(self, unit: Unit) -> None:
        """The deployment names it no more, and nothing of it runs."""
        with self._database.write() as connection:
            for table in (unit_starts, unit_uses, units):
                same = table.c.model == unit.model, table.c.name == unit.name, table.c.place == unit.place
                connection.execute(table.delete().where(*same))

    def wish(self, unit: Unit, wished: Wished, *, ordered_by: Actor | None = None) -> Record | None:
        """It stands so now, with this wish or with the one that outranks it. None: it is not known.

        ordered_by: whose deed it is, for the audit log.
        """
        for _ in range(_ROUNDS_MAX):
            with self._database.write() as connection:
                record = _find(connection, unit)
                if record is None:
                    return None
                changed = advance(record, wished, self._clock(), self._limits)
                if changed == record:
                    return record
                if (swapped := _swap(connection, record, changed)) is None:
                    continue
                if ordered_by is not None:
                    subject = f"{unit.model} {unit.name}"
                    action = f"unit.{wished.wish}"
                    audit_log.record(
                        connection, at_ns=self._clock(), by=ordered_by, account_id=None, action=action, subject=subject
                    )
                return swapped
        raise AssertionError("of those who swap at once one gets through each time")


def units_named(database: Database, model: str, names: Collection[str]) -> list[Record]:
    """Those of a model's units that have these names, at every place. Blocks, as UnitStore does."""
    query = sa.select(units).where(units.c.model == model, units.c.name.in_(sorted(names)))
    with database.read() as connection:
        return [_record(row) for row in connection.execute(query).mappings()]


def _find(connection: sa.Connection, unit: Unit) -> Record | None:
    row = connection.execute(sa.select(units).where(_is(unit))).mappings().first()
    return None if row is None else _record(row)


def _swap(connection: sa.Connection, was: Record, now: Record, *, lease: bool = False) -> Record | None:
    """lease: with its owner and lease, which are renewed apart from all else and are left as they are else."""
    now = replace(now, version=was.version + 1)
    same = _is(was.unit), units.c.version == was.version, units.c.fence == was.fence
    values = {name: getattr(now, name) for name in _OWN if lease or name not in _LEASE}
    return now if connection.execute(units.update().where(*same).values(values)).rowcount else None


def _is(unit: Unit) -> sa.ColumnElement[bool]:
    return sa.and_(units.c.model == unit.model, units.c.name == unit.name, units.c.place == unit.place)


def _row(record: Record) -> dict[str, Any]:
    unit = record.unit
    return {"model": unit.model, "name": unit.name, "place": unit.place} | {
        name: getattr(record, name) for name in _OWN
    }


def _record(row: sa.RowMapping) -> Record:
    values = {name: row[name] for name in _OWN}
    values |= {
        "state": State(row["state"]),
        "wish": Wish(row["wish"]),
        "wish_by": By(row["wish_by"]),
        "wish_depth": Depth(row["wish_depth"]),
        "depth": Depth(row["depth"]),
    }
    return Record(Unit(row["model"], row["name"], row["place"]), **values)
