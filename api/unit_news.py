"""Where a process reads how units stand: in SQL, or, of several workers, from their supervisor, which alone reads SQL.

Used by lifecycle.py, and by the supervisor for its own reading and its answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from api.siblings import ANSWER_S_MAX, ENGINES, Siblings
from gateway.lifecycle.states import Record
from gateway.lifecycle.store import Call, UnitStore
from gateway.lifecycle.watch import Watch, as_fields, foremost, from_fields

# The supervisor's answer once there is news after the one of this number; None where it does not answer.
AskSupervisor = Callable[[int], Awaitable[tuple[int, list[dict[str, Any]]] | None]]

UNITS: Final = "units"
# How long it holds an answer back for news.
_WAIT_S_MAX: Final = ANSWER_S_MAX / 2


class UnitReader:
    """place: of this gateway's units. elsewhere: models and names of those that gateways of other regions start, as the
    deployment in force has them.
    """

    def __init__(self, store: UnitStore, call: Call, place: str) -> None:
        self._store = store
        self._call = call
        self.places = (place, "")
        self.elsewhere: frozenset[tuple[str, str]] = frozenset()

    async def read(self) -> list[Record]:
        """Raises TenancyUnavailable."""
        rows = await self._call(self._store.standing, self.places, self.elsewhere)
        return foremost(rows, self.places)


def ask_supervisor(siblings: Siblings) -> AskSupervisor:
    """For a worker."""
    return partial(_ask, siblings)


async def _ask(siblings: Siblings, seen: int) -> tuple[int, list[dict[str, Any]]] | None:
    answer = await siblings.ask_one(ENGINES, UNITS, seen=seen)
    return None if answer is None else (answer[0], answer[1])


async def answer_worker(watch: Watch, words: dict[str, Any]) -> tuple[int, list[dict[str, Any]]] | None:
    """What the supervisor says."""
    news = await watch.news(words["seen"], within_s=_WAIT_S_MAX)
    return None if news is None else (news[0], [as_fields(record) for record in news[1]])


def told_by(
    supervisor: AskSupervisor, read: Callable[[], Awaitable[list[Record]]], interval_s: float
) -> Callable[[], Awaitable[Iterable[Record]]]:
    """How units stand, as the supervisor says; where it says nothing, as `read` finds it, once an interval."""
    seen = -1

    async def told() -> Iterable[Record]:
        nonlocal seen
        answer = await supervisor(seen)
        if answer is None:
            await asyncio.sleep(interval_s)
            return await read()
        seen, rows = answer
        return [from_fields(row) for row in rows]

    return told
