"""What operators see of the database. Read when scraped, so that nothing is kept twice."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tenancy.database import Database


class DatabaseCollector(Collector):
    def __init__(self, database: Database) -> None:
        self._database = database

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pagegate_database_away",
            "1 while the database does not answer: allowances and the durable record carry what goes on.",
            int(self._database.away),
        )
