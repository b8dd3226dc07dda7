"""Who has a unit in its deployment that several gateways share, so that one which drops it stops it for nobody else.

In SQL, written by each keeper as long as it lives. A unit of one gateway's own place has no others and is not here.
Synchronous, as all stores.
"""

from collections.abc import Callable, Iterable
from typing import Final

import sqlalchemy as sa

from gateway.lifecycle.states import Unit
from gateway.lifecycle.tables import unit_deployers
from tenancy.database import Database, insert_missing, take_turn

_DEPLOYERS_TURN: Final = 0x7067_6465  # an arbitrary, fixed number: "pgde"


class Deployers:
    """lease_s: for so long a keeper that says nothing counts as one that has its units. clock: Unix nanoseconds.

    driver: names what drives a unit; after a reload it may be another one.
    """

    def __init__(self, database: Database, *, lease_s: float, clock: Callable[[], int]) -> None:
        self._database = database
        self._lease_ns = round(lease_s * 1e9)
        self._clock = clock

    def declare(self, keeper: str, deployed: Iterable[tuple[Unit, str]]) -> None:
        """It has them, for another lease. What keepers that were killed had goes: their rows would stay for ever."""
        until_ns = self._clock() + self._lease_ns
        rows = [
            {"model": unit.model, "name": unit.name, "driver": driver, "keeper": keeper, "until_ns": until_ns}
            for unit, driver in sorted(deployed)
        ]
        with self._database.write() as connection:
            take_turn(connection, _DEPLOYERS_TURN)
            connection.execute(unit_deployers.delete().where(unit_deployers.c.until_ns <= self._clock()))
            insert_missing(connection, unit_deployers, rows)
            for row in rows:
                same = [unit_deployers.c[name] == row[name] for name in ("model", "name", "driver", "keeper")]
                connection.execute(unit_deployers.update().where(*same).values(until_ns=until_ns))

    def drop(self, keeper: str, unit: Unit, driver: str) -> bool:
        """It has it no more. Does nobody else have it either? Of two that drop it at once the second is told so."""
        deployers = unit_deployers.c
        same = deployers.model == unit.model, deployers.name == unit.name, deployers.driver == driver
        with self._database.write() as connection:
            take_turn(connection, _DEPLOYERS_TURN)
            gone = sa.or_(deployers.keeper == keeper, deployers.until_ns <= self._clock())
            connection.execute(unit_deployers.delete().where(*same, gone))
            return connection.execute(sa.select(deployers.keeper).where(*same).limit(1)).first() is None

    def leave(self, keeper: str) -> None:
        """It is about to end, and has nothing any more."""
        with self._database.write() as connection:
            connection.execute(unit_deployers.delete().where(unit_deployers.c.keeper == keeper))
