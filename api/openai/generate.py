"""What /chat/completions and /completions share once they hold a GenerationRequest: run it, and answer or stream."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.answer_headers import answer_headers
from api.idempotency import answered
from api.openai.translate import answer, usage_chunk
from api.persistence import completed, streamed
from api.sampling import GenerationOptions
from api.services import Services
from api.sse import DONE, EventStream, data_frame
from gateway.request import GenerationRequest
from gateway.stream import Stream


def generate(
    request: Request, services: Services, wanted: GenerationRequest, options: GenerationOptions
) -> Awaitable[Response]:
    """Refusals are raised before anything is sent."""
    return answered(request, services, wanted, partial(_generate, request, services, wanted, options))


async def _generate(
    request: Request,
    services: Services,
    wanted: GenerationRequest,
    options: GenerationOptions,
    watch: AbstractAsyncContextManager[object],
) -> Response:
    """watch: cancels the work if the client leaves while we wait."""
    if wanted.stream:
        async with watch:
            wanted, stream, told = await streamed(request, services, wanted)
        return EventStream(
            stream,
            _frames(stream, wanted, with_usage=_usage_is_sent(request, options)),
            request_id=wanted.id,
            headers=answer_headers(stream, options) | told,
        )
    async with watch:
        wanted, completion, told = await completed(request, services, wanted)
    return Response(
        orjson.dumps(answer(wanted, completion)),
        headers=answer_headers(completion, options) | told,
        media_type="application/json",
    )


async def _frames(stream: Stream, wanted: GenerationRequest, *, with_usage: bool) -> AsyncIterator[bytes]:
    """The engine's chunks, byte for byte; then usage, once; then [DONE], once.

    No await in a `finally` here: it would be cancelled with the client's departure.
    """
    async for payload in stream:
        yield data_frame(payload)
    if with_usage:
        assert stream.settlement is not None, "a stream that ended well is settled"
        yield data_frame(orjson.dumps(usage_chunk(wanted, stream.created, stream.settlement)))
    yield DONE


def _usage_is_sent(request: Request, options: GenerationOptions) -> bool:
    """Under /client/v4 unless it was declined, as Workers AI; under /v1 only if it was asked for, as OpenAI."""
    if "account_id" in request.path_params:
        return options.include_usage is not False
    return options.include_usage is True
