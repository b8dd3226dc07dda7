"""What operators see of shared pages. Read when scraped, so that nothing is kept twice."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.sharing.sharer import Sharer


class SharingCollector(Collector):
    def __init__(self, sharer: Sharer) -> None:
        self._sharer = sharer

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pagegate_pages_alone",
            "1 while the server of shared pages is away and this process plans with its share alone.",
            int(self._sharer.away),
        )
        yield CounterMetricFamily(
            "pagegate_engine_reports_heard",
            "Reports of engines that another process has asked for and told.",
            self._sharer.reports_heard,
        )
