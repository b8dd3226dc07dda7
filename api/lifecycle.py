"""One process's part in waking and sleeping: what it knows of units, and their keeper where it starts engines itself.

Made by wiring.py. Every process of a gateway reads how units stand, so that it sends nothing to one that is to sleep
and wakes one that a request needs; states and wishes are in SQL, whoever carries them out.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from prometheus_client import CollectorRegistry

from api.launched import launched_units
from api.settings import Settings
from backends.connections import EngineSession
from backends.drivers.processes import Ports
from backends.drivers.switches import Switches
from backends.serverless import Serverless
from backends.topology import Deployment
from gateway.lifecycle.deployers import Deployers
from gateway.lifecycle.keeper import Keeper
from gateway.lifecycle.metrics import Starts, StartTimesCollector, UnitCollector
from gateway.lifecycle.rooms import Rooms
from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.states import Depth, Record, Unit
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.tending import Started
from gateway.lifecycle.uses import UseStore
from gateway.lifecycle.waking import Waking
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

# Start times change seldom: they are read once in so many looks at how units stand.
_TURNS_A_LOAD: Final = 20


class Lifecycle:
    """place: of this gateway's engines. keeps: does this process start them? Of several workers none does.

    heard: what is done with each record that is news to this process.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        session: EngineSession,
        registry: CollectorRegistry,
        *,
        place: str,
        keeps: bool,
    ) -> None:
        self._settings = settings
        self._database = database
        self._session = session
        self._ports = Ports()
        self._switches = Switches()
        self._place = place
        self._apply: Callable[[Record], None] = lambda _: None
        self.serverless: dict[str, Serverless] = {}
        self._times = StartTimes(database)
        self._times.load((place, ""))
        self.store = unit_store(settings, database)
        self.waking = Waking(
            self.store, database.call, start_s=self.start_s, wished=lambda _: self._poke(), clock=time.time_ns
        )
        registry.register(UnitCollector(self.waking.records))
        registry.register(StartTimesCollector(self._times))
        self._keeper: Keeper | None = None
        if keeps:
            self._keeper = open_keeper(
                settings, database, self.store, self._times, place=place, heard=self._heard, started=Starts(registry)
            )

    @property
    def keeps(self) -> bool:
        """Are engines started by this process?"""
        return self._keeper is not None

    def tell(self, apply: Callable[[Record], None]) -> None:
        """apply: what is done with each record that is news, from now on."""
        self._apply = apply

    def take(self, deployment: Deployment) -> None:
        """These units and no others from now on."""
        self.serverless = {model.id: model.serverless for model in deployment.models if model.serverless is not None}
        waits = {model: serverless.wait_seconds for model, serverless in self.serverless.items()}
        self.waking.serve({model: seconds for model, seconds in waits.items() if seconds is not None})
        if self._keeper is not None:
            units = launched_units(
                deployment,
                self._settings,
                self._session,
                self._ports,
                self._switches,
                place=self._place,
                at=utc_now(),
            )
            self._keeper.rooms.serve(deployment)
            self._keeper.want(units)

    def may_sleep(self, model: str) -> bool:
        """That no engine of it answers is no trouble: it wakes when it is needed, or an operator sent it to sleep."""
        return model in self.serverless or self.waking.sleeps(model)

    def waits_for_memory(self, model: str) -> bool:
        """Does a unit of it wait for another to sleep, as far as this process decides that?"""
        return self._keeper is not None and any(unit.model == model for unit in self._keeper.rooms.waiting)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(), name="watch units")
                if self._keeper is not None:
                    group.create_task(self._keeper.run(), name="keep units")
        finally:
            await self._switches.close()

    async def _watch(self) -> None:
        places, turn = (self._place, ""), 0
        while True:
            with suppress(TenancyUnavailable):  # what was last heard of stands
                self._learn(await self._database.call(self.store.standing, places))
                if turn % _TURNS_A_LOAD == 0:
                    await self._database.call(self._times.load, places)
            turn += 1
            await asyncio.sleep(self._settings.lifecycle.poll_interval_s)

    def _learn(self, rows: Iterable[Record]) -> None:
        known = {record.unit: record for record in self.waking.records()}
        for row in rows:
            record = known.pop(row.unit, None)
            # A keeper of this process tells its units' news before they can be read here; one that was forgotten and
            # named again begins with a lower fence.
            if record is None or row.version > record.version or row.fence < record.fence:
                self._heard(row)
        for unit in known:
            self.waking.forget(unit)

    def _heard(self, record: Record) -> None:
        self.waking.heard(record)
        self._apply(record)

    def wished(self, record: Record) -> None:
        """So it stands now that this process has wished something of it."""
        self._heard(record)
        self._poke()

    def _poke(self) -> None:
        if self._keeper is not None:
            self._keeper.poke()

    def start_s(self, unit: Unit, depth: Depth) -> tuple[float, bool]:
        """How long it takes to start from this depth, nine times out of ten, and whether that has been learned."""
        learned = self._times.estimate(unit, depth)
        return (self._settings.lifecycle.start_seconds_expected, False) if learned is None else (learned.p90, True)


def utc_now() -> datetime:
    """For what the deployment file says by the time of the week."""
    return datetime.fromtimestamp(time.time(), UTC)


def unit_store(settings: Settings, database: Database) -> UnitStore:
    lifecycle = settings.lifecycle
    return UnitStore(database, lease_s=lifecycle.lease_seconds, clock=time.time_ns, limits=lifecycle.start_limits())


def open_keeper(
    settings: Settings,
    database: Database,
    store: UnitStore,
    times: StartTimes,
    *,
    place: str,
    heard: Callable[[Record], None],
    started: Started,
) -> Keeper:
    """Of whoever has the place: nobody else looks after its units any more."""
    store.free_place(place)
    return Keeper(
        store,
        database.call,
        settings.lifecycle,
        Rooms(store, UseStore(database), database.call, clock=time.time_ns),
        Deployers(database, lease_s=settings.lifecycle.lease_seconds, clock=time.time_ns),
        owner=f"{place}-{secrets.token_hex(4)}",
        drain_s=settings.drain_seconds_max,
        clock=time.time_ns,
        chance=random.random,
        heard=heard,
        started=started,
        times=times,
    )
