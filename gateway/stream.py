"""An answer on its way to the client: the engine's chunks, without usage, until the request is settled.

Made by pipeline.py; dialects iterate over it and frame the bytes. It ends in one of three ways: the iteration stops and
`settlement` is set; it raises GenerationFailed; or the owner calls `aclose` because the client has left.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import orjson
import structlog

from backends.errors import BackendError
from backends.wire import EngineUsage
from billing.rating import extension_nano
from billing.usage import TokenUsage
from gateway.engine_call import EngineCall, outcome_of
from gateway.hold import more_outputs
from gateway.request import Endpoint, Outcome, OutputCap, Settlement
from gateway.run import Run, failure
from tenancy.errors import QuotaExceeded

log = structlog.get_logger(__name__)

# A stream that is read slowly throttles its engine rather than fill memory: this many chunks of n choices may wait.
_MERGED_CHUNKS_MAX = 64


class Stream:
    """Iterate for chunk payloads (JSON bytes); afterwards `settlement` is durable.

    created: Unix seconds. cap: what each choice may have. standings: the account's meters as its reservation left them.
    """

    def __init__(self, run: Run, *, outputs_ahead: int) -> None:
        self._run = run
        self._source = _source(run)
        self._first: deque[bytes] = deque()
        self._outputs_ahead = outputs_ahead
        self._held_until = self._metered_until = outputs_ahead * run.request.n
        self._unheld: bytes | None = None  # a chunk whose outputs are not held yet: whoever asks next goes on with it
        self._refused: str | None = None  # the code with which holding them was refused
        self.created = run.request.received_at_ns // 1_000_000_000
        self.endpoint: Endpoint = run.request.endpoint
        self.cap: OutputCap = run.cap
        self.standings = run.hold.standings
        self.settlement: Settlement | None = None
        self._end: Exception | None = None  # how the engine's answer ended, settled or not yet

    @property
    def usage(self) -> TokenUsage:
        """What the engine has said so far, before the settlement."""
        return self._run.usage_so_far()

    async def wait_for_first(self, wait_s: float) -> None:
        """Give the engine `wait_s` to fail while a status can still say so. Raises GenerationFailed (settled)."""
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(wait_s):
                self._first.append(await self.__anext__())

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            return self._first.popleft()
        if self.settlement is not None:
            raise StopAsyncIteration
        if self._end is not None:  # whoever waited for it went away before it was settled
            await self._settle(self._end)
        if self._unheld is not None:  # whoever waited for its hold went away
            return await self._once_held()
        try:
            body = await self._source.next_body()
        except StopAsyncIteration:
            self._end = StopAsyncIteration()
            await self._settle(self._end)
        except BackendError as error:
            log.warning("engine failed", request_id=self._run.request.id, code=error.code, error=error.message)
            self._end = error
            await self._settle(error)
        except Exception as end:  # noqa: BLE001 - whatever ended it is raised again
            self._end = end
            await self._settle(end)
        self._run.note_progress()
        if self._source.outputs() > self._held_until:
            self._unheld = body
            return await self._once_held()
        self._source.passed()
        return body

    async def _once_held(self) -> bytes:
        """The chunk that waits for its hold, or the end of a stream that can't have it. Cancelled, it may be called
        again.
        """
        if self._refused is None:
            self._refused = await self._extend()
        if self._refused is not None:
            await self._cut(self._refused)
            return self._first.popleft()
        assert self._unheld is not None, "it waits"
        body, self._unheld = self._unheld, None
        self._source.passed()
        return body

    async def _settle(self, end: Exception) -> NoReturn:
        """Settle what has ended so, and raise what it means. Cancelled, it may be called again."""
        if isinstance(end, StopAsyncIteration):
            self.settlement = await self._run.settle(Outcome.FINISHED)
            raise StopAsyncIteration
        if isinstance(end, BackendError):
            settlement = await self._run.settle(outcome_of(end), code=end.code)
            raise failure(settlement, "The engine failed while generating.") from end
        await self._run.settle(Outcome.UPSTREAM_FAILED, code="internal_error")
        raise end

    async def _extend(self) -> str | None:
        """Hold the next outputs before they are relayed, and all that came at once: whoever reads slowly, or a call
        that an engine tells when it is whole, has many in one chunk. The code of a refusal. Cancelled, it may be called
        again: what it has taken of the meters stays taken.
        """
        while self._source.outputs() > self._held_until:
            if self._metered_until == self._held_until:
                try:
                    await self._run.hold.extend_meters(more_outputs(self._outputs_ahead, self._run.price))
                except QuotaExceeded as error:
                    return error.code
                self._metered_until += self._outputs_ahead
            if not await self._run.hold.extend_money(extension_nano(self._outputs_ahead, self._run.price)):
                return "budget_reached"
            self._held_until += self._outputs_ahead
        return None

    async def _cut(self, code: str) -> None:
        """Stop the engine. A chunk that is not held goes to nobody; a choice that has no finish chunk gets one with
        "length". Cancelled, it may be called again.
        """
        finishes: list[bytes] = []
        await self._run.stop_readers()
        for call in self._run.calls:
            passed = self._source.usage_passed(call)
            finished = self._source.has_finished(call)
            await call.stop(wait_s=1.0)
            call.usage = passed  # what the engine made beyond it was relayed to nobody
            if not finished:
                call.finish_reason = "length"
                finishes.append(_finish_chunk(self._run, call.index, self.created))
        self.settlement = await self._run.settle(Outcome.FINISHED, code=code)
        self._first.extend(finishes)
        self._unheld = None

    async def cut(self, code: str) -> None:
        """End it behind the chunk that was read last: what has not finished by then ends with "length". Idempotent."""
        finished = all(self._source.has_finished(call) for call in self._run.calls)
        if self.settlement is None and not finished:
            await self._cut(code)

    async def aclose(self) -> None:
        """The client has left: stop the engine, count what it produced, settle. Idempotent; safe after any end."""
        if not self._run.settled:
            self.settlement = await self._run.settle(Outcome.CLIENT_DISCONNECTED)


def _finish_chunk(run: Run, index: int, created: int) -> bytes:
    chat = run.request.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": "length"}
    if chat:
        choice["delta"] = {}
    else:
        choice["text"] = ""
    return orjson.dumps(
        {
            "id": run.request.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": run.request.model,
            "choices": [choice],
        }
    )


class _Single:
    """One choice: its chunks pass straight through."""

    def __init__(self, call: EngineCall) -> None:
        self.next_body = call.next_body
        self._call = call
        self._passed: EngineUsage | None = None
        self._finished = False

    def outputs(self) -> int:
        """With the chunk that was handed out last."""
        usage = self._call.usage
        return 0 if usage is None else usage.completion

    def passed(self) -> None:
        """The chunk that was handed out last is relayed."""
        self._passed, self._finished = self._call.usage, self._call.finish_reason is not None

    def usage_passed(self, call: EngineCall) -> EngineUsage | None:
        """As of the last chunk that was relayed; None if the engine does not say."""
        return self._passed or _nothing_of(call.usage)

    def has_finished(self, _call: EngineCall) -> bool:
        """Whether its finish chunk was relayed: behind it nothing comes that could be cut."""
        return self._finished


class _Piece(NamedTuple):
    call: EngineCall
    body: bytes
    usage: EngineUsage | None
    finished: bool


class _Merged:
    """Several choices: each is read by a task of its own into one bounded queue, in order of arrival.

    The tasks belong to the run, which ends them before it stops the calls that they read. Calls know what was read of
    them; this knows what was handed out.
    """

    def __init__(self, run: Run) -> None:
        self._arrived: asyncio.Queue[_Piece | Exception] = asyncio.Queue(_MERGED_CHUNKS_MAX)
        self._reading = len(run.calls)
        self._last: _Piece | None = None
        self._passed: dict[int, _Piece] = {}
        run.readers = [asyncio.create_task(self._read(call), name=f"read {call.rid}") for call in run.calls]

    async def _read(self, call: EngineCall) -> None:
        try:
            while True:
                body = await call.next_body()
                await self._arrived.put(_Piece(call, body, call.usage, call.finish_reason is not None))
        except Exception as end:  # noqa: BLE001 - whatever ended this choice is raised to whoever reads the stream
            await self._arrived.put(end)

    async def next_body(self) -> bytes:
        while self._reading:
            arrived = await self._arrived.get()
            if isinstance(arrived, _Piece):
                self._last = arrived
                return arrived.body
            if not isinstance(arrived, StopAsyncIteration):
                raise arrived
            self._reading -= 1
        raise StopAsyncIteration

    def outputs(self) -> int:
        """As _Single's."""
        last = [] if self._last is None else [self._last]
        latest = self._passed | {piece.call.index: piece for piece in last}
        return sum(piece.usage.completion for piece in latest.values() if piece.usage)

    def passed(self) -> None:
        """As _Single's."""
        assert self._last is not None, "a chunk was handed out"
        self._passed[self._last.call.index] = self._last

    def usage_passed(self, call: EngineCall) -> EngineUsage | None:
        """As _Single's."""
        piece = self._passed.get(call.index)
        return (piece and piece.usage) or _nothing_of(call.usage)

    def has_finished(self, call: EngineCall) -> bool:
        """As _Single's."""
        piece = self._passed.get(call.index)
        return piece is not None and piece.finished


def _nothing_of(usage: EngineUsage | None) -> EngineUsage | None:
    """The prompt alone, where the engine has said anything."""
    return None if usage is None else usage._replace(completion=0, reasoning=0)


def _source(run: Run) -> _Single | _Merged:
    return _Single(run.calls[0]) if len(run.calls) == 1 else _Merged(run)
