"""What the engine tells about itself: live load, metrics, arguments, in SGLang's words. surface.py serves it.

Everything is read from the worker's latest report, so asking never waits for a step.
"""

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.local.engine import TokenEvent
from backends.local.intake import Limits
from backends.local.settings import EngineSettings, Role
from backends.local.worker import Report, TagCounts
from backends.page_tags import ACTIVE_METRIC

Json = dict[str, Any]
VERSION = "pagegate-local-1"
# What SGLang's arguments are by choice and this engine's are by construction.
_FIXED: Json = {
    "enable_metrics": True,
    "enable_cache_report": True,
    "dp_size": 1,
    "quantization": None,
    "quantization_param_path": None,
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
}

FIRST_TOKEN_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
GAP_SECONDS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 3.2)


@dataclass(frozen=True, slots=True)
class Identity:
    """What stays the same while the process lives."""

    settings: EngineSettings
    limits: Limits
    kv_cache_dtype: str
    kv_cache_bytes: int
    """Of the whole pool, scales counted."""
    started_at: int

    @property
    def name(self) -> str:
        return self.settings.served_model_name

    def pool_tokens(self, report: Report) -> int:
        """0 while its memory is given up."""
        return 0 if report.released else self.limits.pool_tokens


def unreported(live: Sized, report: Report) -> int:
    """How many requests came in after the report was made: they wait, too."""
    return max(0, len(live) - report.running - report.waiting - report.pair.total)


def loads(identity: Identity, report: Report, live: Sized) -> Json:
    """`GET /v1/loads`."""
    settings, total = identity.settings, identity.pool_tokens(report)
    used = report.used_pages * settings.page_size
    pair = report.pair
    # As SGLang counts: whoever waits for the other half of its pair waits, whoever's pages are being sent runs.
    waiting = report.waiting + unreported(live, report) + pair.bootstrap + pair.transfer
    entry = {
        "timestamp": report.taken_at,
        "dp_rank": 0,
        "num_running_reqs": report.running + pair.inflight,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": report.waiting_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": total,
        "max_running_requests": settings.max_running_requests,
        "token_usage": round(used / max(1, total), 4),
        "gen_throughput": round(report.tokens_per_second, 2),
        "cache_hit_rate": round(report.totals.cached_tokens / max(1, report.totals.prompt_tokens), 4),
        "utilization": round(used / max(1, total), 4),
        "total_prefill_uncached_tokens": report.totals.prompt_tokens - report.totals.cached_tokens,
        "memory": {
            "weight_gb": round(report.weight_bytes / 2**30, 3),
            "kv_cache_gb": 0.0 if report.released else round(identity.kv_cache_bytes / 2**30, 3),
            "graph_gb": 0.0,
            "token_capacity": total,
        },
        "disaggregation": {
            "mode": settings.role.value,
            "prefill_bootstrap_queue_reqs": pair.bootstrap,
            "prefill_inflight_queue_reqs": pair.inflight,
            "decode_prealloc_queue_reqs": pair.prealloc,
            "decode_transfer_queue_reqs": pair.transfer,
            "decode_retracted_queue_reqs": report.retracted_waiting if settings.role is Role.DECODE else 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {
            "waiting": waiting - report.retracted_waiting,
            "unplaced": report.unplaced,
            "grammar": 0,
            "paused": 0,
            "retracted": report.retracted_waiting,
            "prealloc_ready": 0,
        },
    }
    taken_at = dt.datetime.fromtimestamp(report.taken_at, tz=dt.UTC)
    return {
        "timestamp": taken_at.isoformat(),
        "version": VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [entry],
    }


def server_info(identity: Identity, report: Report, start_seconds: Mapping[str, float]) -> Json:
    """start_seconds: of the latest start or resume, by part."""
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in asdict(identity.settings).items()
    }
    return (
        _FIXED
        | settings
        | {
            "tokenizer_path": settings["model_path"],
            "context_length": identity.limits.context_tokens,
            "max_total_num_tokens": identity.pool_tokens(report),
            "kv_cache_dtype": identity.kv_cache_dtype,
            "device": "cpu",
            "version": VERSION,
            "epoch": report.epoch,
            "memory_released": report.released,
            "start_seconds": {name: round(seconds, 3) for name, seconds in start_seconds.items()},
            "disaggregation_mode": identity.settings.role.value,
            "page_tags_counts": asdict(report.tags),
        }
    )


