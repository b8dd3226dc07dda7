"""What the scaler has decided, as autoscalers read it: KEDA from Prometheus, HPA through an adapter of metrics.

The process that decides for a model alone has its samples, so that a sum or a maximum over all processes is the same.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.lifecycle.scaler import Decision


class ScalingCollector(Collector):
    """Reads decisions when scraped. decisions: by model, kept up by the scaler."""

    def __init__(self, decisions: Mapping[str, Decision]) -> None:
        self._decisions = decisions

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "side"]
        wished = GaugeMetricFamily(
            "pagegate_wished_replicas",
            "Replicas, or halves of pairs, that forecast demand asks for.",
            labels=labels,
        )
        demand = GaugeMetricFamily(
            "pagegate_kv_demand_share", "Forecast KV demand, over the pools of what serves.", labels=labels
        )
        for model, decision in self._decisions.items():
            for side, number in decision.wished.items():
                wished.add_metric([model, side.value], number.replicas)
                seen = decision.seen[side]
                pools = seen.serving * seen.replica_tokens
                demand.add_metric([model, side.value], seen.demand_tokens / pools if pools else 0.0)
        yield wished
        yield demand
