"""What running requests will still take: the peak of future KV use, when room comes, and what a prefill delays.

Pure: what is known of each running request is handed in, lengths come as distributions from lengths.py. Used by the
decision whether a request may enter, and by the replay that judges it. All sizes are tokens; a request's own are
rounded up to pages by whoever calls. Horizons are decode steps: in one step every running request makes one token.

The peak is that of future use, not the sum of all ceilings (Past-Future, arXiv 2507.10150): short answers leave before
long ones have grown. `peak_tokens` is exact for known lengths. `UsageCurve` is for distributions: at each horizon t the
use is a sum of independent terms, (resident + t) if the request still runs then and nothing if not. Its quantile comes
from mean, variance and third cumulant (Cornish and Fisher: few requests, or one that is large and probably gone, make a
long tail), and is never more than all that may still run. That is a quantile bound, not sampling; the replay measures
how often the truth stays below it.
"""

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable
from statistics import NormalDist

from gateway.lengths import EDGES, LengthDistribution
from tenancy.values import value

# Steps ahead at which use is forecast, for outputs up to 32,768 tokens: an octave apart where a step is small beside
# any prompt, half an octave from 64 on. All are edges of the length tables, so that nothing is lost between the two.
HORIZONS: tuple[int, ...] = tuple(edge for edge in EDGES if edge <= 32768 and (edge >= 64 or edge & (edge - 1) == 0))

# A term whose probability is below this is left out of the upper bound: together they stay below the quantile's own.
_NEGLIGIBLE = 1e-4
# A request's terms are drawn anew when its output has grown by this part, or by this many tokens at least; they count
# that growth from the start, so that the curve is never behind.
_REFRESH_SHARE = 1 / 6
_REFRESH_TOKENS = 16
# However old a report is, no more than this part of capacity is kept back for it.
MARGIN_MOST = 0.1


def peak_tokens(running: Iterable[tuple[int, int]]) -> int:
    """The peak of future use of requests with known lengths, given as (resident now, still to produce).

    Longest first: when the k longest are all still there, each has grown by what the k-th had left.
    """
    peak = resident = 0
    for count, (now, left) in enumerate(sorted(running, key=lambda request: request[1], reverse=True), start=1):
        resident += now
        peak = max(peak, left * count + resident)
    return peak


def quantile_z(probability: float) -> float:
    """Standard deviations above the mean that a normal quantity stays below with `probability`."""
    return NormalDist().inv_cdf(probability)


def peak_z(overflow_share: float) -> float:
    """The z for which the peak passes the bound at most so often.

    Half of it at each horizon: the peak is the largest of all of them, and neighbours mostly pass together.
    """
    return quantile_z(1 - overflow_share / 2)


def margin_share(*, drift_share: float, age_s: float, z: float, most: float = MARGIN_MOST) -> float:
    """The part of capacity kept back because the report is old.

    drift_share: standard deviation of report minus ledger after one second, over capacity. Errors add up like a random
    walk, hence the root: a report twice as old widens the margin smoothly and never flips a switch.
    """
    return min(most, max(0.0, z * drift_share * math.sqrt(max(0.0, age_s))))


class Drift:
    """How far engine reports stray from the ledger, per root of a second; an exponential mean of squares."""

    def __init__(self, *, remembered: int = 64) -> None:
        self._share = 1.0 / remembered
        self._variance = 0.0
        self.deviation = 0.0

    def observe(self, difference: float, *, age_s: float) -> None:
        """difference: report minus ledger, over capacity. age_s: since the report before."""
        self._variance += self._share * (difference * difference / max(age_s, 0.05) - self._variance)
        self.deviation = math.sqrt(self._variance)


@value
class Columns:
    """One request's part of the curve: at each horizon, the first cumulants of what it takes, and the most."""

    mean: list[float]
    variance: list[float]
    skew: list[float]
    most: list[float]


