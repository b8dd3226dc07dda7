"""The time that this process had, for bounds that the service promises.

A machine that does other things, or stops for a second, adds to what a clock on the wall says, and not to this: a
thread of its own counts as it wakes up, or what was computed meanwhile if that is more (it may have kept the thread
asleep). What is waited for at other processes counts in full.
"""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_TICK_S = 0.01
# A thread that wakes up later than this after the last time had no core.
_GAP_S_MAX = 0.05


@dataclass(frozen=True)
class Mark:
    """A moment: seconds by the wall, that the thread has seen, and of CPU."""

    wall_s: float
    seen_s: float
    cpu_s: float


class OwnTime:
    """Counts while its context is open."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="own time", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def now(self) -> Mark:
        return Mark(time.monotonic(), self._seen_s, time.process_time())

    def since(self, began: Mark) -> float:
        """Seconds; up to a tick too few."""
        now = self.now()
        own_s = max(now.seen_s - began.seen_s, now.cpu_s - began.cpu_s)
        return min(own_s, now.wall_s - began.wall_s)

    def _count(self) -> None:
        last_s = time.monotonic()
        while not self._ended.wait(_TICK_S):
            now_s = time.monotonic()
            self._seen_s += min(now_s - last_s, _GAP_S_MAX)
            last_s = now_s
