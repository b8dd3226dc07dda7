"""What an operator must see: how far SQL is behind the durable record, how full and hurt that is, what no hold covered.

Read when scraped, so that nothing is kept twice. Made by the composition root.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.credit.protocol import Credit
from billing.metering import Metering
from billing.spool import Spool


class SpoolCollector(Collector):
    def __init__(self, spool: Spool, metering: Metering) -> None:
        self._spool = spool
        self._metering = metering

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "pagegate_spool_lag_records", "Ended requests that are not in SQL yet.", self._metering.lag_records()
        )
        yield GaugeMetricFamily("pagegate_spool_bytes", "Size of the durable record on disk.", self._spool.used_bytes)
        yield GaugeMetricFamily(
            "pagegate_spool_failed",
            "1 while the disk refuses records and nothing is admitted.",
            int(self._spool.failed),
        )
        yield GaugeMetricFamily(
            "pagegate_spool_damaged_stretches",
            "Stretches of the record that could not be read: raise an alarm above 0.",
            self._spool.damaged_stretches,
        )


class CreditCollector(Collector):
    def __init__(self, credit: Credit) -> None:
        self._credit = credit

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pagegate_over_hold_nano_usd",
            "Money charged beyond what was held for it: raise an alarm above 0.",
            self._credit.over_hold_nano,
        )
