"""Opens what usage is recorded with: the spool, what brings it to SQL, and credit where others share it. Called by
wiring.py; `billing_jobs` also by the supervisor of workers.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from typing import Final

from api.settings import SPOOL_OF_WORKER, Settings
from billing.alerts import Exhausted
from billing.credit.shared import SharedCredit
from billing.errors import BillingUnavailable
from billing.former_spools import FormerSpools
from billing.jobs import BillingJobs
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.spool import Spool, SpoolInUse
from gateway.batches.line_rows import leave_to_anybody
from tenancy.database import Database

# A worker whose supervisor was killed cuts its answers off, posts their records and leaves.
_LEAVES_S_MAX: Final = 20.0
_LEAVES_CHECK_S: Final = 0.05


async def open_metering(
    settings: Settings,
    database: Database,
    price_book: PriceBook,
    exhausted: Exhausted,
    stack: AsyncExitStack,
    *,
    worker: int,
) -> tuple[Metering, Spool, SharedCredit | None]:
    """The durable record, with what a killed process left in it settled first; and credit, where others share it.

    Only for who owns the data folder (place.py), or was started by its owner. Raises SpoolInUse.
    """
    spool = await open_spool(settings, worker)
    stack.callback(spool.close)
    # Whoever shares meters shares accounts, and so their money.
    credit = SharedCredit(database, spool.owner, note_exhausted=exhausted.note) if settings.meters_url else None
    metering = Metering(
        spool,
        database,
        price_book,
        clock=time.time_ns,
        drain_interval_s=settings.billing.drain_interval_s,
        drain_batch_records_max=settings.billing.drain_batch_records_max,
        allowances=credit,
    )
    await metering.recover()
    if credit is not None:
        await metering.flush()
        await credit.open()
        stack.push_async_callback(_leave, metering, credit)
    return metering, spool, credit


async def open_spool(settings: Settings, worker: int) -> Spool:
    """The folder is ours: whoever has its spool still is a worker of a supervisor that was killed, and leaves.

    Raises SpoolInUse.
    """
    until = time.monotonic() + _LEAVES_S_MAX
    while True:
        try:
            return Spool(
                settings.spool_dir(worker),
                segment_bytes_max=settings.billing.spool_segment_bytes_max,
                high_water_bytes=settings.billing.spool_high_water_bytes,
            )
        except SpoolInUse:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(_LEAVES_CHECK_S)


async def _leave(metering: Metering, credit: SharedCredit) -> None:
    """What this process did not use is there for the others at once, and not only when its lease ends."""
    with suppress(BillingUnavailable):
        await metering.flush()
    await credit.close()


def billing_jobs(settings: Settings, database: Database) -> BillingJobs:
    """What one process does for all workers of this data folder."""
    mine = {settings.spool_dir(number) for number in range(1, settings.workers + 1)}
    former = FormerSpools(
        lambda: [path for path in settings.home.glob(f"{SPOOL_OF_WORKER}*") if path not in mine],
        database,
        settings.billing,
        of_now=mine,
        free=leave_to_anybody,
    )
    return BillingJobs(database, settings.billing, former)
