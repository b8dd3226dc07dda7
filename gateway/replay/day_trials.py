"""A day of requests before a fleet that grows and shrinks, by policy: hours of engines beside promises kept.

Used by `pagegate replay --grow-to` and benchmarks. The same door, engines and start times for all policies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from gateway.lifecycle.scaling import Bounds
from gateway.replay.days import Day, arrange_days
from gateway.replay.doors import Promise
from gateway.replay.growing import GrowingFleet, Grown, Starts
from gateway.replay.numbers import ByDemand, ByThresholds, Fixed, Numbers
from gateway.replay.policies import LOW_CLIP_TOKENS
from gateway.replay.profiles import Profile
from gateway.replay.report import percentile
from gateway.replay.requests import Fate
from gateway.replay.traces import Load, TraceRow

DAY_POLICIES = ("demand", "fixed", "half", "thresholds")


@dataclass(frozen=True, slots=True)
class DayTrial:
    """load: of noon, over all engines. most: engines that there may be."""

    rows: list[TraceRow]
    load: Load
    profile: Profile
    promise: Promise
    most: int
    day: Day = field(default_factory=Day)
    starts: Starts = field(default_factory=Starts)


@dataclass(frozen=True, slots=True)
class DayReport:
    """unit_hours: of engines. good_share: of requests that kept the promise. largest: engines at once. changes: how
    often the number changed; turns: from growing to shrinking or back. Seconds; late: requests that were not good.
    """

    policy: str
    requests: int
    good_share: float
    late: int
    unit_hours: float
    unit_hours_per_good: float
    largest: int
    changes: int
    turns: int
    refused: int
    evicted: int
    first_p50_s: float
    first_p95_s: float
    first_p99_s: float
    between_p95_s: float


def run_day(name: str, trial: DayTrial) -> DayReport:
    """demand: the service's scaling. fixed: all engines, always. half: half of them. thresholds: plain utilisation.

    Raises ValueError for a name not in DAY_POLICIES.
    """
    return day_report(name, play_day(name, trial), trial.promise)


def play_day(name: str, trial: DayTrial) -> Grown:
    """As run_day, with every request's fate and every change of the number."""
    bounds, half = Bounds(1, trial.most), max(1, trial.most // 2)
    made: dict[str, tuple[Callable[[], Numbers], int]] = {
        "demand": (lambda: ByDemand(bounds), 1),
        "fixed": (lambda: Fixed(trial.most), trial.most),
        "half": (lambda: Fixed(half), half),
        "thresholds": (lambda: ByThresholds(bounds), 1),
    }
    if name not in made:
        raise ValueError(f"no policy {name!r}: one of {', '.join(DAY_POLICIES)}")
    make, first = made[name]
    profile = replace(trial.profile, clip_tokens=LOW_CLIP_TOKENS)
    fleet = GrowingFleet(profile, trial.promise, make(), first=first, starts=trial.starts)
    return fleet.play(arrange_days(trial.rows, trial.load, profile, trial.day))


def day_report(policy: str, grown: Grown, promise: Promise) -> DayReport:
    requests = grown.requests
    good = sum(promise.kept_by(request) for request in requests)
    first = [request.first_s for request in requests if request.first_s is not None]
    between = [request.between_s for request in requests if request.between_s is not None]
    numbers = [number for _, number, _ in grown.wished]
    ups = [later > earlier for earlier, later in pairwise(numbers)]
    return DayReport(
        policy=policy,
        requests=len(requests),
        good_share=good / max(1, len(requests)),
        late=len(requests) - good,
        unit_hours=grown.unit_hours,
        unit_hours_per_good=grown.unit_hours / max(1, good),
        largest=_largest(grown),
        changes=len(numbers),
        turns=sum(earlier != later for earlier, later in pairwise(ups)),
        refused=sum(request.fate is Fate.REFUSED for request in requests),
        evicted=sum(request.fate is Fate.EVICTED for request in requests),
        first_p50_s=percentile(first, 0.5),
        first_p95_s=percentile(first, 0.95),
        first_p99_s=percentile(first, 0.99),
        between_p95_s=percentile(between, 0.95),
    )


def _largest(grown: Grown) -> int:
    """Engines at once, those that start or drain included."""
    ends = [(unit.asked_at, 1) for unit in grown.units]
    ends += [(unit.gone_at, -1) for unit in grown.units if unit.gone_at is not None]
    largest = there = 0
    for _, change in sorted(ends):
        there += change
        largest = max(largest, there)
    return largest
