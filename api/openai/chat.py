"""POST …/chat/completions."""

from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.intake import arrival
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
        wanted = chat_request(body, arrival(request, self._services, principal))
        return await generate(request, self._services, wanted, body)
