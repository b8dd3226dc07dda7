"""Keeps one process of ours running: starts it with its brief, and again with back-off, passes signals on, stops it.

Used by supervisor.py. One that has never served ends the whole service: what was in its way is in all others' way.
"""

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from api.siblings import socket_path
from api.workers.brief import Brief

log = structlog.get_logger(__name__)

_BACKOFF_FIRST_S: Final = 0.5
_BACKOFF_MOST_S: Final = 30.0
# Until a process has read something, it has nothing to read again, and a reload must not end it.
_DEAF_TO_HANGUPS: Final = ("/bin/sh", "-c", """trap '' HUP; exec "$@\"""", "sh")
# A process that ran this long had started well: its next death is a new one, not the same fault again.
_RAN_WELL_S: Final = 60.0


class WorkerFailed(Exception):
    """A process that was started with the service never came to serve."""


class Child:
    """module: what to run. stop_s: how long a stop waits before it kills."""

    def __init__(self, module: str, brief: Brief, *, stop_s: float) -> None:
        self._module = module
        self._brief = brief
        self._stop_s = stop_s
        self._process: asyncio.subprocess.Process | None = None
        self._has_served = False

    async def run(self) -> None:
        """Until cancelled; then it is told to stop, and waited for. Raises WorkerFailed."""
        backoff_s = _BACKOFF_FIRST_S
        name = self._brief.name
        while True:
            began = time.monotonic()
            code = await self._run_once()
            # Its socket is there from when it serves, and stays if it is killed.
            self._has_served = self._has_served or self._socket.exists() or code == 0
            if not self._has_served:
                raise WorkerFailed(f"worker {name} ended with code {code} before it served")
            if time.monotonic() - began >= _RAN_WELL_S:
                backoff_s = _BACKOFF_FIRST_S
            log.error("a worker died", worker=name, code=code, again_in_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MOST_S)

    def signal(self, number: signal.Signals) -> None:
        """Pass it on, if the process lives."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def _socket(self) -> Path:
        return socket_path(self._brief.folder, self._brief.name)

    async def _run_once(self) -> int:
        starting = asyncio.create_task(self._start(), name=f"start worker {self._brief.name}")
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Once begun, a start is finished: asyncio would kill what is cancelled half way.
            await self._stop(await starting)
            raise
        self._process = process
        log.info("a worker started", worker=self._brief.name, pid=process.pid)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                await self._stop(process)
            self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *_DEAF_TO_HANGUPS,
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=() if self._brief.listener is None else (self._brief.listener,),
            # A session of its own: Ctrl-C in a terminal reaches the supervisor alone, which stops all in order.
            start_new_session=True,
        )
        assert process.stdin is not None, "asked for"
        with suppress(ConnectionError):  # it is gone already: its exit code says so
            process.stdin.write(self._brief.line())
            await process.stdin.drain()
        return process

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self._stop_s):
                await process.wait()
        except TimeoutError:
            log.error("a worker did not end in time", killed=self._brief.name)  # noqa: TRY400 - no bug of this process
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
