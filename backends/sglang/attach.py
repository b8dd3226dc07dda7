"""Whether a running SGLang server is what the deployment file promises: its own reports in, contradictions out. Pure.

Whoever attaches (`pagegate engine check`) refuses an engine with contradictions: each would show later as wrong bills,
wrong capacity or garbled caches. Each names the flag and both values. Fields are those of SGLang 0.5.23.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backends.engine_tables import Engine, Role
from backends.page_tags import ACTIVE_METRIC
from backends.topology import Model

# SGLang only logs a plugin that fails and serves on without it, so nothing less than the plugin's own word is believed.
_PAGE_TAGS = re.compile(rf"^{ACTIVE_METRIC}(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)
_SAME_DTYPE = {"bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Reports:
    """What a server says of itself: parsed `GET /server_info` and `GET /v1/loads`, and the text of `GET /metrics`."""

    server_info: dict[str, Any]
    loads: dict[str, Any]
    metrics: str


def contradictions(model: Model, role: Role, engine: Engine, reports: Reports) -> list[str]:
    """A sentence for each thing in which the server is not what the file says; empty: it may serve."""
    info = reports.server_info
    return [
        *_about_cache(model, info),
        *_about_weights(engine, info),
        *_about_role(role, info),
        *_about_ranks(engine, info, reports.loads),
        *_about_reports(info, reports),
        *_about_page_tags(model, reports.metrics),
        *_about_sleep(model, info),
    ]


def _differs(flag: str, has: object, wanted: object) -> str:
    return f"{flag} is {_shown(has)}, the deployment file says {_shown(wanted)}"


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)


def _about_cache(model: Model, info: dict[str, Any]) -> Iterator[str]:
    if (page := info.get("page_size")) != model.page_tokens:
        yield _differs("--page-size", page, model.page_tokens)
    dtype = info.get("kv_cache_dtype")
    # `auto` depends on what a checkpoint's config carries, so two servers that both say it may differ.
    if _SAME_DTYPE.get(str(dtype), dtype) != model.kv_cache_dtype:
        yield _differs("--kv-cache-dtype", dtype, model.kv_cache_dtype)
    context = info.get("context_length")
    if context is not None and context < model.limits.context_tokens:
        yield _differs("--context-length", context, f"at least {model.limits.context_tokens}")


def _about_weights(engine: Engine, info: dict[str, Any]) -> Iterator[str]:
    weights, has = engine.weights, info.get("quantization")
    wanted = weights.quantization
    if (wanted is not None or weights.precision == "bf16") and has != wanted:
        yield _differs("--quantization", has, wanted)
    scales = info.get("quantization_param_path")
    if (scales is None) != (weights.kv_scales is None):
        yield _differs("--quantization-param-path", scales, weights.kv_scales)


def _about_role(role: Role, info: dict[str, Any]) -> Iterator[str]:
    wanted = "null" if role == "unified" else role
    if (mode := info.get("disaggregation_mode")) != wanted:
        yield _differs("--disaggregation-mode", mode, wanted)


def _about_ranks(engine: Engine, info: dict[str, Any], loads: dict[str, Any]) -> Iterator[str]:
    """Pages are counted rank by rank, and each request is sent to one."""
    ranks = info.get("dp_size") or 1
    if ranks != engine.ranks:
        yield _differs("--dp-size", ranks, engine.ranks)
    if (reported := len(loads.get("loads") or ())) != ranks:
        yield f"/v1/loads reports {reported} ranks, --dp-size is {ranks}"


def _about_reports(info: dict[str, Any], reports: Reports) -> Iterator[str]:
    if info.get("enable_metrics") is not True or "sglang:" not in reports.metrics:
        yield "--enable-metrics is not set: admission can't see the engine's pages"
    if info.get("enable_cache_report") is not True:
        yield "--enable-cache-report is not set: cached prompt tokens would be billed as new ones"


def _about_page_tags(model: Model, metrics: str) -> Iterator[str]:
    if not model.page_tags:
        return
    active = [float(value) for value in _PAGE_TAGS.findall(metrics)]
    if not active:
        yield f"page_tags are required, and /metrics has no {ACTIVE_METRIC}: the plugin is not active"
    elif not all(active):
        yield f"page_tags are required, and {ACTIVE_METRIC} is 0 on {active.count(0.0)} of {len(active)} ranks"


def _about_sleep(model: Model, info: dict[str, Any]) -> Iterator[str]:
    if model.serverless is None or model.serverless.depth != "released":
        return
    if info.get("enable_memory_saver") is not True:
        yield "--enable-memory-saver is not set: asleep it would keep all its memory"
    if info.get("enable_weights_cpu_backup") is not True:
        yield "--enable-weights-cpu-backup is not set: it would wake without its weights"
