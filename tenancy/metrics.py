"""What operators see of the database. Read when scraped, so that nothing is kept twice."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class DatabaseCollector(Collector):
    def __init__(self, is_away: Callable[[], bool]) -> None:
        self._is_away = is_away

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pagegate_database_away",
            "1 while the database does not answer: allowances and the durable record carry what goes on.",
            int(self._is_away()),
        )
