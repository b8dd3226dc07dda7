"""How long outputs turn out to be: distributions learned online from requests that have ended.

forecast.py turns them into pages and seconds; whoever settles a request reports its length here. A length is what the
request had produced when it left the engine, for whatever reason: pages are held until then and no longer. Knows no
clock, engine or prompt.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tenancy.values import value

# 1, 2, 3, 4, 6, 8, 12 … 196,608: two buckets an octave, so that a length is known to a quarter and a table stays small.
EDGES: tuple[int, ...] = (0, 1, *(step for octave in range(17) for step in (2 << octave, 3 << octave)))

# A 99 % quantile means little below this many lengths; until then the ceiling keeps part of the weight.
_ENOUGH = 64.0
# A tenant's own history counts fully from here; before, what the model's other tenants do fills the rest.
_ENOUGH_OF_ONE_TENANT = 256.0
# From so many lengths on a median is believed; before, an answer is guessed this long. The ceiling, the safe guess
# for pages, would make waits look endless, and refusing somebody needs evidence.
_ENOUGH_FOR_A_MEDIAN = 16.0
_GUESS = 256
# Old lengths fade: a weight halves about every 700 lengths of the same key.
_DECAY = 0.999
_WEIGHT_MAX = 1e12
# A table is made anew when the history behind it has grown by this part, so that reading stays cheap.
_REFRESH_SHARE = 0.03
# Below this nothing of the history is left: the request has outlived what was seen.
_OUTLIVED = 1e-3
# Ceilings whose distribution is kept with a table: clients mostly ask for the same few.
_CEILINGS_KEPT = 32


@value
class LengthDistribution:
    """P(L > x) at EDGES, straight lines between them; nothing is longer than `ceiling`.

    at_start: what forecast.py reads of it for requests that have produced nothing, once it has. quantiles: those that
    were asked for, a few.
    """

    survival: tuple[float, ...]
    ceiling: int
    at_start: list[float] = field(default_factory=list, compare=False, repr=False)
    quantiles: dict[float, int] = field(default_factory=dict, compare=False, repr=False)

    def longer_than(self, length: float) -> float:
        """P(L > length)."""
        if length >= self.ceiling:
            return 0.0
        index = bisect_right(EDGES, length) - 1
        if index >= len(EDGES) - 1:
            return 0.0
        low, high = EDGES[index], EDGES[index + 1]
        at_low = self.survival[index]
        return at_low + (self.survival[index + 1] - at_low) * (length - low) / (high - low)

    def still_running(self, produced: int, steps: Sequence[int]) -> list[float]:
        """P(L > produced + s | L > produced) at each of the steps, which rise: does it run after s further tokens?"""
        alive = self.longer_than(produced)
        if alive < _OUTLIVED:
            # It outlived its history: what has lasted this long is taken to last as long again, up to the ceiling.
            end = min(2 * produced, self.ceiling)
            return [1.0 if produced + more < end else 0.0 for more in steps]
        # As longer_than, walking along the table once instead of searching it for each step.
        survival, last, index, shares = self.survival, len(EDGES) - 1, 0, []
        for more in steps:
            length = produced + more
            if length >= self.ceiling:
                break
            while index < last and EDGES[index + 1] <= length:
                index += 1
            if index == last:
                break
            low, at_low = EDGES[index], survival[index]
            at = at_low + (survival[index + 1] - at_low) * (length - low) / (EDGES[index + 1] - low)
            shares.append(at / alive)
        shares.extend([0.0] * (len(steps) - len(shares)))
        return shares

    def quantile(self, share: float) -> int:
        """The length that `share` of requests don't pass."""
        found = self.quantiles.get(share)
        if found is None:
            found = self.quantiles[share] = self._quantile(share)
        return found

    def _quantile(self, share: float) -> int:
        left = 1.0 - share
        index = bisect_left(self.survival, -left, key=lambda survival: -survival)
        if index == 0:
            return 1
        if index >= len(EDGES):
            return self.ceiling
        low, high = EDGES[index - 1], EDGES[index]
        at_low, at_high = self.survival[index - 1], self.survival[index]
        part = (at_low - left) / (at_low - at_high) if at_low > at_high else 1.0
        return max(1, min(self.ceiling, math.ceil(low + part * (high - low))))


def always(length: int) -> LengthDistribution:
    """The distribution of a length that is known: the prior (everything reaches its ceiling), and an oracle's view."""
    return LengthDistribution((1.0,) * len(EDGES), length)


def expected_about(length: int, *, ceiling: int) -> LengthDistribution:
    """A guess in place of history: it reaches about `length` and then ends soon, at most at its ceiling."""
    return LengthDistribution(tuple(1.0 if edge <= length else 0.0 for edge in EDGES), ceiling)


@lru_cache(4096)
def doubted(lengths: LengthDistribution, share: float) -> LengthDistribution:
    """As `lengths`, but with a probability of `share` it reaches its ceiling. The same one for the same arguments."""
    survival = tuple(share + (1 - share) * each for each in lengths.survival)
    return LengthDistribution(survival, lengths.ceiling)


