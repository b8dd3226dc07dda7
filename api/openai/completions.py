"""POST …/completions."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.intake import arrival, formed
from api.openai.generate import generate
from api.openai.schemas import CompletionBody
from api.openai.translate import completion_request
from api.services import Services
from tenancy.principal import Scope


class CompletionRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """A completion of one prompt, without a chat template; streamed or whole."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        body = parse(CompletionBody, await read_body(request))
        arrived = arrival(request, self._services, principal)
        wanted = await formed(body, partial(completion_request, body, arrived))
        return await generate(request, self._services, wanted, body)
