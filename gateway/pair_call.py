"""One call to a prefill/decode pair: the same body to both halves, decode's answer to the client, one end for both.

Made by pipeline.py in place of an EngineCall where another engine computes the prompt. The halves find each other by a
bootstrap room, a random number of ours. Decode can't answer before prefill has handed the prompt's pages over, so until
its first token whichever half fails ends the call for both; afterwards prefill has nothing left to do that a client
could miss.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
import structlog

from backends.errors import BackendError, EngineBroke
from backends.wire import EngineUsage, finished_choice, usage_of
from gateway.engine_call import EngineCall, routed
from gateway.replica import Replica
from gateway.request import GenerationRequest

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Rooms are drawn at random: two of a million live ones meet with a probability of 5e-8.
_ROOM_BITS = 63
# Prefill answers when its pages have been sent, which decode's first token shows: its last word is on the way.
_LAST_WORD_S = 1.0
# How decode says, in SGLang's words, that it is the other half that failed.
_PREFILL_LOST = "Lost connection with prefill"


def pair_body(body: bytes, bootstrap: tuple[str, int], room: int) -> bytes:
    """An engine's body with the fields by which the halves meet. They are ours alone: nothing of a client's reaches
    them. body: a JSON object that is not empty. bootstrap: host and port at which prefill is asked for its pages.
    """
    host, port = bootstrap
    fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    return body[:-1] + b"," + orjson.dumps(fields)[1:]


class PairCall(EngineCall):
    """One choice's generation by a prefill and a decode half.

    prompt_done: called once, when prefill no longer holds the prompt's pages.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prefill: Replica,
        decode: Replica,
        index: int,
        body: bytes,
        *,
        prompt_done: Callable[[], None],
    ) -> None:
        assert prefill.bootstrap is not None, "a prefill half has an address where it hands pages over"
        rank = prefill.rank
        # Told the rank, decode asks there for its pages, whatever the room would say by SGLang's own rule.
        body = routed(pair_body(body, prefill.bootstrap, secrets.randbits(_ROOM_BITS)), disagg_prefill_dp_rank=rank)
        super().__init__(request, decode, index, body)
        self._prefill = prefill
        self._prompt_body = routed(body, routed_dp_rank=rank)
        self._prompt_done = prompt_done
        self._streams = False
        self._prefilling: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._decoding: asyncio.Task[Any] | None = None  # what decode is read with while prefill may still fail
        self._prompt_usage: EngineUsage | None = None

    @property
    def usage(self) -> EngineUsage | None:
        """Decode's counts, and prefill's of what it found in its cache: decode may not know."""
        usage, prompt = self._usage, self._prompt_usage
        if usage is None or prompt is None:
            return usage
        return usage._replace(cached=min(prompt.cached, usage.prompt))

    @usage.setter
    def usage(self, usage: EngineUsage | None) -> None:
        self._usage = usage

    @property
    def begun(self) -> bool:
        """Has decode produced a token? Then it has the prompt's pages."""
        return self.usage is not None and self.usage.completion > 0

    @property
    def wasted_prefill_tokens(self) -> int:
        prompt = self._prompt_usage
        return 0 if prompt is None or self.begun else prompt.prompt - min(prompt.cached, prompt.prompt)

    async def answer(self) -> dict[str, Any]:
        self._begin_prefill()
        choice: dict[str, Any] = await self._decoded(asyncio.create_task(super().answer(), name=f"decode {self.rid}"))
        await self._last_word()
        return choice

    async def open(self) -> None:
        self._streams = True
        self._begin_prefill()
        await self._decoded(asyncio.create_task(super().open(), name=f"decode {self.rid}"))

    async def next_body(self) -> bytes:
        try:
            if self.begun and self._decoding is None:
                return await super().next_body()
            # An interrupted read goes on where it was: its chunk may have arrived meanwhile.
            reading = self._decoding or asyncio.create_task(super().next_body(), name=f"decode {self.rid}")
            body: bytes = await self._decoded(reading)
        except StopAsyncIteration:
            await self._last_word()
            raise
        except BackendError as error:
            self._blame(error)
            raise
        return body

    def _begin_prefill(self) -> None:
        self._prefilling = asyncio.create_task(self._compute_prompt(), name=f"prefill {self.rid}")

    async def _compute_prompt(self) -> None:
        """Read prefill's answer to its end. Raises BackendError if it did not compute the prompt."""
        client, finish_reason = self._prefill.client, None
        if self._streams:
            stream = await client.open_stream(self._path, self._prompt_body)
            try:
                usage = None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    finish_reason = chunk.finish_reason or finish_reason
            finally:
                stream.close()
        else:
            answer = await client.ask(self._path, self._prompt_body)
            try:
                fields = await answer.fields()
            finally:
                answer.close()
            usage, finish_reason = usage_of(fields.get("usage")), finished_choice(fields)["finish_reason"]
        if finish_reason in {None, "abort"}:
            raise EngineBroke(f"prefill gave the request up: finish_reason {finish_reason!r}")
        self._prompt_usage = usage
        self._leave_prefill()

    async def _decoded(self, decoding: "asyncio.Task[T]") -> T:
        """What decode answers; or raises, once decode is let go, what prefill failed with before decode had a token."""
        assert self._prefilling is not None, "prefill begins first"
        self._decoding = decoding
        while not decoding.done():
            waiting: set[asyncio.Task[Any]] = {decoding}
            if not self._prefilling.done():
                waiting.add(self._prefilling)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            self._raise_prefills_failure()
        self._decoding = None
        try:
            return decoding.result()
        except BackendError as error:
            self._raise_prefills_failure()
            self._blame(error)
            raise

    def _raise_prefills_failure(self) -> None:
        assert self._prefilling is not None, "prefill has begun"
        if self._prefilling.done() and not self.begun and (error := self._prefilling.exception()) is not None:
            self.at_fault = self._prefill
            raise error

    def _blame(self, error: BackendError) -> None:
        if self.at_fault is None:
            self.at_fault = self._prefill if _PREFILL_LOST in error.message else self._replica

    async def _last_word(self) -> None:
        """Prefill's count of cached tokens, which is billed, is worth a short wait at the end of an answer."""
        assert self._prefilling is not None, "prefill has begun"
        await asyncio.wait({self._prefilling}, timeout=_LAST_WORD_S)
        if self._prompt_usage is None:
            log.warning("prefill did not say what it found in its cache", rid=self.rid)

    async def abort(self) -> bool:
        """Tell both halves to stop. False if decode could not be told."""
        if self._prefilling is not None and not self._prefilling.done():
            self._telling = asyncio.create_task(self._abort_prefill(), name=f"abort prefill {self.rid}")
        return await super().abort()

    async def _abort_prefill(self) -> None:
        try:
            await self._prefill.client.abort(self.rid)
        except BackendError as error:
            log.warning("a prefill could not be aborted", rid=self.rid, error=error.message)

    async def withdraw(self, *, wait_s: float) -> None:
        """A half may have the request and wait for the other: it is told, not only left."""
        await self.stop(wait_s=wait_s)

    async def stop(self, *, wait_s: float) -> None:
        if self._decoding is not None:
            self._decoding.cancel()
            await asyncio.wait({self._decoding})
        await super().stop(wait_s=wait_s)
        ending = {task for task in (self._prefilling, self._telling) if task is not None and not task.done()}
        if ending:
            await asyncio.wait(ending, timeout=wait_s)
        self._end_tasks()

    def close(self) -> None:
        super().close()
        self._end_tasks()

    def _end_tasks(self) -> None:
        for task in (self._prefilling, self._telling, self._decoding):
            if task is not None and not task.cancel() and not task.cancelled():
                task.exception()  # seen: nobody waits for it any more
        self._leave_prefill()

    def _leave_prefill(self) -> None:
        prompt_done, self._prompt_done = self._prompt_done, _nothing
        prompt_done()


def _nothing() -> None:
    """What is left to do once prefill's pages have been given back."""
