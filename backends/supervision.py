"""Keeps one engine process running: starts it, says when it died, starts it again with back-off, stops it.

Used by a composition root that launches its engine instead of attaching to one. The engine holds our end of a pipe as
its standard input and leaves when that closes, so that it never outlives a gateway that was killed.
"""

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_BACKOFF_FIRST_S = 0.5
_BACKOFF_MOST_S = 30.0
# An engine that ran this long had started well: its next death is a new one, not the same fault again.
_RAN_WELL_S = 60.0
_LOG_BYTES_MAX = 16 << 20


def free_port(host: str) -> int:
    """A TCP port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class EngineProcess:
    """One supervised engine. `run` keeps it alive until cancelled and then stops it.

    command: the whole command line. log_path: where what it says goes; one that has grown too large is kept as `.1`.
    stop_s: how long a stop waits before it kills. log_check_s: how often its size is looked at.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, *, stop_s: float = 10.0, log_check_s: float = 60.0
    ) -> None:
        self._name = name
        self._command = command
        self._log_path = log_path
        self._stop_s = stop_s
        self._log_check_s = log_check_s
        self.pid: int | None = None
        self.starts = 0

    async def run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            began = time.monotonic()
            code = await self._run_once()
            if time.monotonic() - began >= _RAN_WELL_S:
                backoff_s = _BACKOFF_FIRST_S
            log.error("engine died", engine=self._name, code=code, again_in_s=backoff_s, log=str(self._log_path))
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MOST_S)

    async def _run_once(self) -> int:
        """From start to death; the exit code (negative: the signal). Cancelled, it stops the engine first."""
        process = await self._start()
        self.pid = process.pid
        self.starts += 1
        log.info("engine started", engine=self._name, pid=process.pid)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._log_check_s):
                        return await process.wait()
                except TimeoutError:
                    self._rotate_log()
        finally:
            self.pid = None
            if process.returncode is None:
                await _stop(process, self._stop_s)
            _end_group(process.pid)

    async def _start(self) -> asyncio.subprocess.Process:
        """Once begun, a start is finished: asyncio would kill the engine of a start that is cancelled half way."""
        self._rotate_log()
        with self._log_path.open("ab") as output:
            spawn = asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                # A session of its own: Ctrl-C in a terminal reaches us alone, and running answers end before it stops.
                start_new_session=True,
            )
            starting = asyncio.create_task(spawn, name=f"start {self._name}")
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                await _stop(await starting, self._stop_s)
                raise

    def _rotate_log(self) -> None:
        """Keep a log that has grown too large beside its place, instead of the last such, and begin it anew.

        Copied and not renamed: whoever writes has the file open, appends, and so goes on at its new end.
        """
        if self._log_path.exists() and self._log_path.stat().st_size > _LOG_BYTES_MAX:
            shutil.copyfile(self._log_path, self._log_path.with_name(self._log_path.name + ".1"))
            os.truncate(self._log_path, 0)


async def _stop(process: asyncio.subprocess.Process, within_s: float) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(within_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _end_group(leader: int) -> None:
    """An engine of several processes may leave some behind when its first one dies: they hold its port and memory."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
