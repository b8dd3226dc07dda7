"""What was done to whom since somebody last looked: the audit log, read as news. One watch a gateway process.

Every deed on accounts, projects, keys, limits and models is an entry in the log, in the deed's own transaction and in
order (audit_log.py), so one short read says for every cached key at once that nothing has changed. The watch reads now
and then, and at once when it is poked: by this process's own deeds, and by others' (deed_news.py).
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tenancy.tables import audit_log

_READ_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class Deeds:
    """as_of_ns: before this instant nothing else was done. accounts: to whom; None for anybody. service: or to all."""

    as_of_ns: int
    accounts: frozenset[str] | None = frozenset()
    service: bool = False

    def __bool__(self) -> bool:
        return self.accounts is None or bool(self.accounts) or self.service


class DeedWatch:
    """`run` as a task. told: called after each look, also when nothing was done; what it raises is a bug, but for
    TenancyUnavailable: then the same is told again.
    """

    def __init__(
        self,
        database: Database,
        told: Callable[[Deeds], Awaitable[None]],
        *,
        interval_s: float,
        clock: Callable[[], int],
    ) -> None:
        self._database = database
        self._told = told
        self._interval_s = interval_s
        self._clock = clock
        self._last: int | None = None  # the number of the newest entry that was told
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Something was done: look now."""
        self._poked.set()

    async def run(self) -> None:
        """For ever. Without the database nothing is told, and whoever believes what he was told has his own bound."""
        while True:
            self._poked.clear()
            with suppress(TenancyUnavailable):
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._poked.wait()

    async def look(self) -> None:
        """Raises TenancyUnavailable."""
        as_of_ns = self._clock()
        last, deeds = await self._database.call(self._read, as_of_ns)
        await self._told(deeds)
        self._last = last

    def _read(self, as_of_ns: int) -> tuple[int, Deeds]:
        log, last = audit_log.c, self._last
        newest = sa.select(sa.func.max(log.number))
        # The entry that was told last comes too: without it this is another log than the one that was read before.
        since = sa.select(log.number, log.account_id).where(log.number >= (last or 0)).order_by(log.number)
        with self._database.read() as connection:
            rows = [] if last is None else connection.execute(since.limit(_READ_MAX + 2)).all()
            if last is None or len(rows) > _READ_MAX or (last and (not rows or rows[0].number != last)):
                return connection.scalar(newest) or 0, Deeds(as_of_ns, None, service=True)
        done = [row for row in rows if row.number > last]
        accounts = frozenset(row.account_id for row in done if row.account_id is not None)
        return (
            done[-1].number if done else last,
            Deeds(as_of_ns, accounts, service=any(row.account_id is None for row in done)),
        )
