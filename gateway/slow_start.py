"""How much of its share a replica takes that has come back: little at first, all of it some seconds later. Pure.

model_fleet.py tells it which replicas answer; search.py bounds what those carry that are on their way back. A region
that was cut off comes back with cold connections and caches, while everybody's queue looks for the emptiest replica:
without a ramp it would get all of them at once. One replica that was away alone is no such case: its neighbours carry
on.
"""

from collections.abc import Mapping
from typing import Final

# Enough to see that it works.
_FIRST_SHARE: Final = 0.1


class SlowStart:
    """Of one model's replicas. seconds: from the return to the whole share; 0: at once. Times are monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answering: set[str] = set()
        self._lost: set[str] = set()
        self._returned_at: dict[str, float] = {}

    def look(self, answering: Mapping[str, str], now: float) -> None:
        """answering: those that answer now, and their regions."""
        self._lost |= self._answering - answering.keys()
        settled = {answering[name] for name in self._answering & answering.keys() if self.share(name, now) >= 1}
        for name in self._lost & answering.keys():
            self._lost.remove(name)
            if answering[name] not in settled:
                self._returned_at[name] = now
        for name in [name for name in self._returned_at if name not in answering or self.share(name, now) >= 1]:
            del self._returned_at[name]
        self._answering = set(answering)

    def forget(self, name: str) -> None:
        """It is served no more."""
        self._lost.discard(name)

    def share(self, name: str, now: float) -> float:
        """What it may carry of what others do, in 0..1."""
        returned_at = self._returned_at.get(name)
        if returned_at is None or self._seconds <= 0:
            return 1.0
        return min(1.0, _FIRST_SHARE + (1 - _FIRST_SHARE) * (now - returned_at) / self._seconds)
