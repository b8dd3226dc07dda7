"""All models' replicas, and a task for each engine that asks it how it is (polling.py).

One a process: api/deployed.py says which models and replicas it has, the pipeline takes each model's from here.
"""

import asyncio

from gateway.model_fleet import ModelFleet
from gateway.polling import Polling
from gateway.replica import Replica
from gateway.settings import GatewaySettings


class Fleet:
    """All models' replicas. `run` polls them until cancelled."""

    def __init__(self, models: list[ModelFleet], settings: GatewaySettings) -> None:
        self._models = {fleet.model: fleet for fleet in models}
        self.polling = Polling(settings)
        self._changed = asyncio.Event()

    def replace(self, served: list[tuple[ModelFleet, list[Replica]]]) -> None:
        """Serve these models by these replicas from now on; requests that run elsewhere end there."""
        for fleet, replicas in served:
            fleet.serve(replicas)
        self._models = {fleet.model: fleet for fleet, _ in served}
        self._changed.set()
        for fleet, _ in served:
            fleet.room.wake()

    def of(self, model: str) -> ModelFleet:
        return self._models[model]

    def all(self) -> tuple[ModelFleet, ...]:
        return tuple(self._models.values())

    async def run(self) -> None:
        """Poll every engine, each in its own task, until cancelled; a deployment may bring and take some."""
        polls: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                served = {engine: fleet for fleet in self._models.values() for engine in fleet.engines()}
                for gone in polls.keys() - served.keys():
                    polls.pop(gone).cancel()
                for engine in served.keys() - polls.keys():
                    polls[engine] = tasks.create_task(
                        self.polling.watch(served[engine], engine), name=f"watch {engine.id}"
                    )
                await self._changed.wait()
