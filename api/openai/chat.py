"""POST …/chat/completions."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.intake import arrival, formed
from api.openai.generate import generate
from api.openai.schemas import ChatBody
from api.openai.translate import chat_request
from api.services import Services
from tenancy.principal import Scope


class ChatRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request) -> Response:
        """A chat completion, streamed or whole."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        body = parse(ChatBody, await read_body(request))
        arrived = arrival(request, self._services, principal)
        wanted = await formed(body, partial(chat_request, body, arrived))
        return await generate(request, self._services, wanted, body)
