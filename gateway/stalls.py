"""How long a replica's decoding may stop, so that no stream inside passes its limit between tokens.

Kept by gate.py, which asks whether a prefill would take longer. What the least of all can spare is remembered: each
token of a stream moves only its own.
"""

import math
from collections.abc import Mapping

from gateway.forecast import stall_budget_s
from gateway.need import Running

# What all can spare is worked out anew when a step takes this much longer or shorter.
_STEP_CHANGE_SHARE = 0.02


class Stalls:
    """running: who is inside, by request id; the gate's own, which changes. step_s: of the engine, as measured."""

    def __init__(self, running: Mapping[str, Running]) -> None:
        self._running = running
        self._least: tuple[float, Running | None, float] | None = None  # a moment, whose it is, at which step

    def until(self, step_s: float) -> float:
        """The moment until which decoding may stop."""
        known = self._least
        if known is None or abs(step_s - known[2]) > _STEP_CHANGE_SHARE * known[2]:
            least, whose = math.inf, None
            for running in self._running.values():
                own = _until(running, step_s)
                if own < least:
                    least, whose = own, running
            known = self._least = (least, whose, step_s)
        return known[0]

    def progressed(self, running: Running, step_s: float) -> None:
        """It has produced more: the least is another's, unless it was its own or is now."""
        known = self._least
        if known is None or running.need.between_s_max == math.inf:
            return
        if known[1] is running:
            self._least = None
            return
        own = _until(running, step_s)
        if own < known[0]:
            self._least = (own, running, known[2])

    def left(self, running: Running) -> None:
        if self._least is not None and self._least[1] is running:
            self._least = None


def _until(running: Running, step_s: float) -> float:
    if not running.produced or running.need.between_s_max == math.inf:
        return math.inf
    return stall_budget_s(
        running.produced,
        running.length,
        first_at=running.first_at,
        step_s=step_s,
        between_s_max=running.need.between_s_max,
    )
