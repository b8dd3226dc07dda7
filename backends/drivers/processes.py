"""A unit's engines as child processes of this one: the local engine, and SGLang. Made by whoever reads the deployment.

They end with this process, whatever becomes of us: for the local engine the pipe closes that is its standard input,
and SGLang is on a leash (leash.py). One that hangs and does not is ended by the next owner of its unit.
"""

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from backends.client import EngineClient
from backends.engine_tables import Program
from backends.errors import BackendError
from backends.leash import leashed
from backends.sglang.launch import EngineCommand
from backends.supervision import EngineProcess

# To give up an engine's memory, or to take it back: the weights are read again.
_MEMORY_S_MAX: Final = 300.0
# What runs has ended before a stop. SGLang looks every five seconds whether it was told to, and then ends its parts.
_STOP_S_MAX: Final[Mapping[Program, float]] = {"local": 10.0, "sglang": 18.0}


class Ports:
    """One lock a port: two engines can't listen on one, so that the second waits until the first has gone."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    def of(self, port: str) -> asyncio.Lock:
        return self._locks.setdefault(port, asyncio.Lock())


class ProcessesDriver:
    """Implements the gateway's Driver. clients: of the engines, by their commands' names. log_dir: a file an engine."""

    def __init__(
        self, commands: Sequence[EngineCommand], clients: Mapping[str, EngineClient], log_dir: Path, ports: Ports
    ) -> None:
        self._engines = [
            _Engine(_process(command, log_dir), clients[command.name], command.port, ports.of(command.port))
            for command in commands
        ]

    async def start(self) -> None:
        for engine in self._engines:
            engine.start()

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    async def leave(self) -> None:
        await self.stop()

    async def release(self) -> None:
        await asyncio.gather(*(engine.client.release(within_s=_MEMORY_S_MAX) for engine in self._engines))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.client.resume(within_s=_MEMORY_S_MAX) for engine in self._engines))

    async def running(self) -> bool:
        return all(engine.runs for engine in self._engines)

    async def ready(self) -> bool:
        try:
            for engine in self._engines:
                if not engine.begun:
                    return False  # whoever answers at its port is another
                await engine.client.ready()
        except BackendError:
            return False
        return True

    async def busy(self) -> bool:
        return any([await engine.busy() for engine in self._engines])

    async def start_parts(self) -> Mapping[str, float]:
        longest: dict[str, float] = {}
        for engine in self._engines:
            with suppress(BackendError):
                for part, seconds in (await engine.client.start_parts()).items():
                    longest[part] = max(longest.get(part, 0.0), seconds)
        return longest

    def last_words(self) -> str:
        return "; ".join(filter(None, (engine.last_words() for engine in self._engines)))


def _process(command: EngineCommand, log_dir: Path) -> EngineProcess:
    argv = command.as_process()
    if command.program != "local":
        argv = leashed(argv, os.getpid())
    log_path = log_dir / f"{command.name}.log"
    return EngineProcess(command.name, argv, log_path, stop_s=_STOP_S_MAX[command.program])


def _check_here(address: str) -> None:
    """address: host and port. An engine of another machine would load its weights before it found that out."""
    host = address.rpartition(":")[0]
    try:
        [family, kind, protocol, _, found] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(found)
    except OSError as error:
        raise BackendError(f"{host} is no address of this machine ({error})") from error


class _Engine:
    """One process and what became of it. address: host and port at which it listens."""

    def __init__(self, process: EngineProcess, client: EngineClient, address: str, port: asyncio.Lock) -> None:
        self.client = client
        self._process = process
        self._address = address
        self._port = port
        self._task: asyncio.Task[int] | None = None

    @property
    def runs(self) -> bool:
        """It does, or waits for its port."""
        return self._task is not None and not self._task.done()

    @property
    def begun(self) -> bool:
        """There is a process."""
        return self._process.pid is not None

    def start(self) -> None:
        if not self.runs:
            self._task = asyncio.create_task(self._run(), name=f"engine {self._process.name}")

    async def _run(self) -> int:
        async with self._port:
            await asyncio.to_thread(_check_here, self._address)  # a name may have to be asked for
            return await self._process.run_once()

    async def stop(self) -> None:
        """One that was never started here may still have been by a launcher that was killed."""
        if self._task is None:
            await self._process.end_what_is_left()
            return
        self._task.cancel()
        await asyncio.wait([self._task])

    async def busy(self) -> bool:
        try:
            loads = await self.client.loads()
        except BackendError:
            return False
        return loads.running + loads.waiting > 0

    def last_words(self) -> str:
        if self._task is None or not self._task.done() or self._task.cancelled():
            return ""
        error = self._task.exception()
        if error is not None:
            why = error.message if isinstance(error, BackendError) else error
            return f"{self._process.name} can't be started: {why}"
        code = self._task.result()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = self._process.last_lines()
        return f"{self._process.name} {ended}" + (f": {said}" if said else "")
