"""Two months of an account's usage, drawn from a fixed seed and priced as the service prices, for pages to show."""

import random
import uuid
from dataclasses import dataclass, replace
from typing import Any

from billing.ledger.posting import post_usage
from billing.price_book import read_prices, set_price, with_derived_neurons
from billing.rating import rate
from billing.rollups import DAY_NS
from billing.usage import TokenUsage
from tenancy.database import Database

MODELS = ("@cf/huggingfacetb/smollm2-135m-instruct", "@cf/moonshotai/kimi-k2.6", "@cf/zai-org/glm-5.2", "tiny")
_WEIGHTS = (2, 5, 3, 1)
_OUTCOMES = (
    ("finished", None),
    ("client_disconnected", None),
    ("refused", "queue_full"),
    ("upstream_failed", "engine"),
)
DAYS = 62


@dataclass(frozen=True, slots=True)
class _Draw:
    model: str
    key_id: str
    outcome: str
    code: str | None
    usage: TokenUsage


def seed_history(database: Database, account_id: str, key_ids: list[str], *, now_ns: int, requests: int) -> None:
    """The newest began an hour ago."""
    chance = random.Random(7)
    with database.write() as connection:
        have = {price.model for price in read_prices(connection)}
        for number, model in enumerate(MODELS):
            if model not in have:
                price = with_derived_neurons(
                    model,
                    input_nano_per_m=(number + 1) * 3_000_000_000,
                    cached_input_nano_per_m=(number + 1) * 600_000_000,
                    output_nano_per_m=(number + 1) * 12_000_000_000,
                    reasoning_nano_per_m=None,
                    effective_from_ns=1,
                )
                set_price(connection, price)
        prices = {price.model: price for price in read_prices(connection)}
        # Seeded requests began before the service first started, and so did the price that it seeded.
        prices = {model: replace(price, effective_from_ns=1) for model, price in prices.items()}
        rows = []
        for number in range(requests):
            draw = _draw(chance, key_ids)
            charged = draw.outcome in {"finished", "client_disconnected"}
            charge = rate(draw.usage, prices[draw.model])
            ago = (requests - number) / requests
            started_ns = now_ns - 3_600_000_000_000 - round(ago * DAYS * DAY_NS)
            rows.append(
                _row(
                    draw,
                    id=str(uuid.UUID(int=chance.getrandbits(128), version=4)),
                    account_id=account_id,
                    charged=charged,
                    cost_nano=charge.cost_nano if charged else 0,
                    neurons_micro=charge.neurons_micro if charged else 0,
                    price_version=prices[draw.model].version,
                    started_at_ns=started_ns,
                    ended_at_ns=started_ns + chance.randrange(400, 9_000) * 1_000_000,
                    queued_ms=chance.choice((0, 0, 0, 3, 40, 180)),
                    ttft_ms=None if draw.usage.completion == 0 else chance.randrange(190, 700),
                )
            )
        post_usage(connection, rows, posted_at_ns=now_ns)


def _draw(chance: random.Random, key_ids: list[str]) -> _Draw:
    outcome, code = chance.choices(_OUTCOMES, weights=(92, 4, 3, 1))[0]
    prompt = round(chance.lognormvariate(7.2, 0.9)) + 12
    cached = prompt * chance.choice((0, 0, 4, 7)) // 10
    completion = 0 if outcome == "refused" else round(chance.lognormvariate(5.6, 0.8)) + 1
    usage = TokenUsage(prompt, cached, completion, 0) if completion else TokenUsage()
    return _Draw(chance.choices(MODELS, weights=_WEIGHTS)[0], chance.choice(key_ids), outcome, code, usage)


def _row(draw: _Draw, **values: Any) -> dict[str, Any]:
    usage = draw.usage
    return {
        "key_id": draw.key_id,
        "model": draw.model,
        "endpoint": "chat",
        "stream": True,
        "outcome": draw.outcome,
        "code": draw.code,
        "finish_reason": "stop" if draw.outcome == "finished" else None,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
        "reasoning_tokens": 0,
        "usage_source": "engine",
        "replica": "engine-0",
        "tier": "standard",
        "end_user": None,
        "tags": None,
        "kv_page_ms": 64 * (values["ended_at_ns"] - values["started_at_ns"]) // 1_000_000,
        "deployment": None,
        "precisions": None,
        "region": None,
        **values,
    }
