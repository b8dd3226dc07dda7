"""Serving the application on a listening socket until a signal says stop: running answers end before connections close.

Used by the command that serves, before and after the database answers, and by each of its workers.
"""

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from api.app import create_app
from api.http_protocol import HttpProtocol
from api.services import Services

# As the units in deploy/systemd: some connections for each request that runs or waits, and many more that are idle.
_OPEN_FILES: Final = 65_536


async def serve_on(listener: socket.socket, services: Services, orphaned: asyncio.Event | None = None) -> None:
    """Until SIGTERM or SIGINT; SIGHUP reads the deployment file again.

    orphaned: set when our supervisor is gone; SIGTERM follows. Then the port is free at once and what runs is cut off,
    as where a gateway of one process is killed: the next one wants port and spool, and a drain may take half an hour.
    """
    server = _ServiceServer(server_config(create_app(services)), services, orphaned or asyncio.Event())
    spare_the_collector()
    await server.serve(sockets=[listener])


def server_config(app: ASGIApp) -> uvicorn.Config:
    """How every process of ours speaks HTTP."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # ours has the request id
        lifespan="off",  # open_services is the lifespan
        http=HttpProtocol,
        ws="none",
        server_header=False,
        proxy_headers=False,  # nobody in front of us is trusted to say who asks
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


class Server(uvicorn.Server):
    """uvicorn, but a signal is not raised again afterwards: what stands around the server closes first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        with hearing_hangups(self.reload):
            try:
                yield
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.remove_signal_handler(number)

    def reload(self) -> None:
        """On SIGHUP. Before there are services nothing has been read that could be old."""


class _ServiceServer(Server):
    """Running answers end before connections are closed."""

    def __init__(self, config: uvicorn.Config, services: Services, orphaned: asyncio.Event) -> None:
        super().__init__(config)
        self._services = services
        self._orphaned = orphaned
        self._reloads: set[asyncio.Task[None]] = set()

    def reload(self) -> None:
        """Read the deployment file again."""
        reload = asyncio.create_task(self._services.reload(), name="reload")
        self._reloads.add(reload)
        reload.add_done_callback(self._reloads.discard)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut_once_orphaned(sockets or []), name="cut once orphaned")
        try:
            await self._services.pipeline.drain(within_s=self._services.settings.drain_seconds_max)
        finally:
            cutting.cancel()
        await super().shutdown(sockets)

    async def _cut_once_orphaned(self, listeners: list[socket.socket]) -> None:
        """Also where the supervisor dies while answers are given their time."""
        await self._orphaned.wait()
        for server in self.servers:
            server.close()
        for listener in listeners:
            listener.close()
        await self._services.pipeline.drain(within_s=0)


def hold_hangups() -> None:
    """From here on SIGHUP waits for `hearing_hangups`: it would end a process that is about to read what was changed.

    Threads that are started later hold it too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


@contextmanager
def hearing_hangups(reload: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGHUP calls `reload` on the running loop, also one that came before; afterwards it is held again."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loop.remove_signal_handler(signal.SIGHUP)


def spare_the_collector() -> None:
    """What is there at the start stays, so it need not be looked at again and again; and a request's objects die by
    reference counts, so the collector is called rarely. Its defaults took a third of the CPU of a short request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def allow_many_connections() -> None:
    """Up to what the system lets us have: a shell's usual 1,024 files are used up by as many idle connections, for
    which nobody needs a key, and then no engine can be reached. For this process and those that it starts.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS may refuse what it has said is allowed
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
