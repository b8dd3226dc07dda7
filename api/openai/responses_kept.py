"""Responses that are kept with `store: true`: going on from them, reading them and their input, deleting them."""

from typing import Any

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.console.schemas import read_query
from api.errors import ParameterUnsupported
from api.openai.responses_items import InputItemsQuery, input_item_page
from api.openai.responses_schemas import ResponsesBody
from api.services import Services
from gateway.conversations import Conversation
from gateway.request import GenerationRequest
from tenancy.errors import TenancyError
from tenancy.principal import Principal, Scope

log = structlog.get_logger(__name__)


async def earlier_items(body: ResponsesBody, principal: Principal, services: Services) -> list[dict[str, Any]]:
    """What was said until the response that this one goes on from. Raises AnswerUnknown."""
    if body.previous_response_id is None:
        return []
    kept, call = services.conversations, services.database.call
    conversation = await call(kept.get, principal.account_id, body.previous_response_id)
    items: list[dict[str, Any]] = orjson.loads(conversation.turns)
    return items


async def keep(
    request: GenerationRequest,
    body: ResponsesBody,
    items: list[dict[str, Any]],
    answer: dict[str, Any],
    services: Services,
) -> None:
    """Before the answer's end goes out, so that whoever has it can go on from it.

    One that is too large or can't be written now is not kept: going on from it says so, and nobody waits for it here.
    """
    if not body.store:
        return
    kept, account_id = services.conversations, request.principal.account_id
    conversation = Conversation(orjson.dumps([*items, *answer["output"]]), orjson.dumps(answer))
    if not kept.fits(conversation):
        log.info("response too large to be kept", request_id=request.id)
        return
    try:
        await services.database.call(kept.keep, account_id, request.id, conversation)
    except TenancyError as error:
        log.warning("response not kept", request_id=request.id, error=str(error))


class KeptResponseRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def retrieve(self, request: Request) -> Response:
        """A response that was kept, as it was given."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        # A client that waits for events would take the whole answer for a stream without any.
        if request.query_params.get("stream") == "true":
            raise ParameterUnsupported(("stream",), "a kept response is given whole; stream the one that is asked for.")
        kept = self._services.conversations
        found = await self._services.database.call(kept.get, principal.account_id, request.path_params["response_id"])
        return Response(found.answer, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """What a kept response was given, the last item first: input, and the turns that it went on from."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        query = read_query(InputItemsQuery, request)
        response_id, kept = request.path_params["response_id"], self._services.conversations
        found = await self._services.database.call(kept.get, principal.account_id, response_id)
        turns: list[dict[str, Any]] = orjson.loads(found.turns)
        given = turns[: len(turns) - len(orjson.loads(found.answer)["output"])]
        return Response(orjson.dumps(input_item_page(response_id, given, query)), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Forget a response that was kept. Those that went on from it hold what was said in it."""
        principal = await permitted(request, self._services, Scope.AI_RUN)
        response_id = request.path_params["response_id"]
        await self._services.database.call(self._services.conversations.delete, principal.account_id, response_id)
        return Response(
            orjson.dumps({"id": response_id, "object": "response.deleted", "deleted": True}),
            media_type="application/json",
        )
