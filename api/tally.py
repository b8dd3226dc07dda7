"""How an answer says what it used and cost: the `usage` object and the headers. Both dialects use it.

All figures come from the settlement, so that stream, non-stream, console and ledger can't differ.
"""

from typing import Any

from billing.money import neurons_decimal, usd_decimal
from billing.price_book import Tier
from gateway.request import GenerationRequest, OutputCap, Settlement


def usage_object(settlement: Settlement) -> dict[str, Any]:
    """Integers and their details, and the cost as a decimal string: clients that add chunks up survive it."""
    usage = settlement.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "cost": usd_decimal(settlement.cost_nano),
    }


def service_tier_field(request: GenerationRequest, settlement: Settlement | None) -> dict[str, str]:
    """The tier as OpenAI names it, for who asked for one: the one that was served, once that is known."""
    if request.service_tier is None:
        return {}
    if settlement is None:
        return {"service_tier": "auto"}
    return {"service_tier": "priority" if settlement.tier == Tier.PRIORITY else "default"}


def embedding_usage_object(settlement: Settlement) -> dict[str, Any]:
    """Of a request that generates nothing."""
    tokens = settlement.usage.prompt
    return {"prompt_tokens": tokens, "total_tokens": tokens, "cost": usd_decimal(settlement.cost_nano)}


def neurons_header(settlement: Settlement) -> dict[str, str]:
    return {"cf-ai-neurons": neurons_decimal(settlement.neurons_micro)}


def cap_header(cap: OutputCap) -> dict[str, str]:
    """Says what a max_tokens that did not fit was lowered to, and whether it is money that it did not fit into."""
    if not cap.clamped:
        return {}
    reason = {"x-pagegate-limit-reason": "credits"} if cap.by_money else {}
    return {"x-pagegate-max-tokens": str(cap.tokens), **reason}