class Terms:
    """What one request puts on a curve. Its columns are worked out when somebody asks for them: most requests come and
    go while everybody's utmost has room.

    resident: its private tokens, prompts and outputs, rounded up to pages. produced: outputs of each choice. now: what
    it is taken to have in use. utmost: it takes no more at any horizon. refresh_at: outputs at which terms are to be
    drawn anew.
    """

    __slots__ = (
        "_choices",
        "_columns",
        "_growth",
        "_left",
        "_lengths",
        "_produced",
        "_resident",
        "now",
        "refresh_at",
        "utmost",
    )

    def __init__(self, resident: int, produced: int, lengths: LengthDistribution, *, choices: int = 1) -> None:
        self._produced, self._lengths, self._choices = produced, lengths, choices
        growth = max(_REFRESH_TOKENS, int(produced * _REFRESH_SHARE))
        left = self._left = max(0, lengths.ceiling - produced)
        self._columns: Columns | None = None
        self.refresh_at = produced + growth
        self.now = resident + choices * growth
        self.utmost = self.now + choices * left

    def columns(self) -> Columns:
        """The choices of one request are taken to end together: the longest of them decides when its pages are free."""
        if self._columns is None:
            self._columns = self._drawn()
        return self._columns

    def _drawn(self) -> Columns:
        now, choices, left, lengths = self.now, self._choices, self._left, self._lengths
        runs = lengths.at_start if not self._produced and lengths.at_start else _runs(self._produced, lengths)
        sizes = [now + choices * min(steps, left) for steps in HORIZONS[: len(runs)]]
        spreads = [share * (1 - share) * size * size for share, size in zip(runs, sizes, strict=True)]
        skews = [spread * (1 - 2 * share) * size for spread, share, size in zip(spreads, runs, sizes, strict=True)]
        gone = [0.0] * (len(HORIZONS) - len(runs))
        return Columns(
            list(map(operator.mul, runs, sizes)) + gone,
            spreads + gone,
            skews + gone,
            [size if share > _NEGLIGIBLE else 0.0 for share, size in zip(runs, sizes, strict=True)] + gone,
        )


def _runs(produced: int, lengths: LengthDistribution) -> list[float]:
    """With which probability it still runs at each horizon, up to the first behind its ceiling."""
    left = max(0, lengths.ceiling - produced)
    last = min(bisect_left(HORIZONS, left), len(HORIZONS) - 1)
    # Whoever may reach its ceiling is largest just there, between two horizons: it counts whole at the later one.
    horizons = (*HORIZONS[:last], min(HORIZONS[last], max(0, left - 1)))
    runs = lengths.still_running(produced, horizons)
    runs[0] = 1.0
    if not produced:
        lengths.at_start[:] = runs
    return runs


def _bound(mean: float, variance: float, skew: float, most: float, z: float) -> float:
    if variance < 1.0:
        return min(mean, most)
    tail = max(0.0, skew) / variance * (z * z - 1) / 6
    return min(mean + z * math.sqrt(variance) + tail, most)


class UsageCurve:
    """Future KV use at one replica, at the quantile of z. Kept up as requests come, produce and go.

    Asking costs one pass over HORIZONS, and the terms of whoever has come or grown since it was asked last. Most
    answers need less: `utmost` is one sum that the peak never passes; `tight_with` looks at one horizon, the one that
    decided last, and never says more than the peak; `most_with` never says less.
    """

    def __init__(self, z: float) -> None:
        self._z = z
        self._parts: dict[str, Terms] = {}
        self._drawn: dict[str, Columns] = {}  # what is in the sums
        self._late: dict[str, None] = {}  # whose parts are not, or as they were; in their order
        self._tight = 0
        # What the forecast takes to be in use now; and all that everybody may ever take, if nobody left.
        self.resident = self.utmost = 0
        self._empty()

    def __len__(self) -> int:
        return len(self._parts)

    def _empty(self) -> None:
        self._mean = [0.0] * len(HORIZONS)
        self._variance = [0.0] * len(HORIZONS)
        self._skew = [0.0] * len(HORIZONS)
        self._most = [0.0] * len(HORIZONS)

    def add(self, request_id: str, part: Terms) -> None:
        assert request_id not in self._parts, "a request is on a curve once"
        self._parts[request_id] = part
        self._late[request_id] = None
        self.resident += part.now
        self.utmost += part.utmost

    def replace(self, request_id: str, part: Terms) -> None:
        """It has grown past its terms' `refresh_at`, or holds other tokens."""
        old = self._parts[request_id]
        self._parts[request_id] = part
        self._late[request_id] = None
        self.resident += part.now - old.now
        self.utmost += part.utmost - old.utmost

    def remove(self, request_id: str) -> None:
        """It has left. Idempotent."""
        part = self._parts.pop(request_id, None)
        if part is None:
            return
        self._late.pop(request_id, None)
        self.resident -= part.now
        self.utmost -= part.utmost
        drawn = self._drawn.pop(request_id, None)
        if drawn is not None and self._drawn:
            self._apply(drawn, operator.sub)
        elif drawn is not None:
            self._empty()  # what rounding left behind goes with the last request

    def _catch_up(self) -> None:
        """The sums hold everybody as they are now."""
        for request_id in self._late:
            before, now = self._drawn.get(request_id), self._parts[request_id].columns()
            self._drawn[request_id] = now
            if before is not None:
                self._apply(before, operator.sub)
            self._apply(now, operator.add)
        self._late.clear()

    def _apply(self, part: Columns, change: Callable[[float, float], float]) -> None:
        self._mean = list(map(change, self._mean, part.mean))
        self._variance = list(map(change, self._variance, part.variance))
        self._skew = list(map(change, self._skew, part.skew))
        self._most = list(map(change, self._most, part.most))

    def use(self, z: float) -> list[float]:
        """A bound at each horizon of what the running requests take there, at the quantile of z."""
        self._catch_up()
        columns = zip(self._mean, self._variance, self._skew, self._most, strict=True)
        return [_bound(mean, variance, skew, most, z) for mean, variance, skew, most in columns]

    def use_ahead(self, z: float) -> list[tuple[int, float]]:
        """As use, beside its horizons in steps, until nothing is left."""
        return [(steps, use) for steps, use in zip(HORIZONS, self.use(z), strict=True) if use > 0]

    def peak(self) -> float:
        return max(self.use(self._z))

    def most_with(self, new: Terms) -> float:
        """No quantile of the peak with `new` is above this; far cheaper than the quantile where there is room."""
        self._catch_up()
        return float(max(map(operator.add, self._most, new.columns().most)))

    def tight_with(self, new: Terms) -> float:
        """The peak with `new` is at least this: the use at the horizon that decided last."""
        self._catch_up()
        at, more = self._tight, new.columns()
        return _bound(
            self._mean[at] + more.mean[at],
            self._variance[at] + more.variance[at],
            self._skew[at] + more.skew[at],
            self._most[at] + more.most[at],
            self._z,
        )

    def peak_with(self, new: Terms) -> float:
        """The peak if a request entered now: at least what is in use and the request itself."""
        self._catch_up()
        z, columns = self._z, new.columns()
        use = [
            _bound(mean + more, variance + spread, skew + tail, most + extra, z)
            for mean, more, variance, spread, skew, tail, most, extra in zip(
                self._mean,
                columns.mean,
                self._variance,
                columns.variance,
                self._skew,
                columns.skew,
                self._most,
                columns.most,
                strict=True,
            )
        ]
        peak = max(use)
        self._tight = use.index(peak)
        return peak

    def steps_until(self, free: float, z: float, *, capacity: float) -> int | None:
        """Decode steps after which `free` tokens are free, with the probability of z; None if not within HORIZONS."""
        for steps, use in zip(HORIZONS, self.use(z), strict=True):
            if use + free <= capacity:
                return steps
        return None