class LengthHistogram:
    """Decayed counts of lengths in geometric buckets. Bucket i holds EDGES[i] < length <= EDGES[i + 1]."""

    def __init__(self) -> None:
        self._counts = [0.0] * (len(EDGES) - 1)
        self._unit = 1.0  # the weight of the next length; growing it fades all earlier ones at once
        self._sum = 0.0
        self._seen = 0

    @property
    def weight(self) -> float:
        """The lengths behind it, faded ones in part."""
        return self._sum / self._unit

    @property
    def seen(self) -> int:
        return self._seen

    def add(self, length: int) -> None:
        index = min(bisect_left(EDGES, max(1, length)) - 1, len(self._counts) - 1)
        self._unit /= _DECAY
        self._counts[index] += self._unit
        self._sum += self._unit
        self._seen += 1
        if self._unit > _WEIGHT_MAX:
            self._counts = [count / self._unit for count in self._counts]
            self._sum /= self._unit
            self._unit = 1.0

    def survival(self) -> list[float]:
        """P(L > x) at each of EDGES."""
        assert self._sum > 0, "an empty history has no distribution"
        left, table = self._sum, []
        for count in (*self._counts, 0.0):
            table.append(max(0.0, left / self._sum))
            left -= count
        return table


class LengthKey(NamedTuple):
    """What outputs are told apart by. ceiling_bucket: `bucket_of(ceiling)`, for a small cap makes short answers.

    A tuple, because it is hashed a dozen times a request.
    """

    model: str
    tenant: str
    endpoint: str
    ceiling_bucket: int


def bucket_of(ceiling: int) -> int:
    return bisect_left(EDGES, ceiling)


@dataclass(slots=True)
class _Table:
    """A key's blended survival and median, and how much its model had seen when they were made.

    by_ceiling: the distributions that were asked for.
    """

    survival: tuple[float, ...]
    median: int
    seen: int
    by_ceiling: dict[int, LengthDistribution] = field(default_factory=dict)

    def distribution(self, ceiling: int) -> LengthDistribution:
        found = self.by_ceiling.get(ceiling)
        if found is None:
            if len(self.by_ceiling) >= _CEILINGS_KEPT:
                self.by_ceiling.clear()
            found = self.by_ceiling[ceiling] = LengthDistribution(self.survival, ceiling)
        return found


class OutputLengths:
    """The learned lengths of all keys. Bounded: the keys not used for longest are forgotten.

    A key without enough history leans on the model's whole history, and that one on the ceiling.
    """

    def __init__(self, *, keys_max: int = 4096) -> None:
        assert keys_max >= 2, "a tenant's key and its model's must fit"
        self._keys_max = keys_max
        self._histograms: OrderedDict[LengthKey, LengthHistogram] = OrderedDict()
        self._tables: OrderedDict[LengthKey, _Table] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histograms)

    def observe(self, key: LengthKey, length: int) -> None:
        """A request has left its engine after producing `length` tokens."""
        if length < 1:
            return  # refused, or gone before its first token: it says nothing about lengths
        for of in (key, _model_wide(key)):
            histogram = self._histograms.get(of)
            if histogram is None:
                histogram = self._histograms[of] = LengthHistogram()
            histogram.add(length)
            self._histograms.move_to_end(of)
        while len(self._histograms) > self._keys_max:
            self._histograms.popitem(last=False)

    def distribution(self, key: LengthKey, *, ceiling: int) -> LengthDistribution:
        """What is believed of a request that starts now."""
        return self._table(key).distribution(ceiling)

    def has_history(self, key: LengthKey) -> bool:
        """Does the model's history replace the prior altogether?"""
        model = self._histograms.get(_model_wide(key))
        return model is not None and model.weight >= _ENOUGH

    def typical(self, key: LengthKey, *, ceiling: int) -> int:
        """The median, to predict waits by; where there is no history, a guess rather than the ceiling."""
        model = self._histograms.get(_model_wide(key))
        if model is None or model.weight < _ENOUGH_FOR_A_MEDIAN:
            return min(ceiling, _GUESS)
        return min(ceiling, self._table(key).median)

    def _table(self, key: LengthKey) -> _Table:
        model = self._histograms.get(_model_wide(key))
        seen = model.seen if model is not None else 0
        table = self._tables.get(key)
        if table is None or seen - table.seen > _REFRESH_SHARE * min(table.seen, 1000):
            survival = self._blend(key)
            table = self._tables[key] = _Table(survival, LengthDistribution(survival, EDGES[-1]).quantile(0.5), seen)
            self._tables.move_to_end(key)
            if len(self._tables) > self._keys_max:
                self._tables.popitem(last=False)
        return table

    def _blend(self, key: LengthKey) -> tuple[float, ...]:
        survival = [1.0] * len(EDGES)  # the prior: it reaches its ceiling, where every distribution ends
        for of, enough in ((_model_wide(key), _ENOUGH), (key, _ENOUGH_OF_ONE_TENANT)):
            histogram = self._histograms.get(of)
            if histogram is not None:
                own = min(1.0, histogram.weight / enough)
                mine = histogram.survival()
                survival = [own * here + (1 - own) * there for here, there in zip(mine, survival, strict=True)]
        return tuple(survival)


@lru_cache(4096)
def _model_wide(key: LengthKey) -> LengthKey:
    return LengthKey(key.model, "", "", 0)
