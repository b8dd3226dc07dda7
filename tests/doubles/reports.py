"""What the scripted engine says about itself: loads, metrics, arguments. Pure: figures in, payloads out."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

VERSION = "0.5.23"
MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class Figures:
    """One rank of the engine at one instant; used_tokens is rounded up to whole pages. at_s: Unix time."""

    at_s: float
    running: int
    used_tokens: int
    pool_tokens: int
    context_tokens: int
    page_tokens: int
    running_max: int


def loads(ranks: Mapping[int, Figures], numbers: Mapping[str, float]) -> dict[str, Any]:
    """`/v1/loads` as SGLang answers it for these ranks; numbers replaces single figures of each."""
    return {
        "timestamp": datetime.fromtimestamp(next(iter(ranks.values())).at_s, UTC).isoformat(),
        "version": VERSION,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [_load(rank, figures, numbers) for rank, figures in ranks.items()],
    }


def _load(rank: int, figures: Figures, numbers: Mapping[str, float]) -> dict[str, Any]:
    free = figures.pool_tokens or 1
    load: dict[str, Any] = {
        "timestamp": figures.at_s,
        "dp_rank": rank,
        "num_running_reqs": figures.running,
        "num_waiting_reqs": 0,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": figures.used_tokens,
        "num_total_tokens": figures.used_tokens,
        "num_active_tokens": figures.used_tokens,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": figures.pool_tokens,
        "max_running_requests": figures.running_max,
        "token_usage": round(figures.used_tokens / free, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "memory": {"weight_gb": 0.2, "kv_cache_gb": 0.2, "graph_gb": 0.0, "token_capacity": figures.pool_tokens},
        "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    return load | dict(numbers)


def server_info(figures: Figures, epoch: str, kv_cache_dtype: str, role: str, ranks: int) -> dict[str, Any]:
    return {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "page_size": figures.page_tokens,
        "enable_metrics": True,
        "enable_cache_report": True,
        "dp_size": ranks,
        "quantization": None,
        "quantization_param_path": None,
        "kv_cache_dtype": kv_cache_dtype,
        "disaggregation_mode": "null" if role == "unified" else role,
        "max_total_num_tokens": figures.pool_tokens,
        "max_running_requests": figures.running_max,
        "context_length": figures.context_tokens,
        "version": VERSION,
        "epoch": epoch,
    }


def model_info() -> dict[str, Any]:
    return {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True}


def metrics(figures: Figures) -> str:
    values = {
        "num_running_reqs": figures.running,
        "num_queue_reqs": 0,
        "kv_available_tokens": figures.pool_tokens - figures.used_tokens,
        "kv_evictable_tokens": 0,
        "kv_used_tokens": figures.used_tokens,
        "max_total_num_tokens": figures.pool_tokens,
        "page_size": figures.page_tokens,
    }
    lines = (
        f'# TYPE sglang:{name} gauge\nsglang:{name}{{model_name="{MODEL}"}} {value}\n' for name, value in values.items()
    )
    return "".join(lines)