def stall_budget_s(produced: int, length: int, *, first_at: float, step_s: float, between_s_max: float) -> float:
    """The moment until which a prefill may stop a stream before its mean time between tokens passes its limit.

    produced: tokens by now, at least one. length: tokens that it is taken to reach at least. first_at: the time of its
    first. A request that starts gets its prefill before anybody's next token, so this limit is kept by not starting.
    """
    gaps_left = max(1, length - produced)
    return first_at + between_s_max * (produced - 1 + gaps_left) - step_s * gaps_left


def attended_by(uncached: int, tokens: int) -> float:
    """Of a prompt of so many tokens the last `uncached` are prefilled: each of these times the context that it looks
    back on, on average.
    """
    return uncached * (tokens - uncached / 2)


class EngineSpeed:
    """Measured prefill and decode times of one replica, seeded by a guess and faded exponentially.

    A prefill's time is taken as tokens × a + attended × b, a least-squares fit, where `attended` is each token times
    the context it looks back on: a long prompt costs more than its share.
    """

    def __init__(self, *, prefill_tokens_s: float, step_s: float) -> None:
        assert prefill_tokens_s > 0, "a rate divides"
        assert step_s > 0, "a step takes time"
        self.prefill_token_s = 1.0 / prefill_tokens_s
        self.step_s = step_s
        self._per_token, self._per_attended = self.prefill_token_s, 0.0
        # Sums of squares and products behind the fit, in thousands of tokens and thousands of attended per token.
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0

    def prefill_s(self, tokens: int, attended: float) -> float:
        return max(0.0, tokens * self._per_token + attended * self._per_attended)

    def observe_prefill(self, tokens: int, attended: float, seconds: float) -> None:
        """A batch of so many tokens took so long."""
        if tokens <= 0 or seconds <= 0:
            return
        # A batch weighs by its size: what a short prompt costs is mostly overhead.
        self.prefill_token_s += min(1.0, tokens / 8192) / 16 * (seconds / tokens - self.prefill_token_s)
        x, z = tokens / 1e3, attended / 1e6
        fade = 1 - 1 / 256
        self._xx, self._xz, self._zz = self._xx * fade + x * x, self._xz * fade + x * z, self._zz * fade + z * z
        self._xy, self._zy = self._xy * fade + x * seconds, self._zy * fade + z * seconds
        determinant = self._xx * self._zz - self._xz * self._xz
        if determinant > 0.01 * self._xx * self._zz:
            per_attended = max(0.0, (self._xx * self._zy - self._xz * self._xy) / determinant)
        else:
            per_attended = self._per_attended * 1e6  # prompts of one size can't tell the two apart
        self._per_attended = per_attended / 1e6
        self._per_token = max(0.0, self._xy - per_attended * self._xz) / self._xx / 1e3

    def observe_step(self, seconds: float) -> None:
        if seconds > 0:
            self.step_s += (seconds - self.step_s) / 32
