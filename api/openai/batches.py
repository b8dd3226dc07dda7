"""…/batches: make one of an uploaded file, look at it, list and cancel."""

from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.console.schemas import read_query
from api.openai.files import listing
from api.services import Services
from gateway.batches.batch import Batch, FormName
from gateway.batches.store import Order
from gateway.errors import BatchInvalid
from tenancy.principal import Scope

_METADATA_MAX: Final = 16
_FORMS: Final = (FormName.OPENAI,)

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


class AnswersExpire(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=30 * 86_400)]


class BatchBody(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataText], Field(max_length=_METADATA_MAX)] | None = None
    output_expires_after: AnswersExpire | None = None


class BatchesQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class BatchRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._batching = services.batching

    async def create(self, request: Request) -> Response:
        """Its file is checked next, then its lines run as engines have room, within a day."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        body = parse(BatchBody, await read_body(request))
        settings, call = self._services.settings.batches, self._services.database.call
        file = await call(self._batching.files.get, principal.account_id, body.input_file_id)
        if file.purpose != "batch":
            raise BatchInvalid(f"The file {file.id} was not uploaded with the purpose batch.")
        kept = body.output_expires_after
        order = Order(
            key_id=principal.key_id,
            form=FormName.OPENAI,
            endpoint=body.endpoint,
            model="",
            completion_window=body.completion_window,
            window_s=settings.window_seconds,
            answers_kept_s=settings.file_kept_seconds if kept is None else kept.seconds,
            input_file_id=file.id,
            input_bytes=file.bytes,
            metadata=body.metadata,
        )
        batch = await call(self._batching.store.create, principal.account_id, order)
        self._batching.wake()
        return _json(batch_object(batch))

    async def all_batches(self, request: Request) -> Response:
        """The account's batches, the newest first."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        query = read_query(BatchesQuery, request)
        store = self._batching.store
        found, more = await self._services.database.call(
            lambda: store.page(principal.account_id, _FORMS, after=query.after, limit=query.limit)
        )
        return _json(listing([batch_object(batch) for batch in found], more=more))

    async def retrieve(self, request: Request) -> Response:
        """How far it is."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        batch_id = request.path_params["batch_id"]
        batch = await self._services.database.call(self._batching.store.get, principal.account_id, batch_id)
        return _json(batch_object(batch))

    async def cancel(self, request: Request) -> Response:
        """What waits is not run any more; what runs ends, and is charged."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        batch_id = request.path_params["batch_id"]
        batch = await self._services.database.call(self._batching.store.cancel, principal.account_id, batch_id)
        self._batching.wake()
        return _json(batch_object(batch))


def batch_object(batch: Batch) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.state.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": _seconds(batch.created_at_ns),
        "in_progress_at": _seconds(batch.in_progress_at_ns),
        "expires_at": _seconds(batch.expires_at_ns),
        "finalizing_at": _seconds(batch.finalizing_at_ns),
        "completed_at": _seconds(batch.completed_at_ns),
        "failed_at": _seconds(batch.failed_at_ns),
        "expired_at": _seconds(batch.expired_at_ns),
        "cancelling_at": _seconds(batch.cancelling_at_ns),
        "cancelled_at": _seconds(batch.cancelled_at_ns),
        "request_counts": {"total": batch.lines, "completed": batch.succeeded, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "metadata": batch.metadata,
    }


def _seconds(instant_ns: int | None) -> int | None:
    return None if instant_ns is None else instant_ns // 1_000_000_000


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
