"""Is a replica to be trusted with new requests? Probes, a breaker, a watchdog over progress, and draining. Pure.

model_fleet.py tells it what was seen and asks `verdict`. Only the engine's own faults count: connections, 5xx, silence;
never a request that was wrong, and never a client that left.
"""

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum

from backends.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable


class Standing(Enum):
    """TRIAL: one request at a time, to see whether it works again."""

    OPEN = "open"
    TRIAL = "trial"
    DOWN = "down"  # its probes fail
    TRIPPED = "tripped"  # requests failed there, one after another
    STALLED = "stalled"  # it answers probes, and nothing moves
    DRAINING = "draining"  # an operator wants it empty


# Codes of errors that are an engine's own: connections, silence, 5xx, broken answers.
ENGINE_FAULTS = frozenset(error.code for error in (EngineUnreachable, EngineTimeout, EngineRefused, EngineBroke))


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """probes_failed_max: of the last probes_seen. faults_max: of the last faults_seen ends; then it rests for
    rest_s, twice as long each time up to rest_s_max. stalled_s: without any movement while something runs.
    """

    probes_failed_max: int = 3
    probes_seen: int = 5
    faults_max: int = 5
    faults_seen: int = 8
    rest_s: float = 2.0
    rest_s_max: float = 60.0
    stalled_s: float = 30.0


class ReplicaHealth:
    """One replica's. Times are monotonic seconds."""

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._probes: deque[bool] = deque(maxlen=limits.probes_seen)
        self._up = False
        self._ends: deque[bool] = deque(maxlen=limits.faults_seen)  # True: the engine's fault
        self._rests_until = -math.inf
        self._rest_s = limits.rest_s
        self._tripped = False
        self._signs: tuple[float, ...] = ()
        self._moved_at = 0.0
        self._stalled = False
        self.draining = False

    def probed(self, *, answered: bool) -> None:
        """A probe has ended. The first answer brings it up; it goes down when enough of the last ones failed."""
        self._probes.append(answered)
        failed = self._probes.count(False)
        if answered and (not self._up and (failed == 0 or self._answers_again())):
            self._up = True
            self._probes.clear()
        elif failed >= self._limits.probes_failed_max:
            self._up = False

    def _answers_again(self) -> bool:
        """After trouble two answers in a row count: one may be a flap."""
        return len(self._probes) >= 2 and self._probes[-1] and self._probes[-2]

    @property
    def wavers(self) -> bool:
        """Has one of the last probes failed? Then it may have been started anew in between."""
        return False in self._probes

    def lost(self) -> None:
        """A connection to it has failed: down until it answers again."""
        self._up = False
        self._probes.clear()

    def ended(self, *, fault: bool, now: float) -> None:
        """A request has ended there: by the engine's fault, or well."""
        if not fault:
            self._ends.append(fault)
            self._tripped, self._rest_s = False, self._limits.rest_s
            return
        if self._tripped and now < self._rests_until:
            return  # it began before: a crash ends all that runs, and says so once for each
        self._ends.append(fault)
        if self._tripped or self._ends.count(True) >= self._limits.faults_max:
            self._rests_until = now + self._rest_s
            self._rest_s = min(self._limits.rest_s_max, 2 * self._rest_s)
            self._tripped = True
            self._ends.clear()

    def moved(self, signs: tuple[float, ...], now: float, *, busy: bool) -> None:
        """signs: whatever changes when work is done there. busy: something runs, by report or ledger."""
        if not busy or signs != self._signs:
            self._signs, self._moved_at, self._stalled = signs, now, False
        elif now - self._moved_at >= self._limits.stalled_s:
            self._stalled = True

    def still_s(self, now: float) -> float:
        """Seconds since it was last seen to work, or to have nothing to do."""
        return now - self._moved_at

    def verdict(self, now: float) -> Standing:
        if self.draining:
            return Standing.DRAINING
        if not self._up:
            return Standing.DOWN
        if self._stalled:
            return Standing.STALLED
        if self._tripped:
            return Standing.TRIAL if now >= self._rests_until else Standing.TRIPPED
        return Standing.OPEN
