"""POST …/responses: OpenAI's newer shape of a chat, for text; the gateway runs and settles it as any chat."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from api.answer_headers import answer_headers
from api.auth import permitted
from api.body import parse, read_body
from api.errors import row_of
from api.idempotency import answered
from api.intake import arrival, formed
from api.openai.responses_events import ResponseEvents
from api.openai.responses_kept import earlier_items, keep
from api.openai.responses_schemas import ResponsesBody
from api.openai.responses_translate import answer, input_items, responses_request
from api.persistence import completed, streamed
from api.refusals import FORESEEN
from api.services import Services
from api.sse import EventStream
from gateway.request import GenerationRequest
from gateway.stream import Stream
from tenancy.principal import Scope

log = structlog.get_logger(__name__)


class ResponsesRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """A response, streamed or whole. Refusals are raised before anything is sent."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        body = parse(ResponsesBody, await read_body(request))
        body.refuse_unserved()
        earlier = await earlier_items(body, principal, self._services)
        arrived = arrival(request, self._services, principal)
        wanted = await formed(body, partial(responses_request, body, arrived, earlier))
        said = [*earlier, *input_items(body)] if body.store else []
        run = partial(self._answer, request, wanted, body, said)
        return await answered(request, self._services, wanted, run, besides=_repeated(body))

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        body: ResponsesBody,
        said: list[dict[str, Any]],
        watch: AbstractAsyncContextManager[object],
    ) -> Response:
        """watch: cancels the work if the client leaves while we wait."""
        if wanted.stream:
            async with watch:
                wanted, stream, told = await streamed(request, self._services, wanted)
            return EventStream(
                stream,
                self._frames(stream, wanted, body, said),
                request_id=wanted.id,
                headers=answer_headers(stream, body) | told,
            )
        async with watch:
            wanted, completion, told = await completed(request, self._services, wanted)
        told_answer = answer(wanted, body, completion)
        await keep(wanted, body, said, told_answer, self._services)
        return Response(
            orjson.dumps(told_answer),
            headers=answer_headers(completion, body) | told,
            media_type="application/json",
        )

    async def _frames(
        self, stream: Stream, wanted: GenerationRequest, body: ResponsesBody, said: list[dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        """A stream of this dialect says itself that it failed: its last event is a response with the error."""
        events = ResponseEvents(wanted, body, stream.created)
        for frame in events.opening():
            yield frame
        try:
            async for payload in stream:
                for frame in events.chunk(payload):
                    yield frame
        except FORESEEN as error:
            log.warning("stream failed", request_id=wanted.id, error=type(error).__name__)
            row = row_of(error)
            text = row.says if row.says is not None else str(error)
            for frame in events.failing({"code": row.type, "message": text}):
                yield frame
            return
        assert stream.settlement is not None, "a stream that ended well is settled"
        ending = list(events.ending(stream.settlement))
        assert events.final is not None, "an ended answer is whole"
        await keep(wanted, body, said, events.final, self._services)
        for frame in ending:
            yield frame


def _repeated(body: ResponsesBody) -> dict[str, Any]:
    """What an answer repeats, and whether it is kept: the gateway knows nothing of either."""
    return {
        "store": body.store or None,
        "metadata": body.metadata or None,
        "previous_response_id": body.previous_response_id,
    }
