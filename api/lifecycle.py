"""One process's part in waking and sleeping: what it knows of units, and their keeper where it starts engines itself.

Made by wiring.py. Every process of a gateway knows how units stand, so that it sends nothing to one that is to sleep
and wakes one that a request needs; states and wishes are in SQL, whoever carries them out. SQL is read by the process
that starts engines; workers ask it (unit_news.py).
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from prometheus_client import CollectorRegistry

from api.launched import launched_units, units_elsewhere
from api.settings import Settings
from api.unit_news import AskSupervisor, UnitReader, told_by
from backends.connections import EngineSession
from backends.drivers.processes import Ports
from backends.drivers.switches import Switches
from backends.serverless import Serverless
from backends.topology import Deployment
from gateway.lifecycle.deployers import Deployers
from gateway.lifecycle.keeper import Keeper
from gateway.lifecycle.metrics import Starts, StartTimesCollector, UnitCollector
from gateway.lifecycle.rooms import Rooms
from gateway.lifecycle.sides import Side
from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.states import Depth, Record, Unit
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.tending import Started
from gateway.lifecycle.uses import UseStore
from gateway.lifecycle.waking import Waking
from gateway.lifecycle.watch import Watch
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

# Start times change seldom.
_LOAD_INTERVAL_S: Final = 10.0
# Between two questions to the supervisor, which answers once there is news.
_ASK_PAUSE_S: Final = 0.05


class Lifecycle:
    """place: of this gateway's engines. keeps: does this process start them? Of several workers none does: supervisor
    asks who does, and SQL is read where it does not answer.
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
        supervisor: AskSupervisor | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._session = session
        self._ports = Ports()
        self._switches = Switches()
        self._place = place
        self._apply: Callable[[Record], None] = lambda _: None
        self._leave_alone: Callable[[Unit], None] = lambda _: None
        self.serverless: dict[str, Serverless] = {}
        self.sides: dict[str, dict[str, Side]] = {}  # of models of one group, by unit
        self._times = StartTimes(database)
        self._times.load((place, ""))
        self.store = unit_store(settings, database)
        self._reader = UnitReader(self.store, database.call, place)
        self.waking = Waking(
            self.store,
            database.call,
            start_s=self.start_s,
            wished=self.wished,
            clock=time.time_ns,
            places=self._reader.places,
        )
        interval_s = settings.lifecycle.poll_interval_s
        read = self._reader.read if supervisor is None else told_by(supervisor, self._reader.read, interval_s)
        self._watch = Watch(read, heard=self._heard, lost=self._lost)
        self._pause_s = interval_s if supervisor is None else _ASK_PAUSE_S
        registry.register(UnitCollector(self.waking.records))
        registry.register(StartTimesCollector(self._times))
        self._keeper: Keeper | None = None
        if keeps:
            self._keeper = open_keeper(
                settings,
                database,
                self.store,
                self._times,
                place=place,
                heard=self._watch.hear,
                started=Starts(registry),
            )

    @property
    def keeps(self) -> bool:
        """Are engines started by this process?"""
        return self._keeper is not None

    def tell(self, apply: Callable[[Record], None], leave_alone: Callable[[Unit], None]) -> None:
        """From now on. apply: what is done with each record that is news. leave_alone: with a unit of another region of
        which nobody says any more how it stands.
        """
        self._apply = apply
        self._leave_alone = leave_alone

    def keeps_unit(self, unit: Unit) -> bool:
        """Is it started by this process, which therefore knows first how it stands?"""
        return self.keeps and unit.place == self._place

    def take(self, deployment: Deployment) -> None:
        """These units and no others from now on."""
        self.serverless = {model.id: model.serverless for model in deployment.models if model.serverless is not None}
        self._reader.elsewhere = units_elsewhere(deployment, self._settings.region)
        self.sides = {
            model.id: {unit: Side(role) for unit, role in model.roles().items()}
            for model in deployment.models
            if model.groups and model.serverless is not None
        }
        waits_s = {model: serverless.wait_seconds for model, serverless in self.serverless.items()}
        self.waking.serve(waits_s, self.sides)
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
                group.create_task(self._watch.run(self._pause_s), name="watch units")
                group.create_task(self._load_start_times(), name="load start times")
                if self._keeper is not None:
                    group.create_task(self._keeper.run(), name="keep units")
        finally:
            await self._switches.close()

    async def _load_start_times(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_INTERVAL_S)
            places = {record.unit.place for record in self.waking.records()}
            with suppress(TenancyUnavailable):  # what was learned before stands
                await self._database.call(self._times.load, sorted(places.union(self._reader.places)))

    def _heard(self, record: Record) -> None:
        self.waking.heard(record)
        self._apply(record)

    def _lost(self, unit: Unit) -> None:
        self.waking.forget(unit)
        if unit.place not in self._reader.places:
            self._leave_alone(unit)

    def wished(self, record: Record) -> None:
        """So it stands now that this process has wished something of it."""
        self._watch.hear(record)
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
