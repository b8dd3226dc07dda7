"""A unit's engines that something else runs: a service manager or a cluster is told to, and the engines are asked.

They go on when this process ends: whichever gateway comes next finds them as they are. Made by whoever reads the
deployment; systemd.py and kubernetes.py are the switches.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from backends.client import EngineClient
from backends.errors import BackendError

# Taking 100 GB of weights back from memory or disk takes minutes.
_MEMORY_S_MAX: Final = 600.0


class Switch(Protocol):
    """Of one engine. Every method bears being repeated and raises BackendError with what an operator reads."""

    async def on(self) -> None:
        """Start it unless it runs; returns once that is under way."""

    async def off(self) -> None:
        """Stop it; returns when nothing of it runs."""

    async def runs(self) -> bool:
        """Does it, or is it about to?"""

    async def said(self) -> str:
        """Why it does not run, as far as the manager knows; empty if it doesn't."""


@dataclass(frozen=True, slots=True)
class ManagedEngine:
    name: str
    switch: Switch
    client: EngineClient


class ManagedDriver:
    """Implements the gateway's Driver."""

    def __init__(self, engines: Sequence[ManagedEngine]) -> None:
        self._engines = tuple(engines)
        self._last_words = ""

    async def start(self) -> None:
        self._last_words = ""
        await asyncio.gather(*(engine.switch.on() for engine in self._engines))

    async def stop(self) -> None:
        await asyncio.gather(*(engine.switch.off() for engine in self._engines))

    async def release(self) -> None:
        await asyncio.gather(*(engine.client.release(within_s=_MEMORY_S_MAX) for engine in self._engines))

    async def resume(self) -> None:
        await asyncio.gather(*(engine.client.resume(within_s=_MEMORY_S_MAX) for engine in self._engines))

    async def running(self) -> bool:
        ended = [engine for engine in self._engines if not await engine.switch.runs()]
        if ended:
            said = [(engine.name, await engine.switch.said()) for engine in ended]
            self._last_words = "; ".join(f"{name}: {why}" for name, why in said if why)
        return not ended

    async def ready(self) -> bool:
        try:
            await asyncio.gather(*(engine.client.ready() for engine in self._engines))
        except BackendError:
            return False
        return True

    async def busy(self) -> bool:
        return any([await self._works(engine.client) for engine in self._engines])

    @staticmethod
    async def _works(client: EngineClient) -> bool:
        """One that does not answer runs nothing that could be waited for."""
        try:
            loads = await client.loads()
        except BackendError:
            return False
        return loads.running + loads.waiting > 0

    async def start_parts(self) -> Mapping[str, float]:
        return {}

    def last_words(self) -> str:
        return self._last_words

    async def leave(self) -> None:
        """Nothing ends with this process."""
