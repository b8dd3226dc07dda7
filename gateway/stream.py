"""An answer on its way to the client: the engine's chunks, without usage, until the request is settled.

Made by pipeline.py; dialects iterate over it and frame the bytes. It ends in one of three ways: the iteration stops and
`settlement` is set; it raises GenerationFailed; or the owner calls `aclose` because the client has left.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, NoReturn

import orjson
import structlog

from backends.errors import BackendError
from billing.rating import extension_nano
from billing.usage import TokenUsage
from gateway.engine_call import EngineCall, outcome_of
from gateway.errors import GenerationFailed
from gateway.hold import more_outputs
from gateway.request import Endpoint, Outcome, OutputCap, Settlement
from gateway.run import Run
from tenancy.errors import QuotaExceeded

log = structlog.get_logger(__name__)

# A stream that is read slowly throttles its engine rather than fill memory: this many chunks of n choices may wait.
_MERGED_CHUNKS_MAX = 64


class Stream:
    """Iterate for chunk payloads (JSON bytes); afterwards `settlement` is durable.

    created: Unix seconds. cap: what each choice may have. standings: the account's meters as its reservation left them.
    budget_reached: the stream was cut because the account could not hold more money or tokens of the minute for it
    (its finish reason is "length").
    """

    def __init__(self, run: Run, *, outputs_ahead: int) -> None:
        self._run = run
        self._source = _source(run)
        self._first: deque[bytes] = deque()
        self._outputs_ahead = outputs_ahead
        self._held_until = outputs_ahead * run.request.n
        self.created = run.request.received_at_ns // 1_000_000_000
        self.endpoint: Endpoint = run.request.endpoint
        self.cap: OutputCap = run.cap
        self.standings = run.hold.standings
        self.settlement: Settlement | None = None
        self._end: Exception | None = None  # how the engine's answer ended, settled or not yet
        self.budget_reached = False

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
        if self._needs_more():
            refused = await self._extend()
            if refused is not None:
                return await self._cut(body, refused)
        return body

    async def _settle(self, end: Exception) -> NoReturn:
        """Settle what has ended so, and raise what it means. Cancelled, it may be called again."""
        if isinstance(end, StopAsyncIteration):
            self.settlement = await self._run.settle(Outcome.FINISHED)
            raise StopAsyncIteration
        if isinstance(end, BackendError):
            await self._run.settle(outcome_of(end), code=end.code)
            raise GenerationFailed("The engine failed while generating. You are not charged.") from end
        await self._run.settle(Outcome.UPSTREAM_FAILED, code="internal_error")
        raise end

    def _needs_more(self) -> bool:
        calls = self._run.calls
        if len(calls) == 1:
            usage = calls[0].usage
            return usage is not None and usage.completion >= self._held_until
        return sum(call.usage.completion for call in calls if call.usage) >= self._held_until

    async def _extend(self) -> str | None:
        """Hold the next outputs before they are relayed; one step's overrun is ours. The code of a refusal."""
        try:
            await self._run.hold.extend_meters(more_outputs(self._outputs_ahead, self._run.price))
        except QuotaExceeded as error:
            return error.code
        if not await self._run.hold.extend_money(extension_nano(self._outputs_ahead, self._run.price)):
            return "budget_reached"
        self._held_until += self._outputs_ahead
        return None

    async def _cut(self, body: bytes, code: str) -> bytes:
        """Stop the engine: what was held is used up. The last chunk goes out, then a finish chunk with "length"."""
        self.budget_reached = True
        await self._run.stop_readers()
        self._first.extend(self._source.waiting())
        for call in self._run.calls:
            seen = call.usage
            await call.stop(wait_s=1.0)
            call.usage = seen  # what the engine made beyond it was relayed to nobody
            call.finish_reason = "length"
            self._first.append(_finish_chunk(self._run, call.index, self.created))
        self.settlement = await self._run.settle(Outcome.FINISHED, code=code)
        return body

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

    @staticmethod
    def waiting() -> list[bytes]:
        """Chunks that were read and not handed out."""
        return []


class _Merged:
    """Several choices: each is read by a task of its own into one bounded queue, in order of arrival.

    The tasks belong to the run, which ends them before it stops the calls that they read.
    """

    def __init__(self, run: Run) -> None:
        self._arrived: asyncio.Queue[bytes | Exception] = asyncio.Queue(_MERGED_CHUNKS_MAX)
        self._reading = len(run.calls)
        run.readers = [asyncio.create_task(self._read(call), name=f"read {call.rid}") for call in run.calls]

    async def _read(self, call: EngineCall) -> None:
        try:
            while True:
                await self._arrived.put(await call.next_body())
        except Exception as end:  # noqa: BLE001 - whatever ended this choice is raised to whoever reads the stream
            await self._arrived.put(end)

    async def next_body(self) -> bytes:
        while self._reading:
            arrived = await self._arrived.get()
            if isinstance(arrived, bytes):
                return arrived
            if not isinstance(arrived, StopAsyncIteration):
                raise arrived
            self._reading -= 1
        raise StopAsyncIteration

    def waiting(self) -> list[bytes]:
        """Chunks that were read and not handed out."""
        arrived = [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
        return [body for body in arrived if isinstance(body, bytes)]


def _source(run: Run) -> _Single | _Merged:
    return _Single(run.calls[0]) if len(run.calls) == 1 else _Merged(run)
