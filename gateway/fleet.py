"""The replicas of each model and their last known state; asks each engine how it is, in a bounded task of its own.

The pipeline places requests here (`place`) and reports trouble (`suspect`). Whether a request fits is admission.py's
decision; waiting is waiting_room.py's. A replica without a report is unknown: neither idle nor full.
"""

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from backends.client import EngineClient
from backends.errors import BackendError
from backends.wire import ServerInfo
from gateway.admission import Capacity, Verdict, pages_for, retry_after_s, verdict
from gateway.hold import PageLedger
from gateway.settings import GatewaySettings
from gateway.waiting_room import WaitingRoom

log = structlog.get_logger(__name__)

# Before anything has finished there is no mean to go by; a guess that only feeds Retry-After.
_FIRST_DURATION_S = 2.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine's own report, with the moment it was asked for (monotonic seconds): holds taken later are not in it."""

    taken_at: float
    total_pages: int
    used_pages: int
    running: int
    waiting: int
    running_max: int


class Replica:
    """One engine: its client, what is promised there, and its last report."""

    def __init__(self, replica_id: str, client: EngineClient) -> None:
        self.id = replica_id
        self.client = client
        self.ledger = PageLedger()
        self.info: ServerInfo | None = None
        self.snapshot: Snapshot | None = None
        self.failures = 0
        self.poke = asyncio.Event()

    def capacity(self) -> Capacity | None:
        """What admission decides on; None while unknown."""
        seen = self.snapshot
        if seen is None or self.info is None:
            return None
        return Capacity(
            total_pages=seen.total_pages,
            used_pages=seen.used_pages,
            held_pages=self.ledger.held_pages,
            unseen_pages=self.ledger.taken_since(seen.taken_at),
            running=len(self.ledger),
            running_max=seen.running_max,
        )


class ModelFleet:
    """The replicas of one model and the room where requests for it wait."""

    def __init__(
        self,
        model: str,
        replicas: list[Replica],
        settings: GatewaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.replicas = replicas
        self._settings = settings
        self._clock = clock
        self._mean_duration_s = _FIRST_DURATION_S
        self.room: WaitingRoom[Replica] = WaitingRoom(
            entries_max=settings.queue_entries_max,
            try_place=self._try_place,
            give_back=self.release,
            retry_after_s=self.retry_after_s,
        )

    @property
    def up(self) -> bool:
        """Does any replica answer?"""
        return any(replica.snapshot is not None for replica in self.replicas)

    def known(self) -> ServerInfo | None:
        """The last known facts of the smallest replica; kept while it is down, so that "never fits" stays decidable."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        return min(infos, key=lambda info: info.total_tokens, default=None)

    def _try_place(self, request_id: str, need_pages: int) -> Replica | None:
        """Take the pages at the replica with the most room, or nothing."""
        best: Replica | None = None
        best_free = -1
        for replica in self.replicas:
            capacity = replica.capacity()
            if capacity is None or verdict(need_pages, capacity) is not Verdict.FITS_NOW:
                continue
            if capacity.free_pages > best_free:
                best, best_free = replica, capacity.free_pages
        if best is not None:
            best.ledger.take(request_id, need_pages, now=self._clock())
        return best

    def release(self, replica: Replica, request_id: str) -> None:
        """Give pages back and let those who wait try again. Idempotent."""
        if replica.ledger.release(request_id):
            replica.poke.set()  # the next report should show it: ask soon
            self.room.wake()

    def suspect(self, replica: Replica) -> None:
        """A connection failed: unknown until the next report, which is asked for at once."""
        replica.snapshot = None
        replica.poke.set()

    def observe_duration(self, seconds: float) -> None:
        """A request ended after running this long; an exponential mean over about the last sixteen."""
        self._mean_duration_s += (seconds - self._mean_duration_s) / 16

    def retry_after_s(self, ahead: int, request_id: str) -> int:
        return retry_after_s(
            ahead=ahead,
            running=sum(len(replica.ledger) for replica in self.replicas),
            mean_duration_s=self._mean_duration_s,
            # Drawn from the id: a replayed decision comes out the same.
            jitter=(zlib.crc32(request_id.encode()) & 0xFFFF) / 0x10000,
            most_s=self._settings.retry_after_seconds_max,
        )


class Fleet:
    """All models' replicas. `run` polls them until cancelled."""

    def __init__(self, models: list[ModelFleet], settings: GatewaySettings) -> None:
        self._models = {fleet.model: fleet for fleet in models}
        self._settings = settings

    def of(self, model: str) -> ModelFleet:
        return self._models[model]

    def all(self) -> tuple[ModelFleet, ...]:
        return tuple(self._models.values())

    async def run(self) -> None:
        """Poll every replica, each in its own task, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for fleet in self._models.values():
                for replica in fleet.replicas:
                    tasks.create_task(self._poll_for_ever(fleet, replica), name=f"poll {replica.id}")

    async def _poll_for_ever(self, fleet: ModelFleet, replica: Replica) -> None:
        while True:
            replica.poke.clear()
            await self.poll(fleet, replica)
            busy = len(replica.ledger) > 0 or len(fleet.room) > 0 or replica.snapshot is None
            interval = self._settings.poll_interval_busy_s if busy else self._settings.poll_interval_idle_s
            await asyncio.sleep(self._settings.poll_interval_busy_s / 4)  # pokes come in bursts: one poll serves many
            try:
                async with asyncio.timeout(interval):
                    await replica.poke.wait()
            except TimeoutError:
                pass

    async def poll(self, fleet: ModelFleet, replica: Replica) -> None:
        """Ask once. A failure keeps the last report until `poll_failures_max` in a row; then the replica is unknown."""
        asked_at = time.monotonic()
        try:
            if replica.info is None or replica.snapshot is None:
                await replica.client.ready()
                replica.info = await replica.client.server_info()
            loads = await replica.client.loads()
        except BackendError as error:
            replica.failures += 1
            if replica.failures == self._settings.poll_failures_max:
                log.warning("replica does not answer", replica=replica.id, error=error.message)
            if replica.failures >= self._settings.poll_failures_max:
                replica.snapshot = None
            return
        if replica.snapshot is None:
            log.info("replica answers", replica=replica.id, total_tokens=loads.total_tokens)
        replica.failures = 0
        page_tokens = replica.info.page_tokens
        replica.snapshot = Snapshot(
            taken_at=asked_at,
            total_pages=loads.total_tokens // page_tokens,
            used_pages=pages_for(loads.used_tokens, page_tokens),
            running=loads.running,
            waiting=loads.waiting,
            running_max=loads.running_max,
        )
        fleet.room.wake()