def model_info(identity: Identity) -> Json:
    path = str(identity.settings.model_path)
    return {"model_path": path, "tokenizer_path": path, "is_generation": True, "served_model_name": identity.name}


def models(identity: Identity) -> Json:
    model = {
        "id": identity.name,
        "object": "model",
        "created": identity.started_at,
        "owned_by": "sglang",
        "root": identity.name,
        "parent": None,
        "max_model_len": identity.limits.context_tokens,
    }
    return {"object": "list", "data": [model]}


class EngineMetrics(Collector):
    """`GET /metrics`, with SGLang's names."""

    def __init__(self, identity: Identity, report: Callable[[], Report], live: Sized) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no annotation here
        self._identity = identity
        self._report = report
        self._live = live
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first_token = self._histogram("time_to_first_token", "from arrival to first token", FIRST_TOKEN_SECONDS)
        self._gap = self._histogram("inter_token_latency", "from one token to the next", GAP_SECONDS)

    def observe(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.first_token_seconds is not None:
                self._first_token.observe(event.first_token_seconds)
            if event.gap_seconds is not None:
                self._gap.observe(event.gap_seconds)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        report, settings = self._report(), self._identity.settings
        total = self._identity.pool_tokens(report)
        used = report.used_pages * settings.page_size
        evictable = report.evictable_pages * settings.page_size
        gauges = {
            "num_running_reqs": ("running requests", report.running),
            "num_queue_reqs": ("requests in the waiting queue", report.waiting + unreported(self._live, report)),
            "num_retracted_reqs": ("retracted requests that wait", report.retracted_waiting),
            "token_usage": ("share of the pool in use", used / max(1, total)),
            "kv_available_tokens": ("tokens of free pages", total - used - evictable),
            "kv_evictable_tokens": ("tokens of pages that only the prefix cache holds", evictable),
            "kv_used_tokens": ("tokens of pages in use", used),
            "max_total_num_tokens": ("tokens of the whole pool", total),
            "num_pages": ("pages of the whole pool", total // settings.page_size),
            "page_size": ("tokens a page", settings.page_size),
            "context_len": ("longest context", self._identity.limits.context_tokens),
            "gen_throughput": ("tokens a second", report.tokens_per_second),
        }
        totals = report.totals
        counters = {
            "prompt_tokens": ("prefill tokens processed", totals.prompt_tokens),
            "cached_tokens": ("prompt tokens found in the prefix cache", totals.cached_tokens),
            "generation_tokens": ("tokens generated", totals.generated_tokens),
            "num_requests": ("requests that ended by themselves", totals.finished_requests),
            "num_aborted_requests": ("requests that were aborted", totals.aborted_requests),
            "num_retracted_requests": ("times a request lost its pages to an earlier one", totals.retractions),
        }
        for name, (text, value) in gauges.items():
            yield self._labelled(GaugeMetricFamily(f"sglang:{name}", text, labels=["model_name"]), value)
        for name, (text, value) in counters.items():
            yield self._labelled(CounterMetricFamily(f"sglang:{name}", text, labels=["model_name"]), value)
        if settings.page_tags:
            yield from self._page_tags(report.tags)

    def _page_tags(self, tags: TagCounts) -> Iterator[Metric]:
        """The lines that the plugin adds to SGLang's, under the same names."""
        gauges = {
            ACTIVE_METRIC: ("1 while pages are guarded", 1),
            "pagegate:page_tags_pages_quarantined": ("pages out of circulation", tags.pages_quarantined),
        }
        counters = {
            "pairs_checked": ("pages compared with the tags of their requests", tags.pairs_checked),
            "requests_aborted": ("requests stopped because of a foreign page", tags.requests_aborted),
            "handovers_refused": ("stale pages that were not handed over", tags.handovers_refused),
        }
        for name, (text, value) in gauges.items():
            yield self._labelled(GaugeMetricFamily(name, text, labels=["model_name"]), value)
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(f"pagegate:page_tags_{name}", text, labels=["model_name"])
            yield self._labelled(family, value)

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._identity.name], value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"sglang:{name}_seconds", text, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(self._identity.name)
