"""Where a request may run, and where it starts soonest: regions, the round trips between them, and who goes elsewhere.

Pure. search.py asks `choose` which of a model's regions takes a request; api/deployed.py keeps one RegionMap a process
and polling.py tells it how long its probes took. A region is a name. Knows no accounts: what may run where comes with
the request.
"""

import math
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Final, Generic, TypeVar

from tenancy.values import value

Found = TypeVar("Found")

DEFAULT_REGION: Final = "default"
# Probes of a region that are looked back on. An engine's own work only ever adds to a round trip, so the shortest of
# the last few is the network's part, and it follows a path that has become longer within as many probes.
_PROBES_SEEN: Final = 16


def allows(regions: frozenset[str] | None, region: str) -> bool:
    """May a prompt that is bound to `regions` go there? None: it is bound to none."""
    return regions is None or region in regions


class RegionMap:
    """The regions as one gateway sees them. home: where it is itself. Round trips in seconds."""

    def __init__(self, home: str = DEFAULT_REGION) -> None:
        self.home = home
        self._told: dict[str, float] = {}
        self._seen: dict[str, deque[float]] = {}

    def tell(self, round_trips_s: Mapping[str, float]) -> None:
        """What the deployment file says of other regions' round trips from here; it goes before what is measured."""
        self._told = dict(round_trips_s)

    def probed(self, region: str, seconds: float) -> None:
        """An engine there has answered a probe after so long."""
        if region != self.home:
            self._seen.setdefault(region, deque(maxlen=_PROBES_SEEN)).append(seconds)

    def round_trip_s(self, region: str) -> float:
        """How much later a first token comes from there; 0 at home, and elsewhere before anything is known."""
        if region == self.home:
            return 0.0
        told = self._told.get(region)
        return min(self._seen.get(region, (0.0,))) if told is None else told


@value
class Start:
    """What one region offers. in_s: to the first token there, the round trip included; inf: nobody foresees it.

    now: it would enter there at once; otherwise that is when it is its turn there.
    """

    region: str
    away_s: float
    in_s: float
    now: bool


@value
class Choice(Generic[Found]):
    """found: where it enters. best: the soonest start that was foreseen, if any was. starts: all that were asked."""

    found: Found | None
    best: Start | None
    starts: tuple[Start, ...]

    def waits_in(self, regions: frozenset[str] | None) -> dict[str, float] | None:
        """Of a request that enters nowhere: where it waits, and the seconds to its first token there without the round
        trip. None: it may go anywhere and fits nowhere, so that nobody may overtake it.

        regions: that it is bound to.
        """
        if self.best is not None and any(start.now for start in self.starts):
            return {self.best.region: self.best.in_s - self.best.away_s}
        if regions is None:
            return None
        foreseen = {start.region: start.in_s - start.away_s for start in self.starts}
        return {region: foreseen.get(region, math.inf) for region in regions}


def choose(
    away_s: Mapping[str, float],
    ask: Callable[[str], tuple[Found | None, float]],
    *,
    own_s: Callable[[str], float],
    known: Container[str],
    turn_s: Mapping[str, float],
) -> Choice[Found]:
    """The region where a request has its first token soonest, the nearest where that is equal. So it goes elsewhere
    exactly if it would start later here than there, the round trip included; and it waits here if that is sooner.

    away_s: the round trip to each region that it may go to. ask: what a region's replicas say, and the seconds to its
    first token there; a region is not asked that can't be sooner. own_s: the least that these can be, where nothing of
    its prompt is known. turn_s: of regions where others wait that go before it: when its turn would be.
    """
    starts: list[Start] = []
    founds: dict[str, Found] = {}
    soonest_s = math.inf
    for region in sorted(away_s, key=away_s.__getitem__):
        far_s = away_s[region]
        if region in turn_s:
            starts.append(Start(region, far_s, far_s + turn_s[region], now=False))
            continue
        if soonest_s < math.inf and region not in known and soonest_s <= far_s + own_s(region):
            continue
        found, in_s = ask(region)
        starts.append(Start(region, far_s, far_s + in_s, now=found is not None))
        if found is not None:
            founds[region] = found
            soonest_s = min(soonest_s, far_s + in_s)
    best = min(starts, key=lambda start: (start.in_s, start.away_s), default=None)
    if best is None or best.in_s == math.inf:
        return Choice(None, None, tuple(starts))
    return Choice(founds.get(best.region), best, tuple(starts))
