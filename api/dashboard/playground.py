"""GET …/playground and its chat: a streamed answer at the account's cost, under the account's own limits.

The chat takes and gives what /v1/chat/completions does, so that what people try here is what programs get.
"""

import time
from typing import Final

from starlette.responses import Response

from api.body import parse
from api.dashboard.access import Visit
from api.dashboard.key_names import PLAYGROUND
from api.dashboard.pages import Pages
from api.errors import BodyNotJson
from api.intake import arrival
from api.openai.generate import generate
from api.openai.schemas import ChatBody
from api.openai.translate import chat_request
from api.refusals import FORESEEN, openai_refusal
from tenancy.authenticate import act_for
from tenancy.principal import Scope

_TASK: Final = "Text Generation"


class PlaygroundPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return self._pages.page(
            visit,
            "playground.html.j2",
            here="playground",
            title="Playground",
            as_of_ns=time.time_ns(),
            models=[card for card in visit.services.catalogue.all() if card.task == _TASK],
            chosen=visit.request.query_params.get("model", ""),
        )

    async def chat(self, visit: Visit) -> Response:
        """JSON in, and out as OpenAI's dialect has it, refusals too: the page's script reads both."""
        services = visit.services
        try:
            body = getattr(visit.request.state, "body", None)
            if body is None:
                raise BodyNotJson("Send JSON.")
            principal = await services.database.call(
                act_for, services.database, visit.account_id, PLAYGROUND, frozenset({Scope.AI_RUN})
            )
            chat = parse(ChatBody, body)
            wanted = chat_request(chat, arrival(visit.request, services, principal))
            return await generate(visit.request, services, wanted, chat)
        except FORESEEN as error:
            return openai_refusal(error, request_id=visit.request.state.request_id)
