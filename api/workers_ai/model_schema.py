"""GET /client/v4/accounts/{account_id}/ai/models/schema?model=…: what a model reads and answers, as JSON Schema.

The input is drawn from the very schema that requests are checked with, so that a bound that is published is enforced.
"""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.console.schemas import read_query
from api.services import Services
from api.workers_ai.embed import EmbedBody
from api.workers_ai.envelope import enveloped
from api.workers_ai.schemas import RunBody, SchemaQuery
from gateway.catalogue import TEXT_EMBEDDINGS, ModelCard
from tenancy.principal import Scope

# Known by name only to be refused.
_REFUSED: Final = frozenset({"image", "requests", "lora", "lora_path", "functions", "function_call", "modalities"})
_COUNT: Final = {"type": "integer", "minimum": 0}
_USAGE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": _COUNT}},
        "completion_tokens_details": {"type": "object", "properties": {"reasoning_tokens": _COUNT}},
        "cost": {"type": "string", "description": "USD, a plain decimal."},
    },
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "cost"],
}
_CHOICE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "index": _COUNT,
        "message": {"type": "object", "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}}},
        "text": {"type": "string", "description": "In place of `message`, for a raw prompt."},
        "finish_reason": {"type": ["string", "null"]},
    },
    "required": ["index", "finish_reason"],
}
_OUTPUT: Final[dict[str, Any]] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {
                "response": {"description": "A string; the value itself where the answer is JSON by response_format."},
                "tool_calls": {"type": "array", "items": {"type": "object"}},
                "usage": _USAGE,
                "id": {"type": "string"},
                "object": {"enum": ["chat.completion", "text_completion"]},
                "created": {"type": "integer"},
                "model": {"type": "string"},
                "choices": {"type": "array", "items": _CHOICE},
            },
            "required": ["response", "usage", "id", "created", "model", "choices"],
        },
        {
            "type": "string",
            "contentMediaType": "text/event-stream",
            "description": "With `stream`: frames of {response, p}, a last one with usage, and [DONE].",
        },
    ]
}


_VECTORS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "shape": {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2},
        "data": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "pooling": {"const": "mean"},
        "usage": {"type": "object", "properties": {"prompt_tokens": _COUNT, "total_tokens": _COUNT}},
    },
    "required": ["shape", "data"],
}


class SchemaRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def schema(self, request: Request) -> Response:
        """Raises ModelNotFound."""
        await permitted(request, self._services, Scope.AI_READ)
        query = read_query(SchemaQuery, request)
        card = self._services.catalogue.get(query.model)
        if card.task == TEXT_EMBEDDINGS:
            return enveloped({"input": EmbedBody.model_json_schema(mode="validation"), "output": _VECTORS})
        return enveloped({"input": _input(card, self._services.settings.choices_max), "output": _OUTPUT})


def _input(card: ModelCard, choices_max: int) -> dict[str, Any]:
    read = RunBody.model_json_schema(mode="validation")["properties"]
    properties = {name: shape for name, shape in read.items() if name not in _REFUSED}
    properties["n"] = {"type": "integer", "minimum": 1, "maximum": choices_max, "default": 1}
    for name in ("max_tokens", "max_completion_tokens"):
        properties[name] = {
            "type": "integer",
            "minimum": 1,
            "description": f"Above {card.output_tokens_max}, or above what the prompt leaves of the context of "
            f"{card.context_tokens} tokens, it is lowered and x-pagegate-max-tokens says to what.",
        }
    return {
        "type": "object",
        "description": card.description,
        "properties": properties,
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        "additionalProperties": True,
    }
