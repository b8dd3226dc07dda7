"""How many engines a growing fleet has, by one policy or another: the service's, a fixed number, plain thresholds."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from gateway.door import Door
from gateway.lifecycle.demand import Demand, together
from gateway.lifecycle.scaling import Bounds, ScalingRules, SideScaling
from gateway.lifecycle.sides import Side


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a policy sees. serving, starting: engines. start_s: in which one serves, nine times out of ten."""

    door: Door
    serving: int
    starting: int
    start_s: float


class Numbers(Protocol):
    def wished(self, fleet: Fleet, now: float) -> tuple[int, str]:
        """How many engines there should be, and why."""


class ByDemand:
    """The service's own decision."""

    def __init__(self, bounds: Bounds, rules: ScalingRules | None = None) -> None:
        self._bounds = bounds
        self._scaling = SideScaling(Side.UNIFIED, rules)
        self._demand: Demand | None = None

    def wished(self, fleet: Fleet, now: float) -> tuple[int, str]:
        if self._demand is None:
            self._demand = Demand(fleet.door)
        part = self._demand.part(now)
        seen = together([part], awake=fleet.serving + fleet.starting, start_s=fleet.start_s)[Side.UNIFIED]
        wished = self._scaling.decide(seen, self._bounds, now)
        return wished.replicas, wished.why


class Fixed:
    """Always as many."""

    def __init__(self, number: int) -> None:
        self._number = number

    def wished(self, fleet: Fleet, now: float) -> tuple[int, str]:  # noqa: ARG002 - it looks at nothing
        return self._number, "fixed"


class ByThresholds:
    """As Kubernetes' HorizontalPodAutoscaler with two targets, by its documented rule: ceil(replicas × value / target)
    of whichever asks for more, nothing within a tenth of the target, looked at every 15 s, at most doubled each time,
    and the largest answer of five minutes when shrinking.
    """

    _EVERY_S = 15.0
    _TOLERANCE = 0.1
    _STABLE_S = 300.0

    def __init__(self, bounds: Bounds, *, used_share: float = 0.8, waiting_each: float = 4.0) -> None:
        self._bounds = bounds
        self._used_share = used_share
        self._waiting_each = waiting_each
        self._lately: deque[tuple[float, int]] = deque()
        self._asked_at = -math.inf
        self._answer = 0

    def wished(self, fleet: Fleet, now: float) -> tuple[int, str]:
        there = fleet.serving + fleet.starting
        if self._asked_at > -math.inf and now - self._asked_at < self._EVERY_S:
            return max(self._bounds.least, self._answer), "not asked again yet"
        self._asked_at = now
        gates = [site.gate for site in fleet.door.placing.sites.values() if site.open]
        pools = sum(gate.total_tokens for gate in gates)
        used = sum(gate.total_tokens - gate.free_tokens for gate in gates) / pools if pools else 0.0
        waiting = len(fleet.door.queue) / max(1, fleet.serving)
        times = max(used / self._used_share, waiting / self._waiting_each)
        wanted = there if abs(times - 1) <= self._TOLERANCE else math.ceil(fleet.serving * times)
        wanted = min(wanted, 2 * there, self._bounds.most)
        while self._lately and self._lately[0][0] <= now - self._STABLE_S:
            self._lately.popleft()
        self._lately.append((now, wanted))
        if wanted < there:
            wanted = min(there, max(number for _, number in self._lately))
        self._answer = max(self._bounds.least, wanted)
        return self._answer, f"{used:.0%} used, {waiting:.1f} waiting"
