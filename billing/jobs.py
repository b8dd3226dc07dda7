"""What billing does beside requests: sends webhooks, lets grants expire, closes months, forgets what was kept long.

Run by one process per set of workers: the gateway itself where it serves alone, else the billing worker. Several
machines may run one each: every job claims what it does, or doing it twice changes nothing. Knows no request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from billing.former_spools import FormerSpools
from billing.invoices.close import MonthClose
from billing.kept_answers import KeptAnswers
from billing.ledger.periods import month_before, month_of
from billing.ledger.wallet import Wallets
from billing.settings import BillingSettings
from billing.webhooks.courier import Courier
from tenancy.audit_log import SERVICE
from tenancy.database import Database

_SWEEP_INTERVAL_S: Final = 60
_CLOSE_INTERVAL_S: Final = 600
# Two looks lie within the lease of allowances, and beyond the longest pause before a worker is started again.
_ABSENT_INTERVAL_S: Final = 35
_HOUR_NS: Final = 3_600 * 1_000_000_000

log = structlog.get_logger(__name__)


class BillingJobs:
    """`run` as a task, for ever. Raises OSError if the file of authorities can't be read.

    former: the durable records of workers that are no more.
    """

    def __init__(
        self,
        database: Database,
        settings: BillingSettings,
        former: FormerSpools,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._former = former
        self._database = database
        self._settings = settings
        self._clock = clock
        self._courier = Courier(
            database, allowed=settings.webhook_addresses(), clock=clock, authorities=settings.webhook_authorities
        )
        self._wallets = Wallets(database, clock=clock)
        self._kept_answers = open_kept_answers(database, settings, process="-", clock=clock)

    async def run(self) -> None:
        call = self._database.call
        async with asyncio.TaskGroup() as group:
            for name, loop in {
                "webhooks": self._courier.run(),
                "expire grants": repeat("expire grants", partial(call, self._wallets.expire_due), _SWEEP_INTERVAL_S),
                "close months": repeat("close months", partial(call, self._close_due), _CLOSE_INTERVAL_S),
                "sweep webhooks": repeat("sweep webhooks", partial(call, self._courier.sweep), _CLOSE_INTERVAL_S),
                "settle former workers": repeat("settle former workers", self._former.settle, _SWEEP_INTERVAL_S),
                "settle absent workers": repeat(
                    "settle absent workers", self._former.settle_absent, _ABSENT_INTERVAL_S
                ),
                "sweep answers": repeat("sweep answers", partial(call, self._kept_answers.sweep), _SWEEP_INTERVAL_S),
            }.items():
                group.create_task(loop, name=name)

    def _close_due(self) -> None:
        """Close the months that ended long enough ago, where the operator has asked for it."""
        if self._settings.invoice_after_hours is not None:
            now_ns = self._clock()
            due = month_before(month_of(now_ns - self._settings.invoice_after_hours * _HOUR_NS))
            MonthClose(self._database, seller=self._settings.invoice_seller, clock=lambda: now_ns).close(
                due, by=SERVICE
            )


def open_kept_answers(
    database: Database, settings: BillingSettings, *, process: str, clock: Callable[[], int]
) -> KeptAnswers:
    """By the settings; several may be open on one database."""
    return KeptAnswers(
        database,
        process=process,
        clock=clock,
        kept_s=settings.kept_answer_seconds,
        answer_bytes_max=settings.kept_answer_bytes_max,
        keys_per_account_max=settings.kept_keys_per_account_max,
        account_bytes_max=settings.kept_bytes_per_account_max,
    )


async def repeat(what: str, deed: Callable[[], Awaitable[object]], interval_s: float) -> None:
    """For ever. The last good value stands while the database is away; what goes wrong is logged once a change."""
    failing = False
    while True:
        await asyncio.sleep(interval_s)
        try:
            await deed()
        except Exception as error:  # noqa: BLE001 - a worker loop's rim: it logs and goes on with the last good value
            if not failing:
                log.warning("can't do it now", deed=what, error=str(error))
            failing = True
        else:
            failing = False
