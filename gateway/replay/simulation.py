"""Plays requests through a door into the simulated engine, event by event. Deterministic: no clock but the engine's."""

from dataclasses import dataclass

from gateway.replay.doors import Door
from gateway.replay.engine import Engine
from gateway.replay.requests import Fate, SimulatedRequest

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Played:
    """engine_queued: requests that the door let in and the engine then kept in its own queue."""

    requests: list[SimulatedRequest]
    engine: Engine
    door: Door
    engine_queued: int


def play(requests: list[SimulatedRequest], engine: Engine, door: Door) -> Played:
    """Every request ends: refused, evicted or finished. requests: by time of arrival, fresh."""
    coming, now, next_poll = 0, 0.0, 0.0
    queued: set[str] = set()
    while coming < len(requests) or not engine.idle or door.waiting():
        if engine.idle:
            if coming < len(requests) and not door.waiting():
                now = max(now, requests[coming].arrived_at)
        else:
            now = max(now, engine.clock)
        while coming < len(requests) and requests[coming].arrived_at <= now:
            door.arrive(requests[coming], requests[coming].arrived_at)
            coming += 1
        if now >= next_poll:
            door.poll(now)
            next_poll = now + POLL_S
        while sent := door.send(now):
            for request in sent:
                engine.submit(request, now)
        until = min(next_poll, requests[coming].arrived_at if coming < len(requests) else next_poll)
        if door.waiting():
            until = min(until, max(door.ask_at(), now + 1e-3))
        if engine.idle:
            now = until if door.waiting() else now
            continue
        before = engine.waiting_count
        moment = engine.run(max(until, engine.clock + 1e-9))
        assert moment is not None, "an engine with work moves"
        if before:
            queued.update(engine.left_waiting())
        door.saw(moment, engine.clock)
    assert all(request.fate in {Fate.REFUSED, Fate.EVICTED, Fate.FINISHED} for request in requests), "all end"
    return Played(requests, engine, door, len(queued))
