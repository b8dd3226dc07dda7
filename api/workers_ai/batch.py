"""Workers AI's asynchronous batches: `?queueRequest=true` on /ai/run, asking after them, listing and cancelling.

And runs in the background, which are batches of one whose end is told to a webhook.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from api.auth import permitted
from api.body import input_invalid, parse
from api.console.schemas import read_query
from api.errors import InputInvalid
from api.services import Services
from api.workers_ai.batch_form import Format, background_body
from api.workers_ai.envelope import enveloped
from api.workers_ai.schemas import NamedRunBody
from billing.errors import WebhookInvalid
from billing.instants import instant_text
from gateway.batches.batch import ENDED, Batch, BatchState, FormName, NewLine
from gateway.batches.store import Order
from gateway.errors import BatchNotFound
from tenancy.errors import ModelNotAllowed
from tenancy.principal import Principal, Scope

_REFERENCE_CHARACTERS_MAX: Final = 512
_QUESTION_BYTES_MAX: Final = 4_096
# Of a whole batch: what one request may hold is checked when it runs.
QUEUED_VALUES_MAX: Final = 200_000
_NO_RESPONSES: Final = b'"responses":[]'
_FORMS: Final = (FormName.WORKERS_AI, FormName.BACKGROUND)


class QueueBody(BaseModel):
    """Several requests; without `requests` the body is one."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow")

    requests: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None


