"""How many replicas should a model have? From the forecast of KV, waits and prefill, ahead of the time to start.

Pure: clocks and observations (demand.py) are handed in, nothing is started here. Used by scaler.py, which makes wishes
of the answer, and by the replay, so that its figures are the service's.

Everything is counted in replicas that the demand would keep full to what is planned with: the *need*. Growth follows
the need as it will be when a replica that is started now serves: its level, its slope, and as many deviations as the
demand has strayed by. A wait or a backlog beyond its limit raises the need by as much as it is too long, at most to
twice what serves, for replicas that start already are the answer to it. Shrinking follows the largest need of a while,
with slack, so that a gap between two bursts stops nothing; and what running requests hold has room in what stays.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tenancy.values import value

# The part of demand that was turned away is known only by what came: nothing is multiplied by more than this for it.
_UNSEEN_MOST = 4.0
# A wait beyond its limit asks for at most so many times what serves.
_PRESSURE_MOST = 2.0
# The slope may at most double the need within the time to start: beyond that it is a guess.
_SLOPE_MOST = 1.0
# Rounding: a need of 2.0000001 replicas is two.
_HAIR = 1e-6
# The largest needs of a while are kept in so many slots.
_SLOTS = 30


class Side(StrEnum):
    """What a replica does: everything, or as half a pair one of both phases."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """filled: the part of a pool that is planned with. prefilling, prefilling_unified: the part of a replica's time
    that prefill may take, where it does nothing else and where it stops streams. wait_share, backlog_share: the parts
    of the patience of those who wait beyond which a predicted wait, or the prefill of who waits, says that there are
    too few replicas. calm_s: a need counts for shrinking so long. slack: how much more than that need stays. settle_s:
    a change is followed by no shrinking for so long. deviations: of the need about its trend, planned for. trend_s: how
    far back the trend remembers, at least.
    """

    filled: float = 0.75
    prefilling: float = 0.75
    prefilling_unified: float = 0.5
    wait_share: float = 0.25
    backlog_share: float = 0.25
    calm_s: float = 300.0
    slack: float = 0.15
    settle_s: float = 120.0
    deviations: float = 1.0
    trend_s: float = 120.0


@value
class Bounds:
    """How many replicas a model may have."""

    least: int
    most: int

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.most, "bounds are in order"


@value
class Seen:
    """One side of a model as it is now; sums are over its serving replicas.

    serving: replicas that take requests. awake: those and others that are wished awake; None where nobody knows, and
    what was wished last stands for it. replica_tokens: the pool of one, 0 if none is known.
    demand_tokens: the forecast peak of what runs, and what waits. held_tokens: what running requests hold now.
    prefill_share: seconds of prefill that are asked for in each second. turned_away: the part of the work asked for
    that was refused. wait_share: the wait predicted for a newcomer, over how long those who wait may; backlog_share:
    the same of their prefills. start_s: in which a replica serves, nine times out of ten.
    """

    serving: int
    awake: int | None
    replica_tokens: int
    demand_tokens: float
    held_tokens: float
    prefill_share: float
    turned_away: float
    wait_share: float
    backlog_share: float
    start_s: float


@value
class Wished:
    """replicas: how many there should be. why: in words, for the operator."""

    replicas: int
    why: str


class SideScaling:
    """What one side of one model was seen to need, and how many replicas that makes. One writer."""

    def __init__(self, side: Side, rules: ScalingRules | None = None) -> None:
        self.side = side
        self.rules = rules or ScalingRules()
        self._trend = Trend()
        self._largest = LargestOfAWhile(self.rules.calm_s)
        self._changed_at: float | None = None
        self._standing: int | None = None  # what was wished last

    def decide(self, seen: Seen, bounds: Bounds, now: float) -> Wished:
        """How many replicas there should be. Called every few seconds; whoever is asked for the first time shrinks
        nothing before it has watched for `calm_s`.
        """
        need, why = needed(self.side, seen, self.rules)
        self._trend.observe(need, now, fade_s=max(self.rules.trend_s, 2 * seen.start_s))
        ahead = max(need, self._trend.ahead(seen.start_s, deviations=self.rules.deviations))
        if ahead > need:
            why = f"{why}, {ahead:.1f} within the {seen.start_s:.0f} s that a start takes"
        self._largest.observe(need, now)
        standing = seen.awake if seen.awake is not None else self._standing
        standing = seen.serving if standing is None else standing
        wished = wish(
            Judged(
                standing=standing,
                ahead=ahead,
                lately=self._largest.value(now),
                holds=holds_need(seen),
                may_shrink=self._calm(now),
                why=why,
            ),
            bounds,
            slack=self.rules.slack,
        )
        if wished.replicas != standing:
            self._changed_at = now
        self._standing = wished.replicas
        return wished

    def _calm(self, now: float) -> bool:
        if self._largest.watched_s(now) < self.rules.calm_s:
            return False
        return self._changed_at is None or now - self._changed_at >= self.rules.settle_s


def needed(side: Side, seen: Seen, rules: ScalingRules) -> tuple[float, str]:
    """Replicas that the demand of this moment would keep as full as is planned with, and what asks for most of them."""
    unseen = 1 / max(1 - seen.turned_away, 1 / _UNSEEN_MOST)
    kv = seen.demand_tokens / seen.replica_tokens / rules.filled * unseen if seen.replica_tokens else 0.0
    needs = {"the forecast KV demand fills": kv}
    if side is not Side.DECODE:
        share = rules.prefilling if side is Side.PREFILL else rules.prefilling_unified
        needs["prefill keeps busy"] = seen.prefill_share / share
        needs["the prefill backlog asks for"] = _pressed(seen.serving, seen.backlog_share / rules.backlog_share)
    needs["the predicted wait asks for"] = _pressed(seen.serving, seen.wait_share / rules.wait_share)
    most = max(needs, key=needs.__getitem__)
    return needs[most], f"{most} {needs[most]:.1f}"


def _pressed(serving: int, times: float) -> float:
    """A limit is passed so many times over; below it this asks for nothing."""
    return serving * min(_PRESSURE_MOST, times) if times > 1 else 0.0


def holds_need(seen: Seen) -> int:
    """Replicas without which what runs has no room."""
    if seen.held_tokens <= 0:
        return 0
    return math.ceil(seen.held_tokens / seen.replica_tokens - _HAIR) if seen.replica_tokens else seen.serving


@value
class Judged:
    """standing: how many are wished, or there. ahead: the need when a start would be over. lately: the largest of a
    while. holds: replicas without which what runs has no room.
    """

    standing: int
    ahead: float
    lately: float
    holds: int
    may_shrink: bool
    why: str


def wish(judged: Judged, bounds: Bounds, *, slack: float) -> Wished:
    """Grow at once, shrink when it is calm, never below what is held or allowed. Grows with each need handed in."""
    wanted, why = judged.standing, f"{judged.why}: enough"
    up = math.ceil(judged.ahead - _HAIR)
    down = max(up, math.ceil(judged.lately * (1 + slack) - _HAIR))
    if up > judged.standing:
        wanted, why = up, judged.why
    elif judged.may_shrink and down < judged.standing:
        wanted, why = down, f"never more than {judged.lately:.1f} was needed lately"
    kept = min(judged.holds, judged.standing)
    if wanted < kept:
        wanted, why = kept, f"running requests hold {kept}"
    if wanted < bounds.least:
        return Wished(bounds.least, f"{why}; at least {bounds.least} are kept")
    if wanted > bounds.most:
        # What runs beyond the bound is let end: the bound is the operator's word.
        most = max(bounds.most, kept)
        return Wished(most, f"{why}; at most {bounds.most} are allowed")
    return Wished(wanted, why)


class Trend:
    """A line through what was seen, faded exponentially, and how far it strayed from that line."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._watched_s = 0.0
        # Sums of weights, times, values and their products; times count back from the last observation.
        self._w = self._t = self._v = self._tt = self._tv = 0.0
        self._strayed = 0.0

    def observe(self, seen: float, now: float, *, fade_s: float) -> None:
        """fade_s: what is so old counts a third."""
        if self._at is not None:
            passed = max(0.0, now - self._at)
            if passed == 0.0:
                return
            fade = math.exp(-passed / fade_s)
            self._watched_s += passed
            missed = seen - self.ahead(passed, deviations=0.0)
            self._strayed = fade * self._strayed + (1 - fade) * missed * missed
            self._tt = fade * (self._tt - 2 * passed * self._t + passed * passed * self._w)
            self._tv = fade * (self._tv - passed * self._v)
            self._t = fade * (self._t - passed * self._w)
            self._w, self._v = fade * self._w, fade * self._v
        self._at = now
        self._w += 1.0
        self._v += seen

    def ahead(self, seconds: float, *, deviations: float) -> float:
        """What is to be expected so many seconds after the last observation; 0 before the first.

        It looks no further ahead than it has looked back. Falling is not foreseen: whoever shrinks waits for it.
        """
        if not self._w:
            return 0.0
        mean = self._v / self._w
        spread = self._tt - self._t * self._t / self._w
        slope = (self._tv - self._t * mean) / spread if spread > _HAIR else 0.0
        level = max(0.0, mean - slope * self._t / self._w)
        rise = min(max(0.0, slope * min(seconds, self._watched_s)), level * _SLOPE_MOST)
        return level + rise + deviations * math.sqrt(self._strayed)


