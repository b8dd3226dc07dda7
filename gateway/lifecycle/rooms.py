"""Room for a unit that is to wake, on machines that several models share: asks placement.py, and has others sleep.

Asked by keeper.py before each start, one at a time in its process. Counts the units that the keeper knows of, its own
and others', and those that are always there. What one unit slept for is kept for whoever it was made for. Two gateways
that start engines on one machine may decide at once.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import structlog

from backends.machines import Memory
from backends.topology import Deployment, Model
from gateway.lifecycle.placement import Later, Resident, place
from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish, Wished
from gateway.lifecycle.store import Call, UnitStore
from gateway.lifecycle.uses import UseStore
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)


_SECOND_NS: Final = 1_000_000_000
# Whoever waited for a unit that has just become ready has not been sent there yet: for so long it counts as busy, or
# two models that wake in turn would put each other to sleep before either has answered.
_SETTLED_S: Final = 5.0
_CHECK_S: Final = 0.1
# Who waits asks again after `_CHECK_S`, or as soon as a slow database lets it.
_ASKS_AGAIN_NS: Final = 5 * _SECOND_NS
_THERE: Final = frozenset({State.WARMING, State.READY, State.DRAINING})


class Rooms:
    """clock: Unix nanoseconds."""

    def __init__(self, store: UnitStore, uses: UseStore, call: Call, *, clock: Callable[[], int]) -> None:
        self._store = store
        self._uses = uses
        self._call = call
        self._clock = clock
        self._models: dict[str, Model] = {}
        self._memory: dict[tuple[str, str], Memory] = {}
        self._room: dict[str, int] = {}
        self._asked_ns: dict[Unit, int] = {}  # by those that wait for memory, the last time
        self._promised: set[Unit] = set()  # of those, whom others leave room for

    def serve(self, deployment: Deployment) -> None:
        """So large are the machines and units from now on."""
        self._models = {model.id: model for model in deployment.models}
        self._memory = {
            (model.id, name): memory
            for model in deployment.models
            for name, memory in deployment.housed(model).items()
            if memory
        }
        self._room = {pool: size for machine in deployment.machines for pool, size in machine.pools().items()}

    @property
    def waiting(self) -> set[Unit]:
        """Who waits for memory. Who is no longer wished awake asks no more."""
        since_ns = self._clock() - _ASKS_AGAIN_NS
        self._asked_ns = {unit: at_ns for unit, at_ns in self._asked_ns.items() if at_ns >= since_ns}
        self._promised &= self._asked_ns.keys()
        return set(self._asked_ns)

    async def make(
        self,
        unit: Unit,
        records: Iterable[Record],
        busy: Callable[[Unit], Awaitable[bool]],
        wished: Callable[[Record], None],
    ) -> float | None:
        """None: it may start now. Else seconds after which to ask again; whoever has to has been told to sleep.

        records: of all units of the keeper. busy: does anything run or wait there? wished: told of whoever is to sleep.
        Raises TenancyUnavailable if nobody can be told.
        """
        memory = self._memory.get((unit.model, unit.name))
        if memory is None:
            return None
        now_ns = self._clock()
        known = {record.unit: record for record in records}
        used = await self._used({unit.place for unit in known})
        residents = [
            await self._resident(record, used.get(record.unit, 0), busy, now_ns)
            for record in known.values()
            if record.unit != unit and record.state in _THERE and (record.unit.model, record.unit.name) in self._memory
        ]
        residents += self._always_there(known, unit)
        residents += [
            Resident(other, self._memory[other.model, other.name], 0.0, steady=False)
            for other in self._promised & self.waiting
            if other != unit
        ]
        found = place(unit, memory, room=self._room, residents=residents, awake_min=self._awake_min(now_ns))
        if isinstance(found, Later):
            self._say(unit, found)
            self._asked_ns[unit] = now_ns
            if not any(resident.leaving for resident in residents):
                self._promised.discard(unit)  # requests came in between: it has to wait for their end
            return _CHECK_S if found.in_s is None else min(_CHECK_S, found.in_s)
        if not found.sleep:
            self._asked_ns.pop(unit, None)
            self._promised.discard(unit)
            return None
        self._asked_ns[unit] = now_ns
        self._promised.add(unit)
        for sleeper in found.sleep:
            record = await self._call(self._store.wish, sleeper, self._sleep(sleeper))
            log.info("a unit sleeps so that another can wake", unit=sleeper.name, model=sleeper.model, wakes=unit.model)
            if record is not None:
                wished(record)
        return _CHECK_S

    async def _used(self, places: Iterable[str]) -> dict[Unit, int]:
        try:
            return await self._call(self._uses.of, sorted(places))
        except TenancyUnavailable:
            return {}

    async def _resident(
        self, record: Record, used_at_ns: int, busy: Callable[[Unit], Awaitable[bool]], now_ns: int
    ) -> Resident:
        unit = record.unit
        leaving = record.state is State.DRAINING or record.wish is not Wish.AWAKE
        steady = record.state is State.READY and not leaving
        settles_s = _SETTLED_S - (now_ns - record.since_ns) / _SECOND_NS
        new = steady and settles_s > 0 and used_at_ns <= record.since_ns
        return Resident(
            unit,
            self._memory[unit.model, unit.name],
            needed_at=max(used_at_ns, record.since_ns) / _SECOND_NS,
            steady=steady,
            leaving=leaving,
            busy=new or (steady and await busy(unit)),
            frees_in_s=settles_s if new else None,
        )

    def _always_there(self, known: Mapping[Unit, Record], waking: Unit) -> list[Resident]:
        """Engines that nobody starts or stops from here."""
        kept = {(unit.model, unit.name) for unit in (*known, waking)}
        return [
            Resident(Unit(model, name), memory, 0.0, steady=False)
            for (model, name), memory in self._memory.items()
            if (model, name) not in kept
        ]

    def _awake_min(self, now_ns: int) -> dict[str, int]:
        now = datetime.fromtimestamp(now_ns / _SECOND_NS, UTC)
        return {
            name: model.awake_min if model.serverless is None else model.serverless.replicas_min_at(now)
            for name, model in self._models.items()
        }

    def _sleep(self, unit: Unit) -> Wished:
        serverless = self._models[unit.model].serverless
        assert serverless is not None, "a model that never sleeps keeps all its units awake"
        return Wished(Wish.ASLEEP, By.PLACEMENT, Depth(serverless.depth))

    def _say(self, unit: Unit, later: Later) -> None:
        """Once each time that it has to wait."""
        if unit not in self.waiting:
            log.warning(
                "a unit waits for memory", unit=unit.name, model=unit.model, pool=later.pool, short_mib=later.short_mib
            )
