"""A fleet that grows and shrinks under a day of requests: the production door before engines that take time to start.

The number of engines is decided every few seconds by a policy: the service's own scaling (lifecycle/scaling.py), a
fixed number, or plain thresholds of utilisation. Deterministic: no clock but the engines'. An iteration of an engine is
told of when it is over, and is short enough that who is sent meanwhile waits for it no longer than for a real one.
"""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.replay.doors import Promise
from gateway.replay.engine import Engine, Moment
from gateway.replay.numbers import Fleet, Numbers
from gateway.replay.our_door import OurDoor
from gateway.replay.profiles import Profile
from gateway.replay.requests import Fate, SimulatedRequest
from gateway.replay.simulation import POLL_S

DECIDE_S = 5.0
# So long an iteration of decoding may be before it is told of.
_LEAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Starts:
    """How long an engine takes to serve: seconds, and the part by which it is more or less. seed: draws it."""

    seconds: float = 60.0
    spread: float = 0.2
    seed: int = 1

    @property
    def p90_s(self) -> float:
        return self.seconds * (1 + 0.8 * self.spread)


@dataclass(eq=False, slots=True)
class Unit:
    """One engine and its times. serves_at: when it has started. gone_at: None while it is there."""

    name: str
    engine: Engine
    asked_at: float
    serves_at: float
    joined: bool = False
    closed: bool = False
    gone_at: float | None = None
    moving: bool = False  # an iteration of it is under way


@dataclass(slots=True)
class Grown:
    """What was played. wished: changes of the number, with their times and reasons."""

    requests: list[SimulatedRequest]
    units: list[Unit]
    door: OurDoor
    ended_at: float
    wished: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def unit_hours(self) -> float:
        """Hours of engines, from the start that was asked for to the end of the last answer."""
        until = self.ended_at
        return sum((until if one.gone_at is None else one.gone_at) - one.asked_at for one in self.units) / 3600


class GrowingFleet:
    """Plays requests through one door into as many engines as `numbers` says. first: engines that serve at once."""

    def __init__(self, profile: Profile, promise: Promise, numbers: Numbers, *, first: int, starts: Starts) -> None:
        self._profile = profile
        self._numbers = numbers
        self._starts = starts
        self._draw = random.Random(starts.seed)  # noqa: S311 - reproducible, not secret
        self._units: dict[str, Unit] = {}
        self._all: list[Unit] = []
        self._moments: list[tuple[float, int, Unit, Moment]] = []
        self._count = 0
        self._wished: list[tuple[float, int, str]] = []
        engine = Engine(profile)
        self.door = OurDoor(engine, promise)
        self._add(Unit("engine-0", engine, 0.0, 0.0, joined=True))
        for _ in range(first - 1):
            self._start(0.0, after_s=0.0)

    def play(self, requests: list[SimulatedRequest]) -> Grown:
        """Every request ends: refused, evicted or finished. requests: by time of arrival, fresh; nobody comes again."""
        coming, now, next_poll, next_decision = 0, 0.0, 0.0, 0.0
        door = self.door
        while coming < len(requests) or self._moments or door.waiting():
            if now >= next_poll:
                self._join_started(now)
                door.poll(now)
                next_poll = now + POLL_S
            if now >= next_decision:
                self._decide(now)
                next_decision = now + DECIDE_S
            for unit, moment in self._over(now):
                door.saw(moment, now, unit.name)
                self._after(unit)
            while coming < len(requests) and requests[coming].arrived_at <= now:
                door.arrive(requests[coming], now)
                coming += 1
            while sent := door.send(now):
                for request in sent:
                    self._send(request, now)
            door.turned_away()
            now = max(now, self._next_at(requests, coming, min(next_poll, next_decision), now))
        ended = {Fate.REFUSED, Fate.EVICTED, Fate.FINISHED}
        assert all(request.fate in ended for request in requests), "all end"
        return Grown(requests, self._all, door, now, self._wished)

    def _next_at(self, requests: list[SimulatedRequest], coming: int, tick: float, now: float) -> float:
        at = tick
        if coming < len(requests):
            at = min(at, requests[coming].arrived_at)
        if self._moments:
            at = min(at, self._moments[0][0])
        if self.door.waiting():
            at = min(at, max(self.door.ask_at(), now + 1e-3))
        return at

    # Engines that work

    def _send(self, request: SimulatedRequest, now: float) -> None:
        unit = self._units[self.door.where(request)]
        unit.engine.submit(request, now)
        if not unit.moving:
            self._move(unit)

    def _move(self, unit: Unit) -> None:
        moment = unit.engine.run(unit.engine.clock + _LEAP_S)
        assert moment is not None, "an engine with work moves"
        unit.moving = True
        self._count += 1
        heapq.heappush(self._moments, (unit.engine.clock, self._count, unit, moment))

    def _over(self, now: float) -> Iterator[tuple[Unit, Moment]]:
        """Iterations that are over, by time."""
        while self._moments and self._moments[0][0] <= now:
            _, _, unit, moment = heapq.heappop(self._moments)
            unit.moving = False
            yield unit, moment

    def _after(self, unit: Unit) -> None:
        if not unit.engine.idle:
            self._move(unit)
        elif unit.closed:
            self._leave(unit, unit.engine.clock)

    # Engines that come and go

    def _decide(self, now: float) -> None:
        there = [unit for unit in self._units.values() if not unit.closed]
        serving = [unit for unit in there if unit.joined]
        fleet = Fleet(self.door.door, len(serving), len(there) - len(serving), self._starts.p90_s)
        number, why = self._numbers.wished(fleet, now)
        if number != len(there):
            self._wished.append((now, number, why))
        for _ in range(number - len(there)):
            self._start(now, after_s=self._starts.seconds * (1 + self._starts.spread * (2 * self._draw.random() - 1)))
        # Who starts is stopped first, the last one at first; then who has least to do.
        order = sorted(there, key=lambda unit: (unit.joined, unit.engine.running_count, -unit.serves_at))
        for unit in order[: max(0, len(there) - number)]:
            self._stop(unit, now)

    def _start(self, now: float, *, after_s: float) -> None:
        self._add(Unit(f"engine-{len(self._all)}", Engine(self._profile), now, now + after_s))
        if not after_s:
            self._join_started(now)

    def _add(self, unit: Unit) -> None:
        self._units[unit.name] = unit
        self._all.append(unit)

    def _join_started(self, now: float) -> None:
        for unit in self._units.values():
            if not unit.joined and unit.serves_at <= now:
                unit.joined = True
                self.door.join(unit.name, unit.engine)

    def _stop(self, unit: Unit, now: float) -> None:
        unit.closed = True
        if unit.joined:
            self.door.close(unit.name)
        if unit.engine.idle and not unit.moving:
            self._leave(unit, now)

    def _leave(self, unit: Unit, now: float) -> None:
        unit.gone_at = now
        del self._units[unit.name]
        if unit.joined:
            self.door.part(unit.name)