class PollBody(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    request_id: Annotated[str, Field(min_length=1, max_length=64)]


class BackgroundOptions(BaseModel):
    """Of a run whose model is named in the body."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    background: bool = False
    webhookUrl: str | None = None  # noqa: N815 - as clients write it
    webhookFormat: Format = "raw"  # noqa: N815 - as clients write it


class BatchListQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    after: str | None = None
    per_page: Annotated[int, Field(ge=1, le=100)] = 20


def is_queued(request: Request) -> bool:
    return b"queueRequest=true" in request.scope["query_string"]


def asks_after(raw: bytes) -> bool:
    """Is the body no request but a question after one: {"request_id": …}?

    What is longer than such questions is left to whoever checks a body's shape before building anything from it.
    """
    if len(raw) > _QUESTION_BYTES_MAX or b'"request_id"' not in raw:
        return False
    try:
        read = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return isinstance(read, dict) and not {"prompt", "messages", "text", "requests"} & read.keys()


class BatchQueue:
    """What /ai/run does with requests that may wait."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._settings = services.settings.batches

    async def submit(self, request: Request, principal: Principal, model: str, raw: bytes) -> Response:
        """Each request is an item of the answer, whatever is wrong with the others."""
        lines = await run_in_threadpool(_lines, raw)
        if len(lines) > self._settings.lines_max:
            raise InputInvalid(("requests",), f"a batch has at most {self._settings.lines_max} requests.")
        batch = await self._order(request, principal, model, FormName.WORKERS_AI, lines)
        return enveloped(_pending(batch))

    async def begin(self, request: Request, principal: Principal, named: NamedRunBody) -> Response | None:
        """Run it in the background; None if it is not asked to. Its webhook's secret is told here and nowhere else."""
        options = _background_options(named)
        if not options.background:
            if options.webhookUrl is not None:
                raise InputInvalid(("options", "webhookUrl"), "needs background: true.")
            return None
        read = {**(named.model_extra or {}), **named.input}
        body = background_body({**read, "stream": False}, options.webhookFormat)
        webhook, told = None, {}
        if options.webhookUrl is not None:
            webhook, told["webhook_secret"] = await self._webhook(principal, options.webhookUrl)
        line = NewLine(0, None, body)
        try:
            batch = await self._order(request, principal, named.model, FormName.BACKGROUND, [line], webhook=webhook)
        except Exception:
            if webhook is not None:
                webhooks = self._services.webhooks
                await self._services.database.call(webhooks.forget_one, principal.account_id, webhook)
            raise
        return enveloped({"id": batch.id, "state": "queued", **_pending(batch), **told})

    async def poll(self, principal: Principal, model: str | None, raw: bytes) -> Response:
        """Where a batch is, or what its requests came to."""
        asked = parse(PollBody, raw)
        batch = await self._find(principal, asked.request_id)
        if model is not None and batch.model != model:
            raise BatchNotFound(asked.request_id)
        return await self._standing(batch, {})

    async def _standing(self, batch: Batch, beside: dict[str, Any]) -> Response:
        """beside: what is told of it besides where it is and what it came to."""
        if batch.state not in ENDED:
            return enveloped(beside | _pending(batch))
        if batch.form is FormName.BACKGROUND:
            (said,), _ = await self._answers_behind(batch, -1)
            return enveloped(orjson.Fragment(_joined(beside, said)))
        return StreamingResponse(self._answers(batch, beside), media_type="application/json")

    async def _answers(self, batch: Batch, beside: dict[str, Any]) -> AsyncIterator[bytes]:
        """Piece by piece: all answers of a large batch are more than one answer may take of memory."""
        usage = {
            "prompt_tokens": batch.prompt_tokens,
            "completion_tokens": batch.completion_tokens,
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": batch.cached_tokens},
        }
        envelope = bytes(enveloped(beside | {"responses": [], "usage": usage}).body)
        head, _, tail = envelope.partition(_NO_RESPONSES)
        yield head + _NO_RESPONSES[:-1]
        answers, after = await self._answers_behind(batch, -1)
        while answers:
            yield b",".join(answers)
            answers, after = await self._answers_behind(batch, after)
            if answers:
                yield b","
        yield b"]" + tail

    async def _answers_behind(self, batch: Batch, after: int) -> tuple[list[bytes], int]:
        store = self._services.batching.store
        return await self._services.database.call(store.answers, batch.account_id, batch.id, after)

    async def _find(self, principal: Principal, batch_id: str) -> Batch:
        store = self._services.batching.store
        batch = await self._services.database.call(store.get, principal.account_id, batch_id)
        if batch.form not in _FORMS:
            raise BatchNotFound(batch_id)
        return batch

    async def _order(
        self,
        request: Request,
        principal: Principal,
        model: str,
        form: FormName,
        lines: Sequence[NewLine],
        *,
        webhook: str | None = None,
    ) -> Batch:
        self._services.catalogue.in_service(model, request.scope["state"]["received_at_ns"])
        if not principal.may_use(model):
            raise ModelNotAllowed(f"This API key may not use the model {model}.")
        order = Order(
            key_id=principal.key_id,
            form=form,
            endpoint="run",
            model=model,
            completion_window="24h",
            window_s=self._settings.window_seconds,
            answers_kept_s=self._settings.answers_kept_seconds,
            lines=lines,
            webhook=webhook,
            id=request.scope["state"]["request_id"],
        )
        batching = self._services.batching
        batch = await self._services.database.call(batching.store.create, principal.account_id, order)
        batching.wake()
        return batch

    async def _webhook(self, principal: Principal, url: str) -> tuple[str, str]:
        webhooks = self._services.webhooks
        try:
            added = await self._services.database.call(webhooks.add_for_one, principal.account_id, url)
        except WebhookInvalid as error:
            raise InputInvalid(("options", "webhookUrl"), error.message) from None
        return added.endpoint.id, added.secret

    # …/ai/batches

    async def all_batches(self, request: Request) -> Response:
        """The account's batches and background runs, the newest first."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        query = read_query(BatchListQuery, request)
        store = self._services.batching.store
        found, more = await self._services.database.call(
            lambda: store.page(principal.account_id, _FORMS, after=query.after, limit=query.per_page)
        )
        info = {"count": len(found), "per_page": query.per_page, "has_more": int(more)}
        return enveloped([_summary(batch) for batch in found], result_info=info)

    async def one_batch(self, request: Request) -> Response:
        """Where it is, and what its requests came to."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        batch = await self._find(principal, request.path_params["request_id"])
        return await self._standing(batch, _summary(batch))

    async def cancel(self, request: Request) -> Response:
        """What waits is not run any more; what runs ends, and is charged."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        batch = await self._find(principal, request.path_params["request_id"])
        batching = self._services.batching
        batch = await self._services.database.call(batching.store.cancel, principal.account_id, batch.id)
        batching.wake()
        return enveloped(_summary(batch))


def _lines(raw: bytes) -> list[NewLine]:
    """Each request of a body, which may be large: it is read beside the event loop."""
    read = parse(QueueBody, raw, values_max=QUEUED_VALUES_MAX)
    several = [read.model_extra or {}] if read.requests is None else read.requests
    return [NewLine(at, _reference(at, asked), orjson.dumps(asked)) for at, asked in enumerate(several)]


def _joined(beside: dict[str, Any], said: bytes) -> bytes:
    """One object with what a line says, which may be megabytes and is not read for this. It names the model itself."""
    told = orjson.dumps({name: value for name, value in beside.items() if name != "model"})
    return said if told == b"{}" else told[:-1] + b"," + said[1:]


def _reference(at: int, asked: dict[str, Any]) -> str | None:
    reference = asked.pop("external_reference", None)
    if reference is None:
        return None
    if not isinstance(reference, str) or len(reference) > _REFERENCE_CHARACTERS_MAX or "\0" in reference:
        path = ("requests", at, "external_reference")
        raise InputInvalid(
            path, f"must be a text of at most {_REFERENCE_CHARACTERS_MAX} characters, NUL not among them."
        )
    return reference


def _background_options(named: NamedRunBody) -> BackgroundOptions:
    try:
        return BackgroundOptions.model_validate(named.options or {})
    except ValidationError as error:
        first = input_invalid(error)
        raise InputInvalid(("options", *first.path), first.message.partition(": ")[2]) from None


def _status(batch: Batch) -> str:
    """Workers AI's two words for what has not ended, ours for the rest."""
    if batch.state in ENDED or batch.state is BatchState.CANCELLING:
        return batch.state.value
    return "queued" if batch.owner is None else "running"


def _pending(batch: Batch) -> dict[str, Any]:
    status = _status(batch)
    told = "running" if status == BatchState.CANCELLING.value else status
    return {"status": told, "request_id": batch.id, "model": batch.model}


def _summary(batch: Batch) -> dict[str, Any]:
    return {
        "request_id": batch.id,
        "model": batch.model,
        "status": _status(batch),
        "created_at": instant_text(batch.created_at_ns),
        "expires_at": instant_text(batch.expires_at_ns),
        "kept_until": None if batch.kept_until_ns is None else instant_text(batch.kept_until_ns),
        "requests": {"total": batch.lines, "succeeded": batch.succeeded, "failed": batch.failed},
    }
