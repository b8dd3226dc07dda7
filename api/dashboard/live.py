"""What the operator's live page shows: replicas and queues now, rates since the last look, and the last few minutes.

One sample serves every viewer of the same second, so that a wall of screens costs what one does. Figures are those of
GET /console/v1/capacity and /metrics; nothing is counted here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.console.operations import capacity_of
from api.console.together import capacity_together, held_together
from api.services import Services

SAMPLE_S: Final = 1.0
_KEPT: Final = 180
_CURVES_MAX: Final = 8
VIEWERS_MAX: Final = 20
_REFUSED: Final = frozenset({"refused", "evicted"})
_MISMATCHED: Final = "integrity_abort"
_COUNTED: Final = "pagegate_requests_total"


@dataclass(frozen=True, slots=True)
class Sample:
    """at_ns: Unix time. ended, refused, mismatched (stopped by a page tag): since the process began.

    used, held, total: KV pages of all replicas.
    """

    at_ns: int
    capacity: dict[str, Any]
    admitted: int
    ended: int
    refused: int
    mismatched: int
    live: int
    waiting: int
    used: int
    held: int
    total: int


@dataclass(frozen=True, slots=True)
class LiveView:
    """Rates are a second, since the sample before; None until there is one."""

    sample: Sample
    admitted_per_s: float | None
    ended_per_s: float | None
    refused_per_s: float | None
    chart: dict[str, Any]
    release: dict[str, Any]


class LiveFigures:
    def __init__(
        self,
        services: Services,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._services = services
        self._monotonic = monotonic
        self._clock = clock
        self._looking = asyncio.Lock()
        self._kept: deque[tuple[float, Sample]] = deque(maxlen=_KEPT)
        self.viewers = 0

    async def look(self) -> LiveView:
        """Of all workers together."""
        async with self._looking:
            now = self._monotonic()
            if not self._kept or now - self._kept[-1][0] >= SAMPLE_S * 0.9:
                self._kept.append((now, await self._sample()))
        return self._view()

    def _view(self) -> LiveView:
        at, sample = self._kept[-1]
        admitted_per_s = ended_per_s = refused_per_s = None
        if len(self._kept) > 1:
            before_at, before = self._kept[-2]
            seconds = at - before_at
            admitted_per_s = (sample.admitted - before.admitted) / seconds
            ended_per_s = (sample.ended - before.ended) / seconds
            refused_per_s = (sample.refused - before.refused) / seconds
        return LiveView(
            sample, admitted_per_s, ended_per_s, refused_per_s, self._chart(), release_chart(sample.capacity)
        )

    def _chart(self) -> dict[str, Any]:
        samples = [sample for _, sample in self._kept]
        return {
            "unit": "pages",
            "lines": True,
            "step_s": 1,
            "steps": [sample.at_ns // 1_000_000_000 for sample in samples],
            "bands": [
                {"name": "Total", "colour": "--c9", "values": [sample.total for sample in samples]},
                {"name": "Used", "colour": "--c1", "values": [sample.used for sample in samples]},
                {"name": "Held", "colour": "--c2", "values": [sample.held for sample in samples]},
            ],
        }

    async def _sample(self) -> Sample:
        here = figures_here(self._services)
        others = (await self._services.siblings.ask("figures")).values()
        capacity = capacity_together(here["capacity"], [other["capacity"] for other in others])
        counts = held_together([here["counts"], *(other["counts"] for other in others)])
        replicas = [replica for model in capacity["models"] for replica in model["replicas"]]
        reports = [replica["reported"] for replica in replicas if replica["reported"] is not None]
        return Sample(
            at_ns=self._clock(),
            capacity=capacity,
            admitted=sum(model["admitted"] for model in capacity["models"]),
            waiting=sum(model["waiting_for_pages"] for model in capacity["models"]),
            used=sum(report["used_pages"] for report in reports),
            held=sum(replica["held_pages"] for replica in replicas),
            total=sum(report["total_pages"] for report in reports),
            **counts,
        )


def figures_here(services: Services) -> dict[str, Any]:
    """What this worker brings to a sample."""
    ended = refused = mismatched = 0
    for metric in services.registry.restricted_registry([_COUNTED]).collect():
        for one in metric.samples:
            if one.name != _COUNTED:
                continue
            if one.labels["outcome"] in _REFUSED:
                refused += int(one.value)
            else:
                ended += int(one.value)
            if one.labels["outcome"] == _MISMATCHED:
                mismatched += int(one.value)
    counts = {"ended": ended, "refused": refused, "mismatched": mismatched, "live": len(services.holds.live)}
    return {"capacity": capacity_of(services), "counts": counts}


def release_chart(capacity: dict[str, Any]) -> dict[str, Any]:
    """When what is in use now comes free, by replica, as the forecast has it nine times of ten: tokens over seconds."""
    curves = {
        replica["id"]: replica["forecast"]["release"]
        for model in capacity["models"]
        for replica in model["replicas"]
        if replica["forecast"] is not None and replica["forecast"]["release"]
    }
    seconds = sorted({0.0, *(at for curve in curves.values() for at, _ in curve)})
    return {
        "unit": "tokens",
        "lines": True,
        "ahead": True,
        "step_s": 1,
        "steps": seconds,
        "bands": [
            {"name": name, "values": [_in_use(curve, at) for at in seconds]}
            for name, curve in list(curves.items())[:_CURVES_MAX]
        ],
    }


def _in_use(curve: Sequence[Sequence[float]], at: float) -> float:
    """The last known point before; what a curve has not told yet is as at its beginning."""
    return next((tokens for seconds, tokens in reversed(curve) if seconds <= at), curve[0][1])
