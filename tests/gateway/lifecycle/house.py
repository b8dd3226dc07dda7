"""A keeper with a store and an engine that does as it is told, for tests of waking and sleeping."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from backends.errors import BackendError
from gateway.lifecycle.book import Wanted
from gateway.lifecycle.deployers import Deployers
from gateway.lifecycle.keeper import Keeper
from gateway.lifecycle.rooms import Rooms
from gateway.lifecycle.settings import LifecycleSettings
from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.states import Record, StartLimits, State, Unit, Wish
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.uses import UseStore
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tests.doubles.waiting import eventually
from tests.tenancy.clock import SettableClock

A = Unit("model", "a", "here")
SETTINGS = LifecycleSettings(poll_interval_s=0.01, close_seconds=0, start_failures_max=3, lease_seconds=1)


@dataclass
class Engine:
    """Implements Driver: an engine that does as it is told, or fails. Counts its starts."""

    runs: bool = False
    answers: bool = True
    works: bool = False
    fails: str = ""
    stuck: str = ""  # why it can't be stopped
    starts: int = 0
    said: list[str] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: whoever asks whether it is ready waits
    held: bool = False
    stop_is_over: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: a stop takes until it is set

    def __post_init__(self) -> None:
        self.hold.set()
        self.stop_is_over.set()

    async def start(self) -> None:
        assert not self.runs, "started twice"
        self.said.append("start")
        self.starts += 1
        if self.fails:
            raise BackendError(self.fails)
        self.runs = True

    async def stop(self) -> None:
        self.said.append("stop")
        if self.stuck:
            raise BackendError(self.stuck)
        await self.stop_is_over.wait()
        self.runs = False

    async def release(self) -> None:
        self.said.append("release")
        if self.fails:
            raise BackendError(self.fails)

    async def resume(self) -> None:
        self.said.append("resume")
        if self.fails:
            raise BackendError(self.fails)

    async def running(self) -> bool:
        return self.runs

    async def ready(self) -> bool:
        if not self.hold.is_set():
            self.held = True
            await self.hold.wait()
        return self.runs and self.answers

    async def busy(self) -> bool:
        return self.works

    async def start_parts(self) -> dict[str, float]:
        return {"weights": 0.5}

    def last_words(self) -> str:
        return "" if self.runs else "exit code 3"

    async def leave(self) -> None:
        self.said.append("leave")
        self.runs = False


@dataclass
class Told:
    """Implements Started."""

    begun: int = 0
    good: int = 0
    bad: int = 0

    def began(self, _unit: Unit) -> None:
        self.begun += 1

    def succeeded(self, _unit: Unit, _seconds: float) -> None:
        self.good += 1

    def failed(self, _unit: Unit) -> None:
        self.bad += 1


class House:
    """A store, a keeper and an engine; `away` makes the database not answer."""

    def __init__(self, database: Database, clock: SettableClock) -> None:
        self.database, self.clock = database, clock
        self.store = UnitStore(database, lease_s=10, clock=clock, limits=StartLimits(failures_max=3))
        self.times = StartTimes(database)
        self.engine = Engine()
        self.told = Told()
        self.away = False
        self.calls: Counter[str] = Counter()  # of the store, by name

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.calls[function.__name__] += 1
        if self.away:
            raise TenancyUnavailable("away", retry_after_s=1)
        return await self.database.call(function, *args)

    def keeper(self, owner: str = "me", drain_s: float = 20.0) -> Keeper:
        return Keeper(
            self.store,
            self.call,
            SETTINGS,
            Rooms(self.store, UseStore(self.database), self.call, clock=self.clock),
            Deployers(self.database, lease_s=10, clock=self.clock),
            owner=owner,
            drain_s=drain_s,
            clock=self.clock,
            chance=lambda: 0.0,
            heard=lambda _: None,
            started=self.told,
            times=self.times,
        )

    @asynccontextmanager
    async def kept(self, wish: Wish = Wish.AWAKE, **settings: Any) -> AsyncIterator[Keeper]:
        keeper = self.keeper(**settings)
        keeper.want({A: Wanted(self.engine, wish)})
        async with running(keeper):
            yield keeper

    @property
    def record(self) -> Record:
        [record] = self.store.of([A])
        return record

    async def comes_to(self, state: State) -> None:
        # Each step is a transaction that is on the disk before the next one: on a busy disk that takes a while.
        await eventually(lambda: [record.state for record in self.store.of([A])] == [state], what=f"a unit {state}")


@asynccontextmanager
async def running(keeper: Keeper) -> AsyncIterator[None]:
    task = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
