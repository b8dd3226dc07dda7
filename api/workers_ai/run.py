"""POST /client/v4/accounts/{account_id}/ai/run/{model}, and …/ai/run with the model in the body."""

from contextlib import AbstractAsyncContextManager
from functools import partial

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from api.answer_headers import answer_headers
from api.auth import permitted
from api.body import parse, read_body
from api.idempotency import answered
from api.intake import arrival, formed
from api.persistence import completed, streamed
from api.services import Services
from api.sse import EventStream
from api.workers_ai.batch import QUEUED_VALUES_MAX, BatchQueue, asks_after, is_queued
from api.workers_ai.embed import EmbedBody, embed_answer, embed_request
from api.workers_ai.envelope import enveloped
from api.workers_ai.native import native_frames, native_frames_with_tools
from api.workers_ai.schemas import NamedRunBody, RunBody
from api.workers_ai.tags import query_tags
from api.workers_ai.translate import embed_body, result, run_body, run_request
from gateway.catalogue import TEXT_EMBEDDINGS
from gateway.request import GenerationRequest
from tenancy.principal import Principal, Scope


class RunRoute:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._queue = BatchQueue(services)

    async def run(self, request: Request) -> Response:
        """Run a model on a prompt or on messages; streamed or whole."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        model, raw = request.path_params["model"], await read_body(request)
        if asks_after(raw):
            return await self._queue.poll(principal, model, raw)
        if is_queued(request):
            return await self._queue.submit(request, principal, model, raw)
        if self._embeds(model):
            return await self._embed(request, principal, model, parse(EmbedBody, raw))
        return await self._run(request, principal, model, parse(RunBody, raw))

    async def run_named(self, request: Request) -> Response:
        """The same with the model beside its input: {model, input, options}."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        raw = await read_body(request)
        if asks_after(raw):
            return await self._queue.poll(principal, None, raw)
        if is_queued(request):
            queued = await run_in_threadpool(parse, NamedRunBody, raw, values_max=QUEUED_VALUES_MAX)
            return await self._queue.submit(request, principal, queued.model, orjson.dumps(queued.input))
        named = parse(NamedRunBody, raw)
        begun = await self._queue.begin(request, principal, named)
        if begun is not None:
            return begun
        if self._embeds(named.model):
            return await self._embed(request, principal, named.model, embed_body(named))
        return await self._run(request, principal, named.model, run_body(named))

    def _embeds(self, model: str) -> bool:
        card = self._services.catalogue.find(model)
        return card is not None and card.task == TEXT_EMBEDDINGS

    async def _embed(self, request: Request, principal: Principal, model: str, body: EmbedBody) -> Response:
        embeddings = self._services.embeddings
        assert embeddings is not None, "an embedding model in the catalogue is served"
        wanted = embed_request(request, principal, model, body)
        return await answered(request, self._services, wanted, partial(embed_answer, embeddings, wanted, body))

    async def _run(self, request: Request, principal: Principal, model: str, body: RunBody) -> Response:
        arrived = arrival(request, self._services, principal, query_tags(request))
        wanted = await formed(body, partial(run_request, model, body, arrived))
        return await answered(request, self._services, wanted, partial(self._answer, request, wanted, body))

    async def _answer(
        self, request: Request, wanted: GenerationRequest, body: RunBody, watch: AbstractAsyncContextManager[object]
    ) -> Response:
        """watch: cancels the work if the client leaves while we wait."""
        if wanted.stream:
            async with watch:
                wanted, stream, told = await streamed(request, self._services, wanted)
            frames = native_frames_with_tools if "tools" in wanted.sampling else native_frames
            return EventStream(
                stream,
                frames(stream, with_usage=body.include_usage is not False),
                request_id=wanted.id,
                headers=answer_headers(stream, body) | told,
            )
        async with watch:
            wanted, completion, told = await completed(request, self._services, wanted)
        return enveloped(
            result(wanted, completion),
            headers=answer_headers(completion, body) | told,
        )
