"""POST /client/v4/accounts/{account_id}/ai/run/{model}."""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.departure import ClientWatch
from api.errors import ParameterUnsupported
from api.intake import arrival
from api.sampling import ignored_headers
from api.services import Services
from api.sse import EventStream
from api.tally import cap_header, neurons_header
from api.workers_ai.envelope import enveloped
from api.workers_ai.native import native_frames
from api.workers_ai.schemas import RunBody
from api.workers_ai.translate import result, run_request
from tenancy.principal import Scope


class RunRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, request: Request) -> Response:
        """Run a model on a prompt or on messages; streamed or whole."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        if b"queueRequest=true" in request.scope["query_string"]:
            raise ParameterUnsupported(("queueRequest",), "batches are not served.")
        body = parse(RunBody, await read_body(request))
        wanted = run_request(request.path_params["model"], body, arrival(request, self._services, principal))
        if wanted.stream:
            async with ClientWatch(request.receive):
                stream = await self._services.pipeline.stream(wanted)
            return EventStream(
                stream,
                native_frames(stream, with_usage=body.include_usage is not False),
                request_id=wanted.id,
                headers={**cap_header(stream.cap), **ignored_headers(body)},
            )
        async with ClientWatch(request.receive):
            completion = await self._services.pipeline.complete(wanted)
        return enveloped(
            result(wanted, completion),
            headers={**neurons_header(completion.settlement), **cap_header(completion.cap), **ignored_headers(body)},
        )
