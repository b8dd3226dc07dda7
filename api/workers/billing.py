"""Billing's jobs for all workers of a data folder: `python -m api.workers.billing`, started by supervisor.py.

It sends webhooks, closes months, expires grants, and settles the records of workers that are no more. Workers bring
their own records to SQL (deploy/decisions/0071).
"""

import asyncio
import signal
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from api.recording import billing_jobs
from api.settings import Settings
from api.siblings import answering
from api.worker_metrics import counted
from api.workers.brief import Brief, run_briefed
from tenancy.database import open_database


async def _do_jobs(brief: Brief, settings: Settings, _orphaned: asyncio.Event) -> None:
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)

    async def metrics(_words: dict[str, Any]) -> list[list[Any]]:
        return counted(registry)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # SIGHUP is held: it knows no deployment.
    database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
    try:
        async with answering(brief.folder, brief.name, {"metrics": metrics}), asyncio.TaskGroup() as group:
            jobs = group.create_task(billing_jobs(settings, database).run(), name="billing's jobs")
            await stop.wait()
            jobs.cancel()
    finally:
        database.close()


if __name__ == "__main__":
    run_briefed(_do_jobs)
