"""Keeps one engine process running: starts it, says when it died, starts it again with back-off, stops it.

Used by `pagegate engine up`, and one run at a time by drivers/processes.py. A local engine holds our end of a pipe as
its standard input and leaves when that closes, so that it never outlives a gateway that was killed; one that does not
leave is found by the file in which its process stands, and ended before the next start or by the next stop.
"""

import asyncio
import os
import secrets
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
# An engine whose launcher is gone leaves within a step; one that hangs is killed after so long.
_LEAVES_S_MAX = 10.0
_LEAVES_CHECK_S = 0.05
# What was killed is gone once the kernel has freed what it held: some seconds for a hundred GiB of a GPU.
_GONE_S_MAX = 30.0
# Below those that a system gives to whoever asks for any: Linux' begin at 32,768, those of macOS at 49,152.
_PORTS = range(16_384, 32_768)
_PORTS_TRIED = 100
_LAST_LINES = 2
_LAST_BYTES = 2_000
_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"


def free_port(host: str) -> int:
    """A TCP port that is free at this moment, and that the system gives to nobody who asks for any: an engine listens
    seconds later, and one of those may be another's by then.
    """
    for port in (*secrets.SystemRandom().sample(_PORTS, _PORTS_TRIED), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no TCP port of {host} is free")


class EngineProcess:
    """One supervised engine. `run` keeps it alive until cancelled and then stops it.

    command: the whole command line. log_path: where what it says goes; one that has grown too large is kept as `.1`.
    stop_s: how long a stop waits before it kills. log_check_s: how often its size is looked at.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, *, stop_s: float = 10.0, log_check_s: float = 60.0
    ) -> None:
        self.name = name
        self._command = command
        self._log_path = log_path
        self._pid_path = log_path.with_suffix(".pid")
        self._stop_s = stop_s
        self._log_check_s = log_check_s
        self.pid: int | None = None
        self.starts = 0

    async def run(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            began = time.monotonic()
            code = await self.run_once()
            if time.monotonic() - began >= _RAN_WELL_S:
                backoff_s = _BACKOFF_FIRST_S
            log.error("engine died", engine=self.name, code=code, again_in_s=backoff_s, log=str(self._log_path))
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MOST_S)

    async def run_once(self) -> int:
        """From start to death; the exit code (negative: the signal). Cancelled, it stops the engine first."""
        await self.end_what_is_left()
        process = await self._start()
        self.pid = process.pid
        self._pid_path.write_text(f"{process.pid} {_born(process.pid)}\n")
        self.starts += 1
        log.info("engine started", engine=self.name, pid=process.pid)
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
            _kill_group(process.pid)
            await self._gone(process.pid)
            self._pid_path.unlink(missing_ok=True)

    async def _gone(self, leader: int) -> None:
        """Until nothing of its group runs. A process that is killed holds a GPU's memory for seconds still, which
        whatever is started next would not find free.
        """
        until = time.monotonic() + _GONE_S_MAX
        while _group_runs(leader):
            if time.monotonic() >= until:
                log.error("parts of an engine do not end, though they were killed", engine=self.name, group=leader)
                return
            await asyncio.sleep(_LEAVES_CHECK_S)

    async def end_what_is_left(self) -> None:
        """Of a launcher that was killed: its engine may still be leaving, or hang. Two can't have one port."""
        try:
            pid, born = self._pid_path.read_text().split()
        except (OSError, ValueError):
            return
        until = time.monotonic() + _LEAVES_S_MAX
        while born and _born(int(pid)) == born:
            if time.monotonic() >= until:
                log.warning("an engine did not leave with its launcher and is killed", engine=self.name, pid=int(pid))
                _kill_group(int(pid))
            await asyncio.sleep(_LEAVES_CHECK_S)
        # Parts may stay: SGLang's, where it was told to end before they had asked to end with it. While they run, their
        # leader's number is given to no other process.
        if born.endswith(_boot()) and not (_PROC / pid).exists():
            _kill_group(int(pid))
            await self._gone(int(pid))

    def last_lines(self) -> str:
        """The end of what it said, for an operator."""
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _LAST_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])

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
            starting = asyncio.create_task(spawn, name=f"start {self.name}")
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


def _kill_group(leader: int) -> None:
    """An engine of several processes may leave some behind when its first one dies: they hold its port and memory."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _group_runs(leader: int) -> bool:
    """Does any of its processes?"""
    try:
        os.killpg(leader, 0)
    except OSError:
        return False
    if not _PROC.exists():
        return True
    stats = map(_stat, _PROC.glob("[0-9]*/stat"))
    return any(fields[2] == str(leader) and not _has_ended(fields) for fields in stats)


def _born(pid: int) -> str:
    """When the process was started, in the kernel's ticks since which boot: with its id, no other process's. Empty: it
    is no more, or this system does not say.
    """
    fields = _stat(_PROC / str(pid) / "stat")
    return "" if _has_ended(fields) else f"{fields[19]}@{_boot()}"


def _boot() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else "unknown"


def _has_ended(stat: Sequence[str]) -> bool:
    """It is no more, or waits for its parent alone. A zombie with threads has not given back its memory yet."""
    return not stat or (stat[0] == "Z" and stat[17] == "1")


def _stat(path: Path) -> list[str]:
    """What proc(5) says of a process, from its state on: state, parent, group, …; empty if it is no more."""
    try:
        # The name of the program, in parentheses, may have spaces: what follows it is counted.
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
