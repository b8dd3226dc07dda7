"""POST …/embeddings: one vector for each text, as numbers or as base64 of little-endian float32."""

import base64
from array import array
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from api.answer_headers import embedded_headers
from api.auth import permitted
from api.body import parse, read_body
from api.body_shapes import SOME_TEXT, TOKEN_IDS
from api.charged_body import ChargedBody
from api.errors import InputInvalid
from api.idempotency import answered
from api.intake import header_tags
from api.openai.schemas import Model
from api.services import Services
from api.tally import embedding_usage_object
from gateway.catalogue import TEXT_EMBEDDINGS, Catalogue
from gateway.embedding import Embedded, EmbeddingRequest
from tenancy.principal import Principal, Scope

TEXTS_MAX: Final = 2048
_TOKEN_ID_MAX: Final = 2**31 - 1

Texts = tuple[str | tuple[int, ...], ...]


def _texts(value: object) -> Texts:
    """One text or several, each as text or token ids."""
    listed = [value] if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])) else value
    if not isinstance(listed, list) or not 1 <= len(listed) <= TEXTS_MAX:
        raise ValueError(f"must be a text, a list of token ids, or a list of 1 to {TEXTS_MAX} of them.")
    return tuple(_text(one) for one in listed)


def _text(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_id(token) for token in value):
        return tuple(value)
    raise ValueError("each must be a text that is not empty, or a list of token ids.")


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _TOKEN_ID_MAX


_INPUT_SCHEMA = {
    "anyOf": [
        SOME_TEXT,
        TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [SOME_TEXT, TOKEN_IDS]}, "minItems": 1, "maxItems": TEXTS_MAX},
    ]
}


class EmbeddingsBody(ChargedBody):
    model: Model
    input: Annotated[Texts, BeforeValidator(_texts), WithJsonSchema(_INPUT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbeddingsRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """Vectors of length one, in the order of the texts."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        body = parse(EmbeddingsBody, await read_body(request))
        state = request.scope["state"]
        wanted = embeddings_request(
            body,
            self._services.catalogue,
            state["request_id"],
            principal,
            state["received_at_ns"],
            tags=header_tags(request),
        )
        return await answered(request, self._services, wanted, partial(self._answer, wanted, body))

    async def _answer(
        self, wanted: EmbeddingRequest, body: EmbeddingsBody, watch: AbstractAsyncContextManager[object]
    ) -> Response:
        assert self._services.embeddings is not None, "an embedding model in the catalogue is served"
        async with watch:
            embedded = await self._services.embeddings.embed(wanted)
        return Response(
            orjson.dumps(embeddings_answer(body, wanted, embedded)),
            headers=embedded_headers(embedded, body),
            media_type="application/json",
        )


def embeddings_request(
    body: EmbeddingsBody,
    catalogue: Catalogue,
    request_id: str,
    principal: Principal,
    received_at_ns: int,
    *,
    tags: Mapping[str, str],
) -> EmbeddingRequest:
    """tags: of the request's head. Raises InputInvalid for a width that the model does not have, and what the catalogue
    raises.
    """
    card = catalogue.get_for(TEXT_EMBEDDINGS, body.model, received_at_ns)
    if body.dimensions not in (None, card.dimensions):
        raise InputInvalid(("dimensions",), f"this model gives {card.dimensions} and no others.")
    return EmbeddingRequest(
        request_id,
        principal,
        body.model,
        "embeddings",
        body.input,
        received_at_ns,
        attribution=body.attribution(tags),
        written=body.encoding_format or "float",
    )


def embeddings_answer(body: EmbeddingsBody, wanted: EmbeddingRequest, embedded: Embedded) -> dict[str, Any]:
    shown = _as_base64 if body.encoding_format == "base64" else _as_numbers
    data = [
        {"object": "embedding", "index": at, "embedding": shown(vector)} for at, vector in enumerate(embedded.vectors)
    ]
    usage = embedding_usage_object(embedded.settlement)
    return {"object": "list", "data": data, "model": wanted.model, "usage": usage}


def _as_numbers(vector: list[float]) -> list[float]:
    return vector


def _as_base64(vector: list[float]) -> Any:
    values = array("f", vector)
    if _BIG_ENDIAN:
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


_BIG_ENDIAN: Final = array("H", [1]).tobytes() == b"\x00\x01"
