"""GET /client/v4/accounts/{account_id}/ai/{models,tasks,authors}/search: what is served, by model, task and author.

Models are told in Cloudflare's item shape or OpenRouter's.
"""

import time
import uuid
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.console.schemas import read_query
from api.price_texts import per_million, per_token, pricing
from api.services import Services
from api.workers_ai.envelope import enveloped
from api.workers_ai.schemas import SearchQuery
from billing.errors import PriceUnavailable
from billing.price_book import Price
from gateway.catalogue import TEXT_EMBEDDINGS, TEXT_GENERATION, ModelCard
from tenancy.principal import Scope

# Ids of models and tasks are derived from their names, so that they never change.
_NAMES: Final = uuid.uuid5(uuid.NAMESPACE_URL, "pagegate:models")
_SOURCES: Final = {"1": "@cf/", "2": "@hf/"}
_TASK_DESCRIPTIONS: Final = {
    TEXT_GENERATION: "Generative text models: they continue a text or answer in a chat.",
    TEXT_EMBEDDINGS: "Models that turn a text into a vector, near to those of texts of like meaning.",
}
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "top_logprobs",
)  # fmt: skip

# How long retired models can still be looked up.
_RETIRED_SHOWN_NS: Final = 92 * 86_400 * 1_000_000_000
_FEATURES: Final = ("tools", "json_mode", "structured_outputs")


class SearchRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def search(self, request: Request) -> Response:
        """Pages are exact: `per_page` is kept, and `total_count` is what paging through them finds."""
        await permitted(request, self._services, Scope.AI_READ)
        query = read_query(SearchQuery, request)
        now_ns = time.time_ns()
        found = [card for card in self._services.catalogue.all() if _matches(card, query, now_ns)]
        page = found[(query.page - 1) * query.per_page : query.page * query.per_page]
        info = {
            "page": query.page,
            "per_page": query.per_page,
            "count": len(page),
            "total_count": len(found),
            "total_pages": -(-len(found) // query.per_page),
        }
        if query.format == "openrouter":
            return enveloped({"data": [_openrouter_item(card, self._price(card)) for card in page]}, result_info=info)
        return enveloped([_item(card, self._price(card)) for card in page], result_info=info)

    async def tasks(self, request: Request) -> Response:
        """The tasks that some model here is for."""
        await permitted(request, self._services, Scope.AI_READ)
        return _whole_list(
            [_task(name) for name in dict.fromkeys(card.task for card in self._services.catalogue.all())]
        )

    async def authors(self, request: Request) -> Response:
        """The authors of the models here."""
        await permitted(request, self._services, Scope.AI_READ)
        names = dict.fromkeys(card.owned_by for card in self._services.catalogue.all())
        return _whole_list([{"id": str(uuid.uuid5(_NAMES, f"author:{name}")), "name": name} for name in names])

    def _price(self, card: ModelCard) -> Price | None:
        try:
            return self._services.price_book.price_in_force(card.price_id, time.time_ns())
        except PriceUnavailable:
            return None


def _matches(card: ModelCard, query: SearchQuery, now_ns: int) -> bool:
    """A retired model is shown for a quarter of a year to whoever asks for such. None here is experimental."""
    if card.retired(now_ns) and (not query.include_deprecated or card.retired(now_ns - _RETIRED_SHOWN_NS)):
        return False
    return (
        (query.search is None or query.search.lower() in f"{card.id} {card.description}".lower())
        and (query.task is None or query.task.lower() == card.task.lower())
        and (query.author is None or query.author.lower() == card.owned_by.lower())
        and (query.source is None or card.id.startswith(_SOURCES[query.source]))
    )


def _whole_list(rows: list[dict[str, Any]]) -> Response:
    """A list that is never longer than a page."""
    count = len(rows)
    info = {"page": 1, "per_page": count, "count": count, "total_count": count, "total_pages": min(count, 1)}
    return enveloped(rows, result_info=info)


def _task(name: str) -> dict[str, Any]:
    return {"id": str(uuid.uuid5(_NAMES, name)), "name": name, "description": _TASK_DESCRIPTIONS.get(name, name)}


def _item(card: ModelCard, price: Price | None) -> dict[str, Any]:
    properties: list[dict[str, Any]] = [{"property_id": "context_window", "value": str(card.context_tokens)}]
    if card.task == TEXT_GENERATION:
        properties += [
            # Prompt and output share the window, and an answer has at least one token.
            {"property_id": "max_input_tokens", "value": str(card.context_tokens - 1)},
            {"property_id": "max_output_tokens", "value": str(_output_tokens_max(card))},
            {"property_id": "function_calling", "value": "true"},
        ]
    else:
        properties += [
            {"property_id": "max_input_tokens", "value": str(card.context_tokens)},
            {"property_id": "output_dimensions", "value": str(card.dimensions)},
        ]
    properties.append({"property_id": "async_queue", "value": "true"})
    if card.retires_on is not None:
        properties.append({"property_id": "planned_deprecation_date", "value": card.retires_on})
    if price is not None:
        properties.append({"property_id": "price", "value": _price_property(price)})
    properties += [{"property_id": f"precision_{part}", "value": value} for part, value in card.precisions.items()]
    created = datetime.fromtimestamp(card.created, UTC)
    return {
        "id": str(uuid.uuid5(_NAMES, card.id)),
        "source": 2 if card.id.startswith("@hf/") else 1,
        "name": card.id,
        "description": card.description,
        "task": _task(card.task),
        "created_at": f"{created:%Y-%m-%d %H:%M:%S}.000",
        "tags": [],
        "properties": properties,
    }


def _output_tokens_max(card: ModelCard) -> int:
    """What can come of the shortest prompt: a model whose own limit is its whole context never reaches that."""
    return 0 if card.task != TEXT_GENERATION else min(card.output_tokens_max, card.context_tokens - 1)


def _price_property(price: Price) -> list[dict[str, Any]]:
    classes = (
        ("per M input tokens", price.input_nano_per_m),
        ("per M cached input tokens", price.cached_input_nano_per_m),
        ("per M output tokens", price.output_nano_per_m),
    )
    return [{"unit": unit, "price": per_million(nano), "currency": "USD"} for unit, nano in classes if nano is not None]


def _openrouter_item(card: ModelCard, price: Price | None) -> dict[str, Any]:
    return {
        "id": card.id,
        "name": card.id.rsplit("/", 1)[-1],
        "created": card.created,
        "hugging_face_id": None,
        "context_length": card.context_tokens,
        "max_output_length": _output_tokens_max(card),
        "input_modalities": ["text"],
        "output_modalities": ["text" if card.task == TEXT_GENERATION else "embeddings"],
        "pricing": None if price is None else _openrouter_pricing(price),
        "supported_features": list(_FEATURES) if card.task == TEXT_GENERATION else [],
        "supported_sampling_parameters": list(_SAMPLING) if card.task == TEXT_GENERATION else [],
    }


def _openrouter_pricing(price: Price) -> dict[str, str]:
    """Every class by name: reasoning without a price of its own is output, cached input is input, and keeping a prompt
    in the cache costs nothing.
    """
    by_class = pricing(price)
    reasoning = price.reasoning_nano_per_m
    return {
        **by_class,
        "internal_reasoning": by_class["completion"] if reasoning is None else per_token(reasoning),
        "input_cache_read": by_class.get("input_cache_read", by_class["prompt"]),
        "input_cache_write": "0",
    }
