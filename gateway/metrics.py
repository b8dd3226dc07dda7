"""What the gateway counts: outcomes, times, tokens, money, and KV pages. One registry per process, served at /metrics.

Nothing is observed per chunk: times between tokens are observed once a request, as its mean.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet import Fleet
from gateway.hold import Holds
from gateway.request import Outcome, Settlement
from gateway.tallies import Count, Counts, Durations, Timings

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class GatewayMetrics:
    """Counters and histograms by model; label values are few by construction."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._models: dict[str, _OfModel] = {}  # the catalogue's
        self._requests = Counts("pagegate_requests", "Ended requests.", ["model", "outcome"], registry=registry)
        self._tokens = Counts("pagegate_tokens", "Tokens by class.", ["model", "kind"], registry=registry)
        self._cost = Counts("pagegate_cost_nano_usd", "Charged, in nano-USD.", ["model"], registry=registry)
        self._first = Timings(
            "pagegate_time_to_first_token_seconds",
            "Arrival to first token, streams only.",
            ["model"],
            bounds=_SECONDS,
            registry=registry,
        )
        self._between = Timings(
            "pagegate_inter_token_seconds",
            "Mean time between tokens, once a stream.",
            ["model"],
            bounds=_TOKEN_SECONDS,
            registry=registry,
        )
        self._queued = Timings(
            "pagegate_queue_seconds", "Time waited for pages.", ["model"], bounds=_SECONDS, registry=registry
        )
        self.usage_violations = Counter(
            "pagegate_engine_usage_violations", "Engine reports of more cached than prompt tokens.", registry=registry
        )
        self.aborts = Counter("pagegate_engine_aborts", "Engine calls stopped by the gateway.", registry=registry)
        self.aborts_failed = Counter(
            "pagegate_engine_aborts_failed",
            "Engine calls that could not be stopped by their id: their connections were closed instead.",
            registry=registry,
        )
        self._unbilled = Counter(
            "pagegate_unbilled_tokens",
            "Tokens that engines produced and nobody pays for: of requests that failed by our fault.",
            ["model"],
            registry=registry,
        )
        self._wasted_prefill = Counter(
            "pagegate_wasted_prefill_tokens",
            "Prompt tokens that a pair's prefill half computed for answers that never began.",
            ["model"],
            registry=registry,
        )
        self.live = Gauge("pagegate_live_requests", "Requests between admission and settlement.", registry=registry)

    def ended(
        self,
        model: str,
        settlement: Settlement,
        *,
        charged: bool,
        queued_s: float,
        first_s: float | None,
        between_s: float | None,
    ) -> None:
        """One request ended. Seconds; None where it never came to that."""
        usage, of_model = settlement.usage, self._of(model)
        of_model.outcomes[settlement.outcome].add()
        of_model.queued.observe(queued_s)
        of_model.prompt.add(usage.prompt)
        of_model.cached.add(usage.cached)
        of_model.completion.add(usage.completion)
        if usage.completion and not charged:
            self._unbilled.labels(model).inc(usage.completion)
        of_model.cost.add(settlement.cost_nano)
        if first_s is not None:
            of_model.first.observe(first_s)
        if between_s is not None:
            of_model.between.observe(between_s)

    def wasted_prefill(self, model: str, tokens: int) -> None:
        self._wasted_prefill.labels(model).inc(tokens)

    def refused(self, model: str, outcome: Outcome) -> None:
        self._of(model).outcomes[outcome].add()

    def _of(self, model: str) -> "_OfModel":
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel(
                outcomes={outcome: self._requests.of(model, outcome) for outcome in Outcome},
                prompt=self._tokens.of(model, "prompt"),
                cached=self._tokens.of(model, "cached"),
                completion=self._tokens.of(model, "completion"),
                cost=self._cost.of(model),
                queued=self._queued.of(model),
                first=self._first.of(model),
                between=self._between.of(model),
            )
        return found


@dataclass(frozen=True, slots=True)
class _OfModel:
    """One model's own counters, looked up once: finding them by label costs more than counting."""

    outcomes: Mapping[Outcome, Count]
    prompt: Count
    cached: Count
    completion: Count
    cost: Count
    queued: Durations
    first: Durations
    between: Durations


