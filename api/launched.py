"""The engine processes that this gateway starts itself: those of the local engine. Used by deployed.py.

SGLang's are started by `pagegate engine up` on their own machines, so that a gateway's restart loads no weights again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backends.sglang.launch import EngineCommand
from backends.supervision import EngineProcess
from gateway.replica import Replica

_IDLE_CHECK_S = 0.1


@dataclass(slots=True)
class _Launched:
    replica: Replica
    running: asyncio.Task[None]


class LaunchedEngines:
    """`want` says which processes there should be; `run` starts and stops them until it is cancelled.

    log_dir: a log file an engine. drain_s: how long an engine that is no longer wanted may finish what runs there.
    """

    def __init__(self, log_dir: Path, *, drain_s: float) -> None:
        self._log_dir = log_dir
        self._drain_s = drain_s
        self._wanted: dict[EngineCommand, Replica] = {}
        self._launched: dict[EngineCommand, _Launched] = {}
        self._changed = asyncio.Event()
        # Two engines can't listen on one port: the second waits until the first has gone.
        self._ports: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def want(self, engines: Iterable[tuple[EngineCommand, Replica]]) -> None:
        """The replica of a command is not used before its process has been started."""
        self._wanted = dict(engines)
        for command, replica in self._wanted.items():
            if command not in self._launched:
                replica.serving = False
        self._changed.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for command in self._launched.keys() - self._wanted.keys():
                    group.create_task(self._retire(self._launched.pop(command)), name=f"retire {command.name}")
                for command in self._wanted.keys() - self._launched.keys():
                    replica = self._wanted[command]
                    running = group.create_task(self._supervise(command, replica), name=f"engine {command.name}")
                    self._launched[command] = _Launched(replica, running)
                await self._changed.wait()

    async def _supervise(self, command: EngineCommand, replica: Replica) -> None:
        async with self._ports[command.port]:
            replica.serving = True
            process = EngineProcess(command.name, command.as_process(), self._log_dir / f"{command.name}.log")
            await process.run()

    async def _retire(self, launched: _Launched) -> None:
        """Nothing new comes, since the fleet has it no more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while len(launched.replica.ledger):  # noqa: ASYNC110 - a ledger has no event, and this is no hot path
                    await asyncio.sleep(_IDLE_CHECK_S)
        launched.running.cancel()
