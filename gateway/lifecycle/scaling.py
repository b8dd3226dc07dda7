"""How many replicas should a model have? From the forecast of KV, waits and prefill, ahead of the time to start.

Pure: clocks and observations (demand.py) are handed in, nothing is started here. Used by scaler.py, which makes wishes
of the answer, and by the replay, so that its figures are the service's.

Everything is counted in replicas that the demand would keep full to what is planned with: the *need*. Growth follows
each need as it will be when a replica that is started now serves: its level, its slope, and as many deviations as it
has strayed by. What strays further waits in the queue. When more waits than patience allows, and what serves would not
have worked that off by itself before a start is over, the need of this moment counts, and beside it the work that is
late divided by the time in which it must be done. Shrinking follows what all but a hundredth of a while's needs was
within, with slack, so that a gap between two bursts stops nothing; and what running requests hold has room in what
stays.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from gateway.lifecycle.sides import Side
from tenancy.values import value

# The part of demand that was turned away is known only by what came: nothing is multiplied by more than this for it.
_UNSEEN_MOST = 4.0
# A wait is too long by at most one patience: who would wait longer is refused, and counted as turned away.
_BEHIND_MOST = 1.0
# A slope is believed as far as it exceeds so many of its own standard errors.
_SLOPE_ERRORS = 1.0
# Of the needs of a while so much may have been beyond what stays: the promise is kept for 99 of a hundred.
_BEYOND_SHARE = 0.01
# The slope may at most double the need within the time to start: beyond that it is a guess.
_SLOPE_MOST = 1.0
# Rounding: a need of 2.0000001 replicas is two.
_HAIR = 1e-6
# The largest needs of a while are kept in so many slots.
_SLOTS = 30


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """filled: the part of a pool that is planned with. prefilling, prefilling_unified: the part of a replica's time
    that prefill may take, where it does nothing else and where it stops streams. None of them has room for what comes
    unevenly: that is what deviations, of a need about its trend, are planned for. wait_share, backlog_share: the parts
    of the patience of those who wait beyond which a predicted wait, or the prefill of who waits, is too long. calm_s: a
    need counts for shrinking so long. slack: how much more than that need stays. settle_s: a change is followed by no
    shrinking for so long. trend_s: how far back a trend remembers, at least.
    """

    filled: float = 0.9
    prefilling: float = 0.9
    prefilling_unified: float = 0.6
    wait_share: float = 0.25
    backlog_share: float = 0.25
    calm_s: float = 300.0
    slack: float = 0.1
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
    the same of their prefills. start_s: in which a replica serves, nine times out of ten. waiting_tokens: of demand,
    what waits. patience_s: how long those who wait may, on the mean; 0 where nobody does.
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
    waiting_tokens: float = 0.0
    patience_s: float = 0.0


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
        self._trends: dict[str, Trend] = {}  # of each need, by its name
        self._lately = NeedsOfAWhile(self.rules.calm_s)
        self._changed_at: float | None = None
        self._standing: int | None = None  # what was wished last

    def decide(self, seen: Seen, bounds: Bounds, now: float) -> Wished:
        """How many replicas there should be. Called every few seconds; whoever is asked for the first time shrinks
        nothing before it has watched for `calm_s`.
        """
        needs = needed(self.side, seen, self.rules)
        need = max(needs.values())
        ahead, why = self._foreseen(needs, seen.start_s, now)
        late = pressed(seen, need, self.rules)
        if late > ahead:
            ahead, why = late, f"who waits is late and asks for {late:.1f}"
        self._lately.observe(need, now)
        standing = seen.awake if seen.awake is not None else self._standing
        standing = seen.serving if standing is None else standing
        wished = wish(
            Judged(
                standing=standing,
                ahead=ahead,
                lately=self._lately.enough(now),
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

    def _foreseen(self, needs: Mapping[str, float], start_s: float, now: float) -> tuple[float, str]:
        """The largest of the needs as they will be when a start is over, and which that is."""
        ahead = dict[str, float]()
        for name, need in needs.items():
            trend = self._trends.setdefault(name, Trend())
            trend.observe(need, now, fade_s=max(self.rules.trend_s, 2 * start_s))
            ahead[name] = trend.ahead(start_s, deviations=self.rules.deviations)
        most = max(ahead, key=ahead.__getitem__)
        why = f"{most} {needs[most]:.1f}"
        if ahead[most] > needs[most]:
            why = f"{why}, {ahead[most]:.1f} within the {start_s:.0f} s that a start takes"
        return ahead[most], why

    def _calm(self, now: float) -> bool:
        if self._lately.watched_s(now) < self.rules.calm_s:
            return False
        return self._changed_at is None or now - self._changed_at >= self.rules.settle_s


def needed(side: Side, seen: Seen, rules: ScalingRules) -> dict[str, float]:
    """Replicas that what flows in at this moment would keep as full as is planned with, by what asks for them.

    What was refused would run if there were room for it, in proportion to what runs. What waits is there once.
    """
    unseen = 1 / max(1 - seen.turned_away, 1 / _UNSEEN_MOST)
    tokens = (seen.demand_tokens - seen.waiting_tokens) * unseen + seen.waiting_tokens
    needs = {
        "the forecast KV demand fills": tokens / seen.replica_tokens / rules.filled if seen.replica_tokens else 0.0
    }
    if side is not Side.DECODE:
        share = rules.prefilling if side is Side.PREFILL else rules.prefilling_unified
        needs["prefill keeps busy"] = seen.prefill_share / share
    return needs


def pressed(seen: Seen, need: float, rules: ScalingRules) -> float:
    """Replicas for the need of this moment and for the work that waits too long, which is to be done within the time
    that its clients have or that a start takes. 0 while all that waits is worked off in time: before a replica that is
    started now serves, what serves beyond the need has done it.
    """
    over = max(seen.wait_share - rules.wait_share, seen.backlog_share - rules.backlog_share, 0.0)
    late_s = seen.serving * min(over, _BEHIND_MOST) * seen.patience_s
    beyond_pools = seen.demand_tokens > seen.serving * seen.replica_tokens
    if not (late_s or beyond_pools or seen.turned_away) or late_s <= (seen.serving - need) * seen.start_s:
        return 0.0
    return need + (late_s / max(seen.patience_s, seen.start_s) if late_s else 0.0)


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
    """A line through what was seen, faded exponentially, and how far that strayed from the line."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._watched_s = 0.0
        # Sums of weights, times, values and their products; times count back from the last observation.
        self._w = self._t = self._v = self._tt = self._tv = self._vv = 0.0

    def observe(self, seen: float, now: float, *, fade_s: float) -> None:
        """fade_s: what is so old counts a third."""
        if self._at is not None:
            passed = max(0.0, now - self._at)
            if passed == 0.0:
                return
            fade = math.exp(-passed / fade_s)
            self._watched_s += passed
            self._tt = fade * (self._tt - 2 * passed * self._t + passed * passed * self._w)
            self._tv = fade * (self._tv - passed * self._v)
            self._t = fade * (self._t - passed * self._w)
            self._w, self._v, self._vv = fade * self._w, fade * self._v, fade * self._vv
        self._at = now
        self._w += 1.0
        self._v += seen
        self._vv += seen * seen

    def ahead(self, seconds: float, *, deviations: float) -> float:
        """What is to be expected so many seconds after the last observation; 0 before the first.

        It looks no further ahead than it has looked back, and believes a slope as far as that exceeds its
        own error. Falling is not foreseen: whoever shrinks waits for it.
        """
        if not self._w:
            return 0.0
        mean = self._v / self._w
        spread = self._tt - self._t * self._t / self._w
        across = self._tv - self._t * mean
        slope = across / spread if spread > _HAIR else 0.0
        strayed = max(0.0, self._vv - self._v * mean - slope * across) / max(self._w - 2.0, 1.0)
        error = math.sqrt(strayed / spread) if spread > _HAIR else 0.0
        believed = max(0.0, slope - _SLOPE_ERRORS * error)
        level = max(0.0, mean - slope * self._t / self._w)
        rise = min(believed * min(seconds, self._watched_s), level * _SLOPE_MOST)
        return level + rise + deviations * math.sqrt(strayed)


