"""`pagegate serve --workers N`: N workers on one port, their engines, and one process for billing's jobs.

Called by the command that serves. A worker that dies is started again; SIGTERM lets all of them end their answers,
SIGHUP has all read the deployment file again. At a stop workers go first, engines last.
"""

import asyncio
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import structlog

from api.place import own_place
from api.serving import hearing_hangups
from api.settings import Settings
from api.siblings import ENGINES, Siblings, answering
from api.unit_news import UNITS
from api.workers.brief import Brief, told
from api.workers.child import Child
from api.workers.engines import WorkersEngines
from backends.connections import open_session
from tenancy.database import open_database

# Beyond the time that running answers get: settling, the last posting to SQL, closing.
_STOP_MARGIN_S: Final = 20.0

log = structlog.get_logger(__name__)


async def supervise(
    settings: Settings, listener: socket.socket, announce: Callable[[Siblings, str], Coroutine[Any, Any, None]]
) -> None:
    """Until SIGTERM or SIGINT. announce: as a task it says how to use the service, once its workers are ready.

    Raises WorkerFailed if one never came to serve, DeploymentInvalid.
    """
    listener.set_inheritable(True)
    session = open_session()
    database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
    # A Unix socket's path has at most 107 bytes, so the folder is a short one of its own.
    with (
        closing(database),
        own_place(settings.home) as place,
        tempfile.TemporaryDirectory(prefix="pagegate-") as folder,
    ):
        engines = WorkersEngines(settings, session, database, place)
        children = _children(settings, engines.workers_settings(), listener, Path(folder))
        everybody = Siblings(Path(folder), "supervisor", [str(number + 1) for number in range(settings.workers)])
        try:
            async with answering(Path(folder), ENGINES, {"metrics": engines.counted, UNITS: engines.news}):
                await _run_until_told(children, engines, announce(everybody, engines.first_model))
        finally:
            await session.close()


def _children(settings: Settings, workers: Settings, listener: socket.socket, folder: Path) -> list[Child]:
    stop_s = settings.drain_seconds_max + _STOP_MARGIN_S
    numbers = range(1, settings.workers + 1)

    def brief(number: int, port: int | None) -> Brief:
        return Brief(settings=told(workers), number=number, folder=folder, listener=port)

    serving = [Child("api.workers.worker", brief(number, listener.fileno()), stop_s=stop_s) for number in numbers]
    return [*serving, Child("api.workers.billing", brief(0, None), stop_s=_STOP_MARGIN_S)]


async def _run_until_told(
    children: list[Child], engines: WorkersEngines, announcing: Coroutine[Any, Any, None]
) -> None:
    stop = asyncio.Event()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        for child in children:
            child.signal(signal.SIGHUP)
        task = asyncio.create_task(engines.reload(), name="reload")
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    saying = asyncio.create_task(announcing, name="announce")
    starting_engines = asyncio.create_task(engines.run(), name="engines")
    workers = [asyncio.create_task(child.run(), name="worker") for child in children]
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        with hearing_hangups(reload):
            done, _ = await asyncio.wait([*workers, starting_engines, stopping], return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {stopping}:
                ended.result()  # they end by failing alone
    finally:
        await _ended([saying, stopping])
        await _ended(workers)  # running answers end before their engines do
        await _ended([starting_engines])


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
