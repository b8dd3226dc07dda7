"""POST /client/v4/accounts/{account_id}/ai/run/{model}, and …/ai/run with the model in the body."""

from contextlib import AbstractAsyncContextManager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.errors import ParameterUnsupported
from api.idempotency import answered
from api.intake import arrival
from api.rate_limit_headers import rate_limit_headers
from api.sampling import ignored_headers
from api.services import Services
from api.sse import EventStream
from api.tally import cap_header, neurons_header
from api.workers_ai.envelope import enveloped
from api.workers_ai.native import native_frames, native_frames_with_tools
from api.workers_ai.schemas import NamedRunBody, RunBody
from api.workers_ai.translate import result, run_body, run_request
from gateway.request import GenerationRequest
from tenancy.principal import Principal, Scope


class RunRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, request: Request) -> Response:
        """Run a model on a prompt or on messages; streamed or whole."""
        principal = await self._runner(request)
        body = parse(RunBody, await read_body(request))
        return await self._run(request, principal, request.path_params["model"], body)

    async def run_named(self, request: Request) -> Response:
        """The same with the model beside its input: {model, input, options}."""
        principal = await self._runner(request)
        named = parse(NamedRunBody, await read_body(request))
        return await self._run(request, principal, named.model, run_body(named))

    async def _runner(self, request: Request) -> Principal:
        principal = await permitted(request, self._services, Scope.AI_RUN)
        if b"queueRequest=true" in request.scope["query_string"]:
            raise ParameterUnsupported(("queueRequest",), "batches are not served.")
        return principal

    async def _run(self, request: Request, principal: Principal, model: str, body: RunBody) -> Response:
        wanted = run_request(model, body, arrival(request, self._services, principal))
        return await answered(request, self._services, wanted, partial(self._answer, wanted, body))

    async def _answer(
        self, wanted: GenerationRequest, body: RunBody, watch: AbstractAsyncContextManager[object]
    ) -> Response:
        """watch: cancels the work if the client leaves while we wait."""
        if wanted.stream:
            async with watch:
                stream = await self._services.pipeline.stream(wanted)
            frames = native_frames_with_tools if "tools" in wanted.sampling else native_frames
            return EventStream(
                stream,
                frames(stream, with_usage=body.include_usage is not False),
                request_id=wanted.id,
                headers={
                    **cap_header(stream.cap),
                    **rate_limit_headers(stream.standings),
                    **ignored_headers(body),
                },
            )
        async with watch:
            completion = await self._services.pipeline.complete(wanted)
        return enveloped(
            result(wanted, completion),
            headers={
                **neurons_header(completion.settlement),
                **cap_header(completion.cap),
                **rate_limit_headers(completion.standings),
                **ignored_headers(body),
            },
        )
