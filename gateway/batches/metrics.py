"""What an operator sees of batches: how many lines wait, run and have ended. Read when scraped."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.batches.judging import Figures


class BatchCollector(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        yield GaugeMetricFamily(
            "pagegate_batches_open", "Batches of all processes that have not ended.", figures.open_batches
        )
        yield GaugeMetricFamily(
            "pagegate_batch_lines_undone", "Lines of all open batches that wait or run.", figures.undone
        )
        yield GaugeMetricFamily("pagegate_batch_lines_running", "Lines that run in this process.", figures.running)
        ended = CounterMetricFamily("pagegate_batch_lines_ended", "Lines that have ended here.", labels=["state"])
        for state, count in sorted(figures.ended.items()):
            ended.add_metric([state], count)
        yield ended
