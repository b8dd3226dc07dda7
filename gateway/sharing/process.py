"""A board inside one process: for tests of what all boards promise. Several processes need one that they share."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gateway.sharing.board import Beat, Claim, Grant, Report
from gateway.sharing.claims import granted

_HUNGER_S = 1.0


@dataclass(slots=True)
class _Replica:
    epoch: str = ""
    claims: dict[str, int] = field(default_factory=dict)
    hungry: dict[str, tuple[float, float]] = field(default_factory=dict)  # process → (service had, until when)
    poller: str = ""
    polled_until: float = 0.0
    running: dict[str, int] = field(default_factory=dict)  # process → its requests
    report: tuple[Report, float] | None = None  # and when it was told


class ProcessBoard:
    """Implements Board. lease_s: how long a process is believed alive after its last beat."""

    def __init__(self, *, lease_s: float = 3.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._leases: dict[str, float] = {}
        self._requests: dict[str, dict[str, str]] = {}
        self._served: dict[str, float] = {}

    async def claim(self, claim: Claim) -> Grant:
        now = self._clock()
        self._leases[claim.process] = now + self._lease_s
        replica = self._replica(claim.replica)
        replica.epoch = replica.epoch or claim.epoch
        others = sum(tokens for process, tokens in replica.claims.items() if process != claim.process)
        if replica.epoch != claim.epoch:
            return Grant(replica.epoch, 0, others)
        wanted, current = claim.wanted, replica.claims.get(claim.process, 0)
        replica.hungry.pop(claim.process, None)
        if claim.hunger is not None:
            replica.hungry[claim.process] = (claim.hunger, now + _HUNGER_S)
        mine = claim.hunger if claim.hunger is not None else float("inf")
        rivals = [had for process, (had, until) in replica.hungry.items() if process != claim.process and until > now]
        yields = any(had < mine for had in rivals)
        if yields:
            wanted = min(wanted, current)
        tokens = granted(claim.least, wanted, total=claim.total, others=others)
        replica.claims[claim.process] = tokens
        return Grant(replica.epoch, tokens, others, yields)

    async def restarted(self, replica: str, before: str, epoch: str) -> None:
        found = self._replica(replica)
        if found.epoch in {"", before}:
            found.epoch = epoch
            found.claims.clear()

    async def beat(self, process: str, running: Mapping[str, int]) -> Beat:
        now = self._clock()
        self._leases[process] = now + self._lease_s
        polls, others, hungry = set(), {}, set()
        for name, count in running.items():
            replica = self._replica(name)
            replica.running[process] = count
            others[name] = sum(replica.running.values()) - count
            if any(until > now for other, (_, until) in replica.hungry.items() if other != process):
                hungry.add(name)
            if replica.poller in {"", process} or replica.polled_until <= now:
                replica.poller, replica.polled_until = process, now + self._lease_s
                polls.add(name)
        dead = tuple(sorted(name for name, until in self._leases.items() if until <= now))
        return Beat(frozenset(polls), dead, others, frozenset(hungry))

    async def report(self, report: Report) -> None:
        self._replica(report.engine).report = report, self._clock()

    async def reports(self, engines: tuple[str, ...]) -> dict[str, Report]:
        now, told = self._clock(), {}
        for name in engines:
            found = self._replica(name).report
            if found is not None:
                report, told_at = found
                told[name] = replace(report, age_s=report.age_s + now - told_at)
        return told

    async def note_requests(self, process: str, came: dict[str, str], gone: tuple[str, ...]) -> None:
        known = self._requests.setdefault(process, {})
        known.update(came)
        for rid in gone:
            known.pop(rid, None)

    async def estate(self, process: str) -> dict[str, str]:
        return dict(self._requests.get(process, {}))

    async def bury(self, process: str, replicas: tuple[str, ...]) -> None:
        if self._leases.get(process, 0.0) > self._clock():
            return  # it lives after all
        await self.leave(process, replicas)

    async def served(self, process: str, seconds: dict[str, float]) -> dict[str, float]:
        del process
        for tenant, more in seconds.items():
            self._served[tenant] = self._served.get(tenant, 0.0) + more
        return {tenant: self._served[tenant] for tenant in seconds}

    async def leave(self, process: str, replicas: tuple[str, ...]) -> None:
        for name in replicas:
            self._replica(name).claims.pop(process, None)
            self._replica(name).running.pop(process, None)
        self._leases.pop(process, None)
        self._requests.pop(process, None)

    def _replica(self, name: str) -> _Replica:
        return self._replicas.setdefault(name, _Replica())
