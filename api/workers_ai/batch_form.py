"""Workers AI's batches and background runs: how their lines are run, and how what became of them reads.

A line of a batch is one body of /ai/run. The line of a background run has the format of its webhook beside the body,
and what it says is the message that the webhook gets.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import orjson

from api.body import parse
from api.errors import row_of
from api.intake import formed
from api.line_work import LineWork, end_by
from api.refusals import FORESEEN, public_text
from api.tally import embedding_usage_object, usage_object
from api.workers_ai.embed import EmbedBody, embed_result, embedding_request
from api.workers_ai.schemas import RunBody
from api.workers_ai.translate import result, run_request
from gateway.batches.batch import STOPPED, Batch, FormName, Line, LineState
from gateway.batches.form import Keep, LineEnd
from gateway.batches.line_rows import Undone
from gateway.embedding import Embedded, EmbeddingRequest
from gateway.request import Completion, GenerationRequest

Format = Literal["raw", "chat"]

# Of a chat completion, where the webhook asked for one.
_CHAT_FIELDS: Final = ("id", "object", "created", "model", "choices", "usage")
_PROVIDER: Final = "workers-ai"
_UNRUN: Final = {
    LineState.CANCELLED: "This request was not run: it was cancelled.",
    LineState.EXPIRED: "This request could not be run within its time.",
    LineState.FAILED: STOPPED["message"],
}
_LOST: Final = (
    "The server stopped while this request ran. What it had produced by then is lost, and it is not run again."
)
# Workers AI's codes: an inference that was stopped, and one that failed.
_STOPPED, _FAILED = 3046, 3043


class WorkersForm:
    def __init__(self, work: LineWork) -> None:
        self._work = work

    async def run(self, batch: Batch, line: Line, keep: Keep, begun: Callable[[], None]) -> LineEnd:
        asked, shape = line.body, "raw"
        if batch.form is FormName.BACKGROUND:
            held = orjson.loads(line.body)
            asked, shape = orjson.dumps(held["input"]), held["format"]
        wrong = partial(_refused, batch, line)
        try:
            arrived = self._work.arrival(batch, line, await self._work.bearer(batch))
            if self._work.embeds(batch.model):
                texts = parse(EmbedBody, asked)
                wanted = embedding_request(
                    arrived.id, arrived.principal, batch.model, texts, arrived.received_at_ns, tags=arrived.tags
                )
                return await self._work.embed(wanted, partial(_embedded, batch, line), keep, begun)
            body = parse(RunBody, asked)
            request = await formed(body, partial(run_request, batch.model, body, arrived))
            write = partial(_completed, batch, line, shape)
            return await self._work.generate(line, request, write, wrong, keep=keep, begun=begun)
        except FORESEEN as error:
            return end_by(error, wrong(error))

    def unrun(self, batch: Batch, line: Undone) -> bytes:
        return _bad(batch, line.number, line.custom_id, line.state.value, _STOPPED, _UNRUN[line.state])

    def lost(self, batch: Batch, line: Line) -> bytes:
        return _bad(batch, line.number, line.custom_id, "failed", _FAILED, _LOST)


def background_body(read: dict[str, Any], shape: Format) -> bytes:
    return orjson.dumps({"input": read, "format": shape})


def _completed(batch: Batch, line: Line, shape: str, wanted: GenerationRequest, completion: Completion) -> bytes:
    told = result(wanted, completion)
    if shape == "chat":
        told = {name: told[name] for name in _CHAT_FIELDS}
    return _good(batch, line, told, usage_object(completion.settlement))


def _embedded(batch: Batch, line: Line, _wanted: EmbeddingRequest, embedded: Embedded) -> bytes:
    return _good(batch, line, embed_result(embedded), embedding_usage_object(embedded.settlement))


def _refused(batch: Batch, line: Line, error: Exception) -> bytes:
    row = row_of(error)
    text = public_text(error, row, request_id=line.request_id)
    return _bad(batch, line.number, line.custom_id, "failed", row.number, text)


def _good(batch: Batch, line: Line, told: dict[str, Any], usage: dict[str, Any]) -> bytes:
    if batch.form is FormName.BACKGROUND:
        return orjson.dumps(_message(batch, "completed", told, None, usage))
    item = {"id": line.number, "result": told, "success": True, "errors": []}
    return orjson.dumps(item | _reference(line.custom_id))


def _bad(  # noqa: PLR0917 - of which line, and what is wrong with it
    batch: Batch, number: int, reference: str | None, state: str, code: int, text: str
) -> bytes:
    error = {"code": code, "message": text}
    if batch.form is FormName.BACKGROUND:
        return orjson.dumps(_message(batch, state, None, error, None))
    item = {"id": number, "result": None, "success": False, "errors": [error]}
    return orjson.dumps(item | _reference(reference))


def _reference(reference: str | None) -> dict[str, str]:
    return {} if reference is None else {"external_reference": reference}


def _message(
    batch: Batch, state: str, told: dict[str, Any] | None, error: dict[str, Any] | None, usage: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": batch.id,
        "state": state,
        "result": told,
        "error": error,
        "provider": _PROVIDER,
        "model": batch.model if told is None else told.get("model", batch.model),  # a fallback may have served it
        "usage": usage,
    }
