"""Plays requests through a door into the simulated engine, event by event. Deterministic: no clock but the engine's."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

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


class _Arrivals:
    """The requests to come, by time: the trace's, and those of clients that come again."""

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self._coming = [(request.arrived_at, number, request) for number, request in enumerate(requests)]
        heapq.heapify(self._coming)
        self._number = len(requests)

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def next_at(self) -> float:
        return self._coming[0][0] if self._coming else math.inf

    def due(self, now: float) -> Iterator[SimulatedRequest]:
        while self._coming and self._coming[0][0] <= now:
            yield heapq.heappop(self._coming)[2]

    def again(self, request: SimulatedRequest, now: float) -> None:
        """Its client sends it once more when it was told to."""
        if not request.returns or request.retry_after_s is None:
            return
        at = now + request.retry_after_s
        request.retry = replace(_fresh(request), arrived_at=at)
        heapq.heappush(self._coming, (at, self._number, request.retry))
        self._number += 1


def _fresh(request: SimulatedRequest) -> SimulatedRequest:
    return SimulatedRequest(
        f"{request.id}-again",
        request.tenant,
        request.arrived_at,
        request.prompt_tokens,
        request.output_tokens,
        request.ceiling,
        request.blocks,
        origin=request.id,
    )


def play(requests: list[SimulatedRequest], engine: Engine, door: Door) -> Played:
    """Every request ends: refused, evicted or finished. requests: by time of arrival, fresh."""
    coming, now, next_poll = _Arrivals(requests), 0.0, 0.0
    queued: set[str] = set()
    while coming or not engine.idle or door.waiting():
        if engine.idle:
            if coming and not door.waiting():
                now = max(now, coming.next_at)
        else:
            now = max(now, engine.clock)
        if now >= next_poll:
            door.poll(now)
            next_poll = now + POLL_S
        for request in coming.due(now):
            door.arrive(request, now)
        while sent := door.send(now):
            for request in sent:
                engine.submit(request, now)
        for request in door.turned_away():
            coming.again(request, now)
        until = min(next_poll, coming.next_at)
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
    ended = {Fate.REFUSED, Fate.EVICTED, Fate.FINISHED}
    assert all(request.answered.fate in ended for request in requests), "all end"
    return Played(requests, engine, door, len(queued))
