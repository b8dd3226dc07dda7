"""OpenAI's batches: how lines of a file are run, and how what became of them reads in the files of answers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson

from api.body import parse
from api.errors import ParameterUnsupported, row_of
from api.intake import formed
from api.line_work import LineWork, end_by
from api.openai.embeddings import EmbeddingsBody, embeddings_answer, embeddings_request
from api.openai.responses_schemas import ResponsesBody
from api.openai.responses_translate import answer as response
from api.openai.responses_translate import responses_request
from api.openai.schemas import ChatBody, CompletionBody
from api.openai.translate import answer, chat_request, completion_request
from api.refusals import FORESEEN, openai_error, public_text
from gateway.batches.batch import STOPPED, Batch, Line, LineState
from gateway.batches.form import Keep, LineEnd
from gateway.batches.line_rows import Undone
from gateway.embedding import Embedded, EmbeddingRequest
from gateway.request import Completion, GenerationRequest

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
ENDPOINTS: Final = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)

_UNRUN: Final = {
    LineState.CANCELLED: ("batch_cancelled", "This request was not run: its batch was cancelled."),
    LineState.EXPIRED: ("batch_expired", "This request could not be run before the completion window expired."),
    LineState.FAILED: (STOPPED["code"], STOPPED["message"]),
}
_LOST: Final = (
    "The server stopped while this request ran. What it had produced by then is lost, and it is not run again."
)


class OpenAIForm:
    def __init__(self, work: LineWork) -> None:
        self._work = work

    async def run(self, batch: Batch, line: Line, keep: Keep, begun: Callable[[], None]) -> LineEnd:
        wrong = partial(_refused, line)
        try:
            arrived = self._work.arrival(batch, line, await self._work.bearer(batch))
            if batch.endpoint == EMBEDDINGS:
                body = parse(EmbeddingsBody, line.body)
                wanted = embeddings_request(
                    body,
                    self._work.catalogue,
                    arrived.id,
                    arrived.principal,
                    arrived.received_at_ns,
                    tags=arrived.tags,
                )
                return await self._work.embed(wanted, partial(_embedded, line, body), keep, begun)
            if batch.endpoint == RESPONSES:
                asks = parse(ResponsesBody, line.body)
                _refuse_kept(asks)
                asked = await formed(asks, partial(responses_request, asks, arrived))
                return await self._work.generate(
                    line, asked, partial(_responded, line, asks), wrong, keep=keep, begun=begun
                )
            if batch.endpoint == CHAT:
                chat = parse(ChatBody, line.body)
                asked = await formed(chat, partial(chat_request, chat, arrived))
            else:
                completion = parse(CompletionBody, line.body)
                asked = await formed(completion, partial(completion_request, completion, arrived))
            return await self._work.generate(line, asked, partial(_completed, line), wrong, keep=keep, begun=begun)
        except FORESEEN as error:
            return end_by(error, wrong(error))

    def unrun(self, batch: Batch, line: Undone) -> bytes:
        code, message = _UNRUN[line.state]
        return _written(batch.id, line.number, line.custom_id, None, {"code": code, "message": message})

    def lost(self, batch: Batch, line: Line) -> bytes:
        return _written(batch.id, line.number, line.custom_id, None, {"code": "server_stopped", "message": _LOST})


def _completed(line: Line, wanted: GenerationRequest, completion: Completion) -> bytes:
    return _answered(line, 200, answer(wanted, completion))


def _responded(line: Line, body: ResponsesBody, wanted: GenerationRequest, completion: Completion) -> bytes:
    return _answered(line, 200, response(wanted, body, completion))


def _refuse_kept(body: ResponsesBody) -> None:
    """What a line says is kept in its batch's file, and lines run in no order."""
    for name, asked in (("store", body.store), ("previous_response_id", body.previous_response_id)):
        if asked:
            raise ParameterUnsupported((name,), "a batch's responses are not kept and go on from none; send all input.")


def _embedded(line: Line, body: EmbeddingsBody, wanted: EmbeddingRequest, embedded: Embedded) -> bytes:
    return _answered(line, 200, embeddings_answer(body, wanted, embedded))


def _refused(line: Line, error: Exception) -> bytes:
    row = row_of(error)
    body = openai_error(error, row, public_text(error, row, request_id=line.request_id))
    return _answered(line, row.status, {"error": body["error"]})


def _answered(line: Line, status: int, body: dict[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": line.request_id, "body": body}
    return _written(line.batch_id, line.number, line.custom_id, response, None)


def _written(
    batch_id: str, number: int, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    line_id = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    return orjson.dumps({"id": line_id, "custom_id": custom_id, "response": response, "error": error})
