"""What operators see of shared meters. Read when scraped, so that nothing is kept twice."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class SharedMeters(Protocol):
    """The part of tenancy.meters.redis.RedisMeters that is shown."""

    degraded: bool

    def undelivered(self) -> int:
        """How many settles wait for the server."""


class MetersCollector(Collector):
    def __init__(self, meters: SharedMeters) -> None:
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pagegate_limiter_degraded",
            "1 while the meters' server is away and limits are kept by each process at its share.",
            int(self._meters.degraded),
        )
        yield GaugeMetricFamily(
            "pagegate_limiter_undelivered_settles",
            "Settles that wait for the meters' server.",
            self._meters.undelivered(),
        )