class LargestOfAWhile:
    """The largest value of the last `while_s` seconds, to a thirtieth of that."""

    def __init__(self, while_s: float) -> None:
        self._while_s = while_s
        self._slots: deque[tuple[float, float]] = deque()  # begun at, the largest since then
        self._since: float | None = None

    def observe(self, seen: float, now: float) -> None:
        if self._since is None:
            self._since = now
        if self._slots and now - self._slots[-1][0] < self._while_s / _SLOTS:
            self._slots[-1] = (self._slots[-1][0], max(seen, self._slots[-1][1]))
        else:
            self._slots.append((now, seen))
        while len(self._slots) > 1 and self._slots[1][0] <= now - self._while_s:
            self._slots.popleft()

    def watched_s(self, now: float) -> float:
        """Since the first observation."""
        return 0.0 if self._since is None else now - self._since

    def value(self, now: float) -> float:
        """0 before the first observation."""
        lately = [largest for at, largest in self._slots if at > now - self._while_s - self._while_s / _SLOTS]
        return max(lately, default=0.0)


class ModelScaling:
    """The sides of one model, and how many units (replicas, or pairs as one) its largest side asks for."""

    def __init__(self, rules: ScalingRules | None = None) -> None:
        self._rules = rules or ScalingRules()
        self._sides: dict[Side, SideScaling] = {}

    def decide(self, seen: Mapping[Side, Seen], bounds: Bounds, now: float) -> dict[Side, Wished]:
        """Each side apart: a workload of prefill halves may grow without one of decode halves."""
        for side in self._sides.keys() - seen.keys():
            del self._sides[side]  # the model is deployed in another shape
        wished = {}
        for side, one in seen.items():
            scaling = self._sides.setdefault(side, SideScaling(side, self._rules))
            wished[side] = scaling.decide(one, bounds, now)
        return wished


def units(wished: Mapping[Side, Wished]) -> Wished:
    """Of pairs that start and stop as one, as many as the side that needs more of them."""
    return max(wished.values(), key=lambda each: each.replicas, default=Wished(0, "nothing is served"))
