"""Counts and durations that cost an addition each, for what is counted of every request; the registry reads them when
it is scraped.

Used by metrics.py and by the outermost layer of `api`. prometheus_client's own take a lock and five calls to add one,
which threads need; here all counting is the event loop's.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """One counter; `add` is never given less than nothing."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int = 1) -> None:
        self.total += amount


class Durations:
    """One histogram. bounds: rising, in seconds; a duration belongs to the first that it does not pass."""

    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound as text, and how many did not pass it."""
        below, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            text = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the library has no annotation here
            buckets.append((text, float(below)))
        return buckets


class Counts(Collector):
    """A counter for each set of label values that was asked for. Their values are few."""

    def __init__(self, name: str, says: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._family = (name, says, labels)
        self._found: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def of(self, *values: str) -> Count:
        """The one with these label values: keep it, rather than ask for it each time."""
        return self._found.setdefault(values, Count())

    def describe(self) -> Iterator[Metric]:
        """So that the registry refuses a name that is taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        name, says, labels = self._family
        family = CounterMetricFamily(name, says, labels=labels)
        for values, count in self._found.items():
            family.add_metric(values, count.total)
        yield family


class Timings(Collector):
    """As Counts, of durations."""

    def __init__(
        self, name: str, says: str, labels: Sequence[str], *, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._family = (name, says, labels)
        self._bounds = bounds
        self._found: dict[tuple[str, ...], Durations] = {}
        registry.register(self)

    def of(self, *values: str) -> Durations:
        """The one with these label values."""
        return self._found.setdefault(values, Durations(self._bounds))

    def describe(self) -> Iterator[Metric]:
        """So that the registry refuses a name that is taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        name, says, labels = self._family
        family = HistogramMetricFamily(name, says, labels=labels)
        for values, durations in self._found.items():
            family.add_metric(values, durations.buckets(), durations.total_s)
        yield family