class CapacityCollector(Collector):
    """Reads fleet and holds when scraped, so that nothing is kept twice."""

    def __init__(self, fleet: Fleet, holds: Holds) -> None:
        self._fleet = fleet
        self._holds = holds

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "replica"]
        total = GaugeMetricFamily("pagegate_kv_pages_total", "KV pages of the replica.", labels=labels)
        used = GaugeMetricFamily("pagegate_kv_pages_used", "KV pages in use by the engine's report.", labels=labels)
        held = GaugeMetricFamily("pagegate_kv_pages_held", "KV pages promised to open requests.", labels=labels)
        up = GaugeMetricFamily("pagegate_replica_up", "1 if the replica's last report is known.", labels=labels)
        drift = GaugeMetricFamily(
            "kv_ledger_drift_tokens",
            "Tokens in use by the engine's report beyond the ledger; below 0: fewer.",
            labels=labels,
        )
        covered = GaugeMetricFamily(
            "pagegate_forecast_covered_share",
            "Of followed decisions, those whose true peak stayed below the forecast's quantile.",
            labels=["model"],
        )
        decisions = CounterMetricFamily(
            "pagegate_forecast_decisions", "Decisions that were followed to their end.", labels=["model"]
        )
        admitted = CounterMetricFamily("pagegate_admitted", "Requests let into an engine.", labels=["model"])
        elsewhere = CounterMetricFamily(
            "pagegate_admitted_elsewhere",
            "Of these, let into an engine of another region than the gateway's.",
            labels=["model", "region"],
        )
        away = GaugeMetricFamily(
            "pagegate_region_round_trip_seconds",
            "What a first token from another region is taken to need for the way.",
            labels=["model", "region"],
        )
        inside = CounterMetricFamily(
            "pagegate_admitted_but_engine_queued",
            "Requests that were let in and then waited in the engine's own queue.",
            labels=["model"],
        )
        kept = CounterMetricFamily(
            "pagegate_retries", "Requests that came again when they were told to.", labels=["model", "outcome"]
        )
        ghosts = GaugeMetricFamily(
            "pagegate_ghost_requests", "Requests that run in the engine and belong to nobody.", labels=labels
        )
        retractions = CounterMetricFamily(
            "pagegate_retractions", "Requests whose pages the engine took back while they ran.", labels=labels
        )
        doubted = GaugeMetricFamily(
            "pagegate_doubted_accounts",
            "Accounts whose answers outgrew the forecast lately, planned with more carefully.",
            labels=["model"],
        )
        standing = GaugeMetricFamily(
            "pagegate_replica_standing", "1 for what the replica is found to be.", labels=[*labels, "standing"]
        )
        waiting = GaugeMetricFamily("pagegate_queue_length", "Requests waiting for pages.", labels=["model"])
        for fleet in self._fleet.all():
            waiting.add_metric([fleet.model], len(fleet.room))
            coverage, waits = fleet.placing.coverage, fleet.door.waits
            covered.add_metric([fleet.model], coverage.share)
            decisions.add_metric([fleet.model], coverage.decisions)
            doubted.add_metric([fleet.model], len(fleet.placing.experience.doubt))
            admitted.add_metric([fleet.model], fleet.admitted)
            for region, requests in fleet.admitted_elsewhere.items():
                elsewhere.add_metric([fleet.model, region], requests)
            for region in {replica.region for replica in fleet.replicas} - {fleet.regions.home}:
                away.add_metric([fleet.model, region], fleet.regions.round_trip_s(region))
            inside.add_metric([fleet.model], sum(replica.queue.joined for replica in fleet.replicas))
            kept.add_metric([fleet.model, "admitted"], waits.retries_admitted)
            kept.add_metric([fleet.model, "refused"], waits.retries - waits.retries_admitted)
            for replica in fleet.engines():
                names = [fleet.model, replica.id]
                up.add_metric(names, 0 if replica.snapshot is None else 1)
                held.add_metric(names, replica.ledger.held_pages)
                ghosts.add_metric(names, replica.ghosts.unknown)
                retractions.add_metric(names, replica.retractions)
                standing.add_metric([*names, replica.health.verdict(time.monotonic()).value], 1)
                gate = fleet.gate(replica)
                if gate is not None:
                    drift.add_metric(names, gate.drift_tokens)
                if replica.snapshot is not None:
                    total.add_metric(names, replica.snapshot.total_pages)
                    used.add_metric(names, replica.snapshot.used_pages)
        slots = GaugeMetricFamily("pagegate_live_slots", "Concurrency slots held.", self._holds.meters.live_slots())
        money = GaugeMetricFamily("pagegate_held_nano_usd", "Money held ahead of use.", self._holds.credit.held_nano())
        yield from (
            total,
            used,
            held,
            up,
            drift,
            ghosts,
            retractions,
            doubted,
            standing,
            covered,
            decisions,
            admitted,
            elsewhere,
            away,
            inside,
            kept,
            waiting,
            slots,
            money,
        )
