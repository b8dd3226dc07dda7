"""What is counted of units: how they stand, and their starts. Served at /metrics of the process that starts them."""

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
