"""What each process sees of the demand, in SQL: so that one of them decides for all. Synchronous, as all stores.

A row a process and model, written anew every few seconds. The process whose name is least among those that have written
lately decides: no lease is taken or lost, and where two think so for a moment they wish the same units awake.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Final

import orjson
import sqlalchemy as sa

from gateway.lifecycle.demand import Part
from gateway.lifecycle.tables import demand
from tenancy.database import Database

_SECOND_NS: Final = 1_000_000_000
# Rows of processes that are long gone.
_KEPT_S: Final = 3600
_FIELDS: Final = frozenset(field.name for field in fields(Part))


class DemandStore:
    """lately_s: after so long without a word a process counts no more. clock: Unix nanoseconds."""

    def __init__(self, database: Database, *, lately_s: float, clock: Callable[[], int]) -> None:
        self._database = database
        self._lately_ns = round(lately_s * _SECOND_NS)
        self._clock = clock

    def exchange(self, process: str, parts: Mapping[str, Part]) -> dict[str, dict[str, Part]]:
        """Say what this process sees of each model, and read what all do: by model, then by process."""
        now_ns = self._clock()
        rows = [
            {"model": model, "process": process, "at_ns": now_ns, "figures": orjson.dumps(asdict(part)).decode()}
            for model, part in parts.items()
        ]
        found: dict[str, dict[str, Part]] = {model: {} for model in parts}
        with self._database.write() as connection:
            mine = demand.c.process == process
            long_ago = demand.c.at_ns < now_ns - _KEPT_S * _SECOND_NS
            connection.execute(demand.delete().where(sa.or_(mine, long_ago)))
            if rows:
                connection.execute(demand.insert(), rows)
            lately = sa.select(demand).where(demand.c.at_ns > now_ns - self._lately_ns)
            for row in connection.execute(lately.order_by(demand.c.process)).mappings():
                if row["model"] in found:
                    found[row["model"]][row["process"]] = _part(row["figures"])
        return found

    def leave(self, process: str) -> None:
        """It ends: the others need not wait until its word is old."""
        with self._database.write() as connection:
            connection.execute(demand.delete().where(demand.c.process == process))


def _part(figures: str) -> Part:
    """Of a process of another version: what this one doesn't know is left out."""
    return Part(**{name: figure for name, figure in orjson.loads(figures).items() if name in _FIELDS})
