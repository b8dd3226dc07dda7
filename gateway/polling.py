"""How each engine is, asked again and again: its load often while it works, its metrics beside that.

fleet.py runs `watch` as a task of its own for each engine; what is heard goes to its model_fleet.py. How often one is
asked, and when another process that asks it is enough, is decided here.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from backends.errors import BackendError, EngineTimeout
from backends.wire import Loads
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.settings import GatewaySettings

log = structlog.get_logger(__name__)

# To each engine of another region: a connection that has to be made first costs a request one more round trip.
_SPARE_CONNECTIONS = 4
# A connection and four exchanges: the most that a probe takes of the way to another region.
_ROUND_TRIPS = 5
# Others' reports may be late by so many intervals before a process asks for itself.
_HEARD_INTERVALS = 2


class Polling:
    """Of all models' engines. on_report: told of each answer of an engine, with when it was asked (monotonic seconds);
    several processes share what they hear.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.on_report: Callable[[ModelFleet, Replica, Loads, float], None] | None = None

    async def watch(self, fleet: ModelFleet, engine: Replica) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_for_ever(fleet, engine), name=f"poll {engine.id}")
            tasks.create_task(self._read_figures_for_ever(fleet, engine), name=f"figures {engine.id}")

    async def _read_figures_for_ever(self, fleet: ModelFleet, engine: Replica) -> None:
        """Beside the polls, which must not wait for an engine that is slow to write its metrics."""
        while True:
            try:
                figures = None if engine.snapshot is None else await engine.client.figures(engine.rank)
            except BackendError:
                figures = None
            fleet.figured(engine, figures)
            await asyncio.sleep(self._settings.figures_interval_s)

    async def _poll_for_ever(self, fleet: ModelFleet, replica: Replica) -> None:
        while True:
            replica.poke.clear()
            if replica.asleep:
                await replica.poke.wait()
                continue
            await self.poll(fleet, replica)
            await asyncio.sleep(self._settings.poll_interval_busy_s / 4)  # pokes come in bursts: one poll serves many
            due_at = time.monotonic() + self._settings.poll_interval_idle_s
            while (left_s := self._quiet_s(fleet, replica, due_at)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await replica.poke.wait()
                        if not self._hears(replica):
                            break
                        replica.poke.clear()

    def _quiet_s(self, fleet: ModelFleet, replica: Replica, due_at: float) -> float:
        """How long it need not be asked, at the most: until it is due, or what was heard of it by others is old."""
        now = time.monotonic()
        seen = replica.snapshot
        works = seen is None or seen.running + seen.waiting > 0
        if not (works or len(replica.ledger) > 0 or len(fleet.room) > 0 or replica.health.wavers):
            return due_at - now
        interval_s = self._settings.poll_interval_busy_s
        last_at = due_at - self._settings.poll_interval_idle_s
        if self._hears(replica):
            last_at = max(last_at, replica.heard_at)
            interval_s *= _HEARD_INTERVALS
        return min(due_at, last_at + interval_s) - now

    def _hears(self, replica: Replica) -> bool:
        """Has another process told of it lately? Then it asks for us, and our own probes are for the connection."""
        if replica.snapshot is None:
            return False
        return time.monotonic() - replica.heard_at < _HEARD_INTERVALS * self._settings.poll_interval_busy_s

    async def poll(self, fleet: ModelFleet, replica: Replica) -> None:
        """Ask once. A failure keeps the last report until too many have failed; then the replica is unknown."""
        await self._ask(fleet, replica)
        if replica.region != fleet.regions.home and replica.snapshot is not None:
            with suppress(BackendError):  # the next probe says what is to be said of it
                await replica.client.keep_spare(_SPARE_CONNECTIONS)
        replica.client.still_for(replica.health.still_s(time.monotonic()))

    async def _ask(self, fleet: ModelFleet, replica: Replica) -> None:
        asked_at = time.monotonic()
        before, was_known = replica.info, replica.snapshot is not None
        bound_s = self._bound_s(fleet, replica)
        try:
            async with asyncio.timeout(bound_s):
                if before is None or not was_known or replica.health.wavers:
                    info = await replica.look()
                    if before is not None and before.epoch != info.epoch:
                        fleet.restarted(replica)
                if replica.faults:
                    return
                probed_at = time.monotonic()
                loads = await replica.client.loads(replica.rank)
                fleet.regions.probed(replica.region, time.monotonic() - probed_at)
        except TimeoutError:
            fleet.silent(replica, EngineTimeout(f"no report from {replica.region} within {bound_s:.1f} s"))
            return
        except BackendError as error:
            fleet.silent(replica, error)
            return
        is_new = fleet.reported(replica, loads, asked_at)
        if self.on_report is not None:
            self.on_report(fleet, replica, loads, asked_at)
        # An old report still counts requests that have ended since.
        for rid in fleet.haunted(replica, loads.running).abort if is_new else ():
            with suppress(BackendError):  # it is named again if it is still there
                await replica.client.abort(rid)
        if not was_known:
            for decode in fleet.replicas:
                for half in decode.prefills:
                    if replica in {decode, half} and (why := decode.disagreement(half)):
                        log.error(
                            "two halves can't share pages and are not used together",
                            decode=decode.id,
                            prefill=half.id,
                            why=why,
                        )

    def _bound_s(self, fleet: ModelFleet, replica: Replica) -> float | None:
        """Of a probe as a whole: what is lost on the way to another region is refused by nobody. None: the client's."""
        if replica.region == fleet.regions.home or replica.snapshot is None:
            return None
        return self._settings.remote_probe_seconds_max + _ROUND_TRIPS * fleet.regions.round_trip_s(replica.region)
