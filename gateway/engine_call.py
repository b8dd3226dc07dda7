"""One call to one engine: the body it gets, what it has produced so far, and how it is stopped.

A request of n choices is n calls with rids of their own (stopping an n = 4 call leaves four running in SGLang). Used by
run.py and pipeline.py. Fields bound for the engine are listed here; nothing else of a client's body reaches it.
"""

import asyncio
from typing import Any

import orjson
import structlog

from backends.client import EngineAnswer, EngineStream
from backends.errors import BackendError, EngineBroke, EngineIntegrityAbort
from backends.wire import EngineUsage, finished_choice, said_in, usage_of
from gateway.replica import Replica
from gateway.request import Endpoint, GenerationRequest, Outcome
from gateway.tool_ids import suffix_of, unique_in_chunk, unique_in_message, without_nulls

log = structlog.get_logger(__name__)

_PATHS = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}
# SGLang wants `messages` even where `input_ids` replace them; it reads them only to derive tool constraints.
_PLACEHOLDER_MESSAGES = [{"role": "user", "content": ""}]
_STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def rid_of(request: GenerationRequest, index: int) -> str:
    """The engine's id of choice `index`. Fixed length for one request: engines match an abort by prefix."""
    return request.id if request.n == 1 else f"{request.id}-{index:03d}"


def outcome_of(error: BackendError) -> Outcome:
    """How a request ends that an engine failed."""
    return Outcome.INTEGRITY_ABORT if isinstance(error, EngineIntegrityAbort) else Outcome.UPSTREAM_FAILED


def engine_body(
    request: GenerationRequest, prompt_ids: list[int], cap_tokens: int, index: int, *, stream: bool, cache_salt: str
) -> bytes:
    """The JSON body of one choice's call: token ids, allowed sampling fields, and ids of ours."""
    fields: dict[str, Any] = {
        **request.sampling,
        "model": request.model,
        "rid": rid_of(request, index),
        "cache_salt": cache_salt,
        "max_tokens": cap_tokens,
        "stream": stream,
    }
    if request.endpoint is Endpoint.CHAT:
        fields["messages"] = _PLACEHOLDER_MESSAGES
        fields["input_ids"] = prompt_ids
    else:
        fields["prompt"] = prompt_ids
    if stream:
        fields["stream_options"] = _STREAM_OPTIONS
    seed = fields.get("seed")
    if seed is not None and index:
        fields["seed"] = (seed + index) & 0x7FFF_FFFF_FFFF_FFFF  # choices of one request must differ
    return orjson.dumps(fields)


def routed(body: bytes, **ranks: int | None) -> bytes:
    """An engine's body with the data-parallel ranks that it is meant for; None: the engine has one.

    body: a JSON object that is not empty.
    """
    fields = {name: rank for name, rank in ranks.items() if rank is not None}
    return body[:-1] + b"," + orjson.dumps(fields)[1:] if fields else body


class EngineCall:
    """One choice's generation. `usage` and `produced_events` are always what is known at this moment.

    at_fault: of a pair, the half that failed (pair_call.py).
    """

    at_fault: Replica | None = None

    def __init__(self, request: GenerationRequest, replica: Replica, index: int, body: bytes) -> None:
        self.index = index
        self.rid = rid_of(request, index)
        self._replica = replica
        self._path = _PATHS[request.endpoint]
        self._body = routed(body, routed_dp_rank=replica.rank)
        self._stream: EngineStream | None = None
        self._answer: EngineAnswer | None = None
        # The answer carries the request's id and the choice's index, which the engine can't know for n > 1.
        self._readdress = None if request.n == 1 else (self.rid.encode(), request.id.encode(), index)
        self._call_suffix = suffix_of(self.rid) if request.sampling.get("tools") else None
        self.usage: EngineUsage | None = None
        # All that a whole answer says, where it came without usage.
        self.unmetered: str | None = None
        self.finish_reason: str | None = None
        self.produced_events = 0
        self.abort_failed = False

    @property
    def wasted_prefill_tokens(self) -> int:
        """Prompt tokens that a pair's prefill half computed for an answer that never began."""
        return 0

    async def answer(self) -> dict[str, Any]:
        """The finished choice of a call that is not streamed. Cancelling this leaves the call to `stop`."""
        self._answer = await self._replica.client.ask(self._path, self._body)
        fields = await self._answer.fields()
        self._read_usage(fields)
        choice = finished_choice(fields)
        self.finish_reason = choice["finish_reason"]
        if self._call_suffix is not None and isinstance(choice.get("message"), dict):
            unique_in_message(choice["message"], self._call_suffix)
        return choice

    def _read_usage(self, fields: dict[str, Any]) -> None:
        """Of a whole answer, finished or given up."""
        self.usage = usage_of(fields.get("usage"))
        if self.usage is None:
            self.unmetered = said_in(fields)

    async def open(self) -> None:
        """Begin a streamed call: returns once the engine has accepted it."""
        self._stream = await self._replica.client.open_stream(self._path, self._body)

    async def next_body(self) -> bytes:
        """The next chunk for the client, without usage.

        Raises StopAsyncIteration at a good end, BackendError at a bad one.
        """
        assert self._stream is not None, "open the stream first"
        while True:
            try:
                chunk = await self._stream.__anext__()
            except StopAsyncIteration:
                if self.finish_reason is None:
                    raise EngineBroke("the engine's stream ended without a finish reason") from None
                raise
            if chunk.usage is not None:
                self.usage = chunk.usage
            if chunk.body is None:
                continue
            if chunk.finish_reason is not None:
                self.finish_reason = chunk.finish_reason
                if chunk.finish_reason == "abort":
                    raise EngineBroke("the engine aborted the request")
            # What says how a chat ended holds no token, unlike the last chunk of a completion.
            self.produced_events += chunk.finish_reason is None or self._path == _PATHS[Endpoint.COMPLETIONS]
            body = chunk.body
            if self._call_suffix is not None:
                body = unique_in_chunk(without_nulls(body), self._call_suffix)
            return self._addressed(body) if self._readdress else body

    def _addressed(self, body: bytes) -> bytes:
        assert self._readdress is not None
        rid, request_id, index = self._readdress
        return body.replace(rid, request_id, 1).replace(b'"index":0', b'"index":%d' % index, 1)

    async def abort(self) -> bool:
        """Tell the engine to stop; its answer then ends by itself. False if it could not be told."""
        try:
            await self._replica.client.abort(self.rid)
        except BackendError as error:
            log.warning("an engine call could not be aborted", rid=self.rid, error=error.message)
            self.abort_failed = True
            return False
        return True

    async def withdraw(self, *, wait_s: float) -> None:
        """Leave an engine that could not be reached, before the request goes elsewhere."""
        del wait_s  # nobody is there to be told
        self.close()

    async def stop(self, *, wait_s: float) -> None:
        """Stop the engine and hear its last word on usage, for at most `wait_s`; then the connection is dropped.

        Nobody may be reading the stream meanwhile. Never raises for the engine's sake: what can't be heard is counted
        from what was seen.
        """
        try:
            async with asyncio.timeout(wait_s):
                if not await self.abort():
                    return  # closing the connection is all that is left
                if self._answer is not None:
                    self._read_usage(await self._answer.fields())
                while self._stream is not None:
                    chunk = await self._stream.__anext__()
                    self.usage = chunk.usage or self.usage
                    self.finish_reason = chunk.finish_reason or self.finish_reason
        except (BackendError, TimeoutError, StopAsyncIteration):
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Drop what is still open. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._answer is not None:
            self._answer.close()
            self._answer = None
