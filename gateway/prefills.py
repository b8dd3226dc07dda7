"""The prefills under way at one replica: whose first token has not been seen, and how long they take together.

Kept by gate.py. Knows no clock and no measured speed: both are handed in.
"""

from collections.abc import Iterator

from gateway.forecast import EngineSpeed
from gateway.need import Need, Running


class Prefills:
    """tokens: uncached ones of all. Those who came first are first."""

    def __init__(self) -> None:
        self.tokens = 0
        self._attended = 0.0
        self._running: dict[str, Running] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def add(self, running: Running) -> None:
        self._running[running.need.id] = running
        self.tokens += running.need.uncached_tokens
        self._attended += running.need.attended

    def remove(self, request_id: str) -> bool:
        """It has its first token, or has left. Idempotent: True if it was here."""
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self.tokens -= running.need.uncached_tokens
        self._attended = self._attended - running.need.attended if self.tokens else 0.0
        return True

    def seconds(self, speed: EngineSpeed) -> float:
        """How long all of them take."""
        return speed.prefill_s(self.tokens, self._attended) if self.tokens else 0.0

    def seconds_with(self, need: Need, speed: EngineSpeed) -> float:
        """As `seconds`, with one more."""
        return speed.prefill_s(self.tokens + need.uncached_tokens, self._attended + need.attended)

    def unheard_until(self) -> float | None:
        """When the first of those should be over of which nothing can be heard before they are whole; None: of none."""
        return min((running.prefilled_by for running in self._running.values() if not running.need.heard), default=None)
