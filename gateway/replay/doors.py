"""The policies under trial: each is a door in front of the simulated engine. The baselines; our own is our_door.py.

simulation.py tells a door what arrives, starts, grows and leaves, and asks it whom to send. All doors but the open one
hold requests back in one queue and drop who can't have its first token in time any more, so that each is at its best.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.replay.engine import Engine, Moment
from gateway.replay.requests import Fate, SimulatedRequest


@dataclass(frozen=True, slots=True)
class Promise:
    """The limits that make a finished request a good one, in seconds."""

    first_s: float
    between_s: float

    def kept_by(self, request: SimulatedRequest) -> bool:
        if request.fate is not Fate.FINISHED or request.first_s is None:
            return False
        return request.first_s <= self.first_s and (request.between_s or 0.0) <= self.between_s


class Door(Protocol):
    def arrive(self, request: SimulatedRequest, now: float) -> None:
        """Queue it, or refuse it by setting its fate."""

    def send(self, now: float) -> list[SimulatedRequest]:
        """Who goes to the engine now."""

    def saw(self, moment: Moment, now: float) -> None:
        """The engine has moved: first tokens, ends, times."""

    def poll(self, now: float) -> None:
        """The time of a snapshot."""

    def waiting(self) -> int:
        """Requests held back."""

    def ask_at(self) -> float:
        """When the last answer may change although nobody has arrived, started or left."""

    def turned_away(self) -> list[SimulatedRequest]:
        """Who was refused or evicted since the last call and was told when to come again."""


class FifoDoor:
    """First in, first out while `may_start` says so; leaves those behind who have waited as long as is promised."""

    def __init__(self, engine: Engine, wait_s: float, may_start: Callable[[Engine, SimulatedRequest], bool]) -> None:
        self._engine = engine
        self._wait_s = wait_s
        self._may_start = may_start
        self._queue: deque[SimulatedRequest] = deque()
        self.inside: dict[str, SimulatedRequest] = {}

    def arrive(self, request: SimulatedRequest, now: float) -> None:  # noqa: ARG002 - other doors forecast from now
        self._queue.append(request)

    def send(self, now: float) -> list[SimulatedRequest]:
        """One at a time: what is sent changes what may start."""
        while self._queue and now - self._queue[0].arrived_at > self._wait_s:
            self._queue.popleft().fate = Fate.EVICTED
        if self._queue and (not self.inside or self._may_start(self._engine, self._queue[0])):
            request = self._queue.popleft()
            self.inside[request.id] = request
            return [request]
        return []

    def saw(self, moment: Moment, now: float) -> None:  # noqa: ARG002 - other doors measure times
        for request in moment.finished:
            self.inside.pop(request.id, None)

    def poll(self, now: float) -> None:
        pass

    def waiting(self) -> int:
        return len(self._queue)

    def ask_at(self) -> float:
        return math.inf

    def turned_away(self) -> list[SimulatedRequest]:
        return []  # it says nothing of when to come again


def open_door(engine: Engine) -> Door:
    """No gateway: everything goes to the engine at once and waits there for as long as it takes."""
    return FifoDoor(engine, float("inf"), lambda _engine, _request: True)


def fixed_concurrency(engine: Engine, wait_s: float, running_max: int) -> Door:
    return FifoDoor(engine, wait_s, lambda inside, _request: inside.running_count + inside.waiting_count < running_max)


def reserve_everything(engine: Engine, wait_s: float) -> Door:
    """The prompt and the whole ceiling of everybody inside must fit."""

    def may_start(inside: Engine, request: SimulatedRequest) -> bool:
        held = sum(other.prompt_tokens + other.ceiling for other in door.inside.values())
        return held + request.prompt_tokens + request.ceiling <= inside.profile.total_tokens

    door = FifoDoor(engine, wait_s, may_start)
    return door


def thresholds(engine: Engine, wait_s: float, *, used_max: float = 0.8, queue_max: int = 5) -> Door:
    """As llm-d: saturated from a KV use or a queue length on. It sees both as they are, without a snapshot's age."""
    return FifoDoor(
        engine,
        wait_s,
        lambda inside, _request: (
            inside.pool.used_tokens < used_max * inside.profile.total_tokens and inside.waiting_count < queue_max
        ),
    )
