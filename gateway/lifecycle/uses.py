"""When units were last used, shared by all processes of the gateways through SQL. Synchronous, as all stores."""

from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from gateway.lifecycle.states import Unit
from gateway.lifecycle.tables import unit_uses
from tenancy.database import Database, insert_missing


class UseStore:
    """Times are Unix nanoseconds of whoever saw the use."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, used: Mapping[Unit, int]) -> None:
        """They were used then. Of several uses of a unit the latest stands, in whatever order they are told."""
        uses = unit_uses.c
        with self._database.write() as connection:
            insert_missing(connection, unit_uses, [_row(unit, at_ns) for unit, at_ns in sorted(used.items())])
            for unit, at_ns in sorted(used.items()):
                same = uses.model == unit.model, uses.name == unit.name, uses.place == unit.place
                connection.execute(unit_uses.update().where(*same, uses.used_at_ns < at_ns).values(used_at_ns=at_ns))

    def of(self, places: Iterable[str]) -> dict[Unit, int]:
        """All that is known of the units of these places."""
        query = sa.select(unit_uses).where(unit_uses.c.place.in_(list(places)))
        with self._database.read() as connection:
            rows = connection.execute(query).mappings()
            return {Unit(row["model"], row["name"], row["place"]): row["used_at_ns"] for row in rows}


def _row(unit: Unit, used_at_ns: int) -> dict[str, str | int]:
    return {"model": unit.model, "name": unit.name, "place": unit.place, "used_at_ns": used_at_ns}
