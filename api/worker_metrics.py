"""What all workers of a gateway have counted, as one Prometheus text: every sample says whose it is.

Nothing is summed here: Prometheus sums, since a worker that is started again counts from nothing, which in a sum would
look as if all had.
Used by health.py and by what a worker answers its siblings.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LABEL: Final = "worker"


def counted(registry: CollectorRegistry) -> list[list[Any]]:
    """All of a registry as plain values: name, help and type of each metric, and its samples."""
    return [
        [
            metric.name,
            metric.documentation,
            metric.type,
            [[sample.name, sample.labels, sample.value] for sample in metric.samples],
        ]
        for metric in registry.collect()
    ]


def text_of(by_worker: Mapping[str, list[list[Any]]]) -> bytes:
    """One text of what several workers have `counted`, with a label that names the worker."""
    return generate_latest(_Together(by_worker))


class _Together(Collector):
    def __init__(self, by_worker: Mapping[str, list[list[Any]]]) -> None:
        self._by_worker = by_worker

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for worker, found in self._by_worker.items():
            for name, documentation, kind, samples in found:
                metric = metrics.setdefault(name, Metric(name, documentation, kind))
                for sample, labels, value in samples:
                    metric.add_sample(sample, {**labels, LABEL: worker}, value)
        yield from metrics.values()
