"""The engine processes that this gateway starts itself: those of the local engine. Used by deployed.py, and by the
supervisor of several workers.

SGLang's are started by `pagegate engine up` on their own machines, so that a gateway's restart loads no weights again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backends.sglang.launch import EngineCommand
from backends.supervision import EngineProcess

_IDLE_CHECK_S = 0.1


class EngineUse(Protocol):
    """What is known of those who use an engine."""

    def started(self, *, begun: bool) -> None:
        """Whether the engine's process has been started: before, nobody may use it."""

    async def busy(self) -> bool:
        """Does anything run there?"""


@dataclass(slots=True)
class _Launched:
    use: EngineUse
    running: asyncio.Task[None]


class LaunchedEngines:
    """`want` says which processes there should be; `run` starts and stops them until it is cancelled.

    log_dir: a log file an engine. drain_s: how long an engine that is no longer wanted may finish what runs there.
    """

    def __init__(self, log_dir: Path, *, drain_s: float) -> None:
        self._log_dir = log_dir
        self._drain_s = drain_s
        self._wanted: dict[EngineCommand, EngineUse] = {}
        self._launched: dict[EngineCommand, _Launched] = {}
        self._changed = asyncio.Event()
        # Two engines can't listen on one port: the second waits until the first has gone.
        self._ports: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def want(self, engines: Iterable[tuple[EngineCommand, EngineUse]]) -> None:
        """Nobody uses the engine of a command before its process has been started."""
        self._wanted = dict(engines)
        for command, use in self._wanted.items():
            if command not in self._launched:
                use.started(begun=False)
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for command in self._launched.keys() - self._wanted.keys():
                    group.create_task(self._retire(self._launched.pop(command)), name=f"retire {command.name}")
                for command in self._wanted.keys() - self._launched.keys():
                    use = self._wanted[command]
                    running = group.create_task(self._supervise(command, use), name=f"engine {command.name}")
                    self._launched[command] = _Launched(use, running)
                await self._changed.wait()

    async def _supervise(self, command: EngineCommand, use: EngineUse) -> None:
        async with self._ports[command.port]:
            use.started(begun=True)
            process = EngineProcess(command.name, command.as_process(), self._log_dir / f"{command.name}.log")
            await process.run()

    async def _retire(self, launched: _Launched) -> None:
        """Nothing new comes, since the fleet has it no more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while await launched.use.busy():  # noqa: ASYNC110 - an engine has no event, and this is no hot path
                    await asyncio.sleep(_IDLE_CHECK_S)
        launched.running.cancel()
