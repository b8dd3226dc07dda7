"""Prices, facts and records with defaults, so that a test names only what it is about."""

from dataclasses import replace
from typing import Any

from billing.price_book import LIST_BOOK, Price, Tier
from billing.usage import RequestFacts, TokenUsage, UsageRecord

MODEL = "@cf/test/model"
ACCOUNT = "a" * 32
OTHER_ACCOUNT = "b" * 32
KEY = "c" * 32

# The prices of the published cases: 1,000, 100 and 10,000 nano-USD per token.
_PRICE = Price(
    version=1,
    book=LIST_BOOK,
    model=MODEL,
    tier=Tier.STANDARD.value,
    input_nano_per_m=1_000_000_000,
    cached_input_nano_per_m=100_000_000,
    output_nano_per_m=10_000_000_000,
    reasoning_nano_per_m=None,
    input_neurons_per_m=90_909,
    cached_input_neurons_per_m=9_091,
    output_neurons_per_m=909_091,
    effective_from_ns=0,
)


def price(**values: Any) -> Price:
    return replace(_PRICE, **values)


def facts(request_id: str = "request-1", **values: Any) -> RequestFacts:
    defaults: dict[str, Any] = {
        "request_id": request_id,
        "account_id": ACCOUNT,
        "key_id": KEY,
        "model": MODEL,
        "endpoint": "chat",
        "stream": True,
        "prompt_tokens": 10,
        "price_version": 1,
        "started_at_ns": 1_000,
    }
    return RequestFacts(**defaults | values)


def record(request_id: str = "request-1", usage: TokenUsage | None = None, **values: Any) -> UsageRecord:
    of_facts = {name: values.pop(name) for name in ("account_id", "model", "key_id", "started_at_ns") if name in values}
    defaults: dict[str, Any] = {
        "facts": facts(request_id, **of_facts),
        "outcome": "finished",
        "usage": TokenUsage(10, 0, 100, 0) if usage is None else usage,
        "charged": True,
        "ended_at_ns": 2_000,
        "queued_ms": 0,
        "ttft_ms": 3,
        "replica": "replica-1",
        "finish_reason": "stop",
        "code": None,
    }
    return UsageRecord(**defaults | values)
