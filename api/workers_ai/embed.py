"""The embedding models of /ai/run, in their native shape: {text} in, {shape, data, pooling} out."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from api.answer_headers import embedded_headers
from api.charged_body import ChargedBody
from api.intake import header_tags
from api.tally import embedding_usage_object
from api.workers_ai.envelope import enveloped
from api.workers_ai.tags import query_tags
from gateway.embedding import Embedded, EmbeddingRequest, Embeddings
from tenancy.principal import Principal

TEXTS_MAX: Final = 100


def _texts(value: object) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not 1 <= len(listed) <= TEXTS_MAX:
        raise ValueError(f"must be a text or a list of 1 to {TEXTS_MAX} texts.")
    if not all(isinstance(text, str) and text for text in listed):
        raise ValueError("each text must be a string that is not empty.")
    return tuple(listed)


_TEXT: Final = {"type": "string", "minLength": 1}
_TEXT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": TEXTS_MAX}]
}


class EmbedBody(ChargedBody):
    """pooling: the mean of the tokens is the only one that the models here were made for."""

    text: Annotated[tuple[str, ...], BeforeValidator(_texts), WithJsonSchema(_TEXT_SCHEMA)]
    pooling: Literal["mean"] | None = None


def embed_request(request: Request, principal: Principal, model: str, body: EmbedBody) -> EmbeddingRequest:
    state = request.scope["state"]
    tags = {**query_tags(request), **header_tags(request)}
    return embedding_request(state["request_id"], principal, model, body, state["received_at_ns"], tags=tags)


def embedding_request(
    request_id: str, principal: Principal, model: str, body: EmbedBody, received_at_ns: int, *, tags: Mapping[str, str]
) -> EmbeddingRequest:
    """tags: of the request's head."""
    return EmbeddingRequest(
        request_id, principal, model, "run", body.text, received_at_ns, attribution=body.attribution(tags)
    )


async def embed_answer(
    embeddings: Embeddings, wanted: EmbeddingRequest, body: EmbedBody, watch: AbstractAsyncContextManager[object]
) -> Response:
    """watch: raises if the client leaves while we wait."""
    async with watch:
        embedded = await embeddings.embed(wanted)
    return enveloped(
        embed_result(embedded),
        headers=embedded_headers(embedded, body),
    )


def embed_result(embedded: Embedded) -> dict[str, Any]:
    return {
        "shape": [len(embedded.vectors), len(embedded.vectors[0])],
        "data": embedded.vectors,
        "pooling": "mean",
        "usage": embedding_usage_object(embedded.settlement),
    }
