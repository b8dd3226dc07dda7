"""The durable records of workers that are no more, because fewer are run now, or that died and do not come back.

Called by jobs.py now and then: they are settled and brought to SQL, and deleted where no worker will have them again. A
record that a process still owns is left alone; so is one while the database is away.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import sqlalchemy as sa
import structlog

from billing.credit.allowances import forget
from billing.kept_answers import KeptAnswers
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.settings import BillingSettings
from billing.spool import Spool, SpoolInUse, is_owned
from tenancy.database import Database

log = structlog.get_logger(__name__)


class FormerSpools:
    """find: the folders of durable records that no worker of now has; of_now: those that some worker should have.
    free: gives up what others keep for an owner.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Path]],
        database: Database,
        settings: BillingSettings,
        *,
        of_now: Iterable[Path] = (),
        clock: Callable[[], int] = time.time_ns,
        free: Callable[[sa.Connection, str], None] = lambda _connection, _owner: None,
    ) -> None:
        self._find = find
        self._of_now = tuple(of_now)
        self._unowned: set[Path] = set()  # at the last look
        self._free_elsewhere = free
        self._database = database
        self._settings = settings
        self._clock = clock

    async def settle(self) -> int:
        """Returns how many folders were settled. Raises BillingUnavailable or TenancyUnavailable."""
        settled = 0
        for folder in self._find():
            if await self._settle_folder(folder, delete=True):
                settled += 1
                log.info("a former worker's records are settled", folder=str(folder))
        return settled

    async def settle_absent(self) -> int:
        """As settle, for workers of now that no process has been at two looks in a row; they find their folder again.

        A worker that died is started again and settles its own: this is for one that can't start.
        """
        unowned = {folder for folder in self._of_now if folder.exists() and not is_owned(folder)}
        settled = 0
        for folder in sorted(unowned & self._unowned):
            if await self._settle_folder(folder, delete=False):
                settled += 1
                log.warning("the records of a worker that stays away are settled", folder=str(folder))
        self._unowned = unowned
        return settled

    async def _settle_folder(self, folder: Path, *, delete: bool) -> bool:
        """False if a process owns it after all."""
        try:
            spool = Spool(folder, segment_bytes_max=self._settings.spool_segment_bytes_max)
        except SpoolInUse:
            return False
        try:
            await self._settle(spool)
            if delete:  # while it is still ours: nobody begins in it meanwhile
                await asyncio.to_thread(shutil.rmtree, folder)
        finally:
            spool.close()
        return True

    async def _settle(self, spool: Spool) -> None:
        price_book = PriceBook(self._database)
        await price_book.refresh()
        metering = Metering(spool, self._database, price_book, clock=self._clock)
        await metering.recover()
        await metering.flush()
        await self._database.call(self._free, spool.owner)

    def _free(self, owner: str) -> None:
        """Its money is held for nobody any more, and nobody answers what it was asked."""
        answers = KeptAnswers(
            self._database,
            process=owner,
            clock=self._clock,
            kept_s=self._settings.kept_answer_seconds,
            answer_bytes_max=self._settings.kept_answer_bytes_max,
            keys_per_account_max=self._settings.kept_keys_per_account_max,
            account_bytes_max=self._settings.kept_bytes_per_account_max,
        )
        answers.end_abandoned(everybodys=False)
        with self._database.write() as connection:
            forget(connection, owner)
            self._free_elsewhere(connection, owner)
