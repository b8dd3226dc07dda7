"""What is counted of units: how they stand, and their starts. Served at /metrics of the process that starts them."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.states import Record, State, Unit

_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class Starts:
    """Implements keeper.Started."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._begun = Counter("pagegate_unit_starts", "Starts of engines.", ["model"], registry=registry)
        self._failed = Counter(
            "pagegate_unit_failures", "Starts that failed, and deaths.", ["model"], registry=registry
        )
        self._seconds = Histogram(
            "pagegate_unit_start_seconds",
            "From the start of an engine until it can be used.",
            ["model"],
            buckets=_SECONDS,
            registry=registry,
        )

    def began(self, unit: Unit) -> None:
        self._begun.labels(unit.model).inc()

    def succeeded(self, unit: Unit, seconds: float) -> None:
        self._seconds.labels(unit.model).observe(seconds)

    def failed(self, unit: Unit) -> None:
        self._failed.labels(unit.model).inc()


class UnitCollector(Collector):
    """Reads how units stand when scraped. records: those that this process knows of."""

    def __init__(self, records: Callable[[], Iterable[Record]]) -> None:
        self._records = records

    def collect(self) -> Iterator[Metric]:
        units = GaugeMetricFamily("pagegate_units", "Replicas and pairs by state.", labels=["model", "state"])
        counts = Tally((record.unit.model, record.state) for record in self._records())
        for model in sorted({model for model, _ in counts}):
            for state in State:
                units.add_metric([model, state.value], counts[model, state])
        yield units


class StartTimesCollector(Collector):
    """What has been learned of starts, read when scraped. Of a model's units the slowest is told."""

    def __init__(self, times: StartTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        learned = GaugeMetricFamily(
            "pagegate_unit_start_learned_seconds",
            "How long a start takes, by the sleep that it ends: median and 90th percentile.",
            labels=["model", "depth", "quantile"],
        )
        parts = GaugeMetricFamily(
            "pagegate_unit_start_part_seconds",
            "Parts of a start, as far as the engine tells them; they overlap. Medians.",
            labels=["model", "depth", "part"],
        )
        quantiles: dict[tuple[str, str, str], float] = {}
        medians: dict[tuple[str, str, str], float] = {}
        for unit, depth, estimate, by_part in self._times.estimates():
            for quantile, seconds in (("0.5", estimate.p50), ("0.9", estimate.p90)):
                key = (unit.model, depth.value, quantile)
                quantiles[key] = max(quantiles.get(key, 0.0), seconds)
            for part, seconds in by_part.items():
                key = (unit.model, depth.value, part)
                medians[key] = max(medians.get(key, 0.0), seconds)
        for family, found in ((learned, quantiles), (parts, medians)):
            for labels, seconds in found.items():
                family.add_metric(labels, seconds)
            yield family