class NeedsOfAWhile:
    """The needs of the last `while_s` seconds, of each thirtieth of that the largest."""

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

    def enough(self, now: float) -> float:
        """The least that all but a hundredth of them, summed, was within; 0 before the first observation."""
        since = now - self._while_s - self._while_s / _SLOTS
        lately = sorted((largest for at, largest in self._slots if at > since), reverse=True)
        beyond, allowed = 0.0, _BEYOND_SHARE * sum(lately)
        for count, (above, below) in enumerate(pairwise([*lately, 0.0]), 1):
            beyond += count * (above - below)
            if beyond >= allowed:
                return below + (beyond - allowed) / count
        return 0.0


class ModelScaling:
    """The sides of one model, and how many units (replicas, or pairs as one) its largest side asks for."""

    def __init__(self, rules: ScalingRules | None = None) -> None:
        self._rules = rules or ScalingRules()
        self._sides: dict[Side, SideScaling] = {}

    def decide(
        self, seen: Mapping[Side, Seen], bounds: Bounds | Mapping[Side, Bounds], now: float
    ) -> dict[Side, Wished]:
        """Each side apart: prefill halves may grow without decode halves. bounds: of each side, or of each its own."""
        for side in self._sides.keys() - seen.keys():
            del self._sides[side]  # the model is deployed in another shape
        wished = {}
        for side, one in seen.items():
            scaling = self._sides.setdefault(side, SideScaling(side, self._rules))
            wished[side] = scaling.decide(one, bounds if isinstance(bounds, Bounds) else bounds[side], now)
        return wished


def units(wished: Mapping[Side, Wished]) -> Wished:
    """Of pairs that start and stop as one, as many as the side that needs more of them."""
    return max(wished.values(), key=lambda each: each.replicas, default=Wished(0, "nothing is served"))
