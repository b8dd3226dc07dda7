"""A request that may be tried again: by the same model after an engine's fault, then by those that it falls back to.

The dialects call it as they would the pipeline. Each attempt is a request of its own to the pipeline: an id, a hold and
a settlement, priced and limited as the model that it is for. Nothing is tried again once an answer has begun.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import structlog

from gateway.errors import (
    Draining,
    EngineUnavailable,
    Evicted,
    FirstByteLate,
    GenerationCutOff,
    GenerationFailed,
    Rejected,
)
from gateway.pipeline import Pipeline
from gateway.request import Completion, GenerationRequest
from gateway.stream import Stream
from tenancy.values import value

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer", Completion, Stream)

ATTEMPTS_MAX: Final = 5
DELAY_S_MAX: Final = 5.0
# Where the client sets no bound of its own, a stream's first chunk is waited for until the engine's own bounds end it.
_FIRST_EVENT_S: Final = 900.0
# Whose fault it is that there is no answer: of an engine, which may do better at once, or of too little room.
_FAULTS: Final = (GenerationFailed, EngineUnavailable)
_ELSEWHERE: Final = (*_FAULTS, Rejected, Evicted, FirstByteLate)


class Backoff(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@value
class Persistence:
    """How long a client wants it tried. attempts: with each model. first_byte_s: bound of each attempt, its wait for
    pages included. delay_s: before the second attempt with a model.
    """

    attempts: int = 1
    first_byte_s: float | None = None
    delay_s: float = 0.0
    backoff: Backoff = Backoff.CONSTANT

    def delay_before(self, attempt: int) -> float:
        """attempt: 1 is the first one, which nothing delays. Bounded by the greatest delay a client may ask for."""
        match self.backoff:
            case Backoff.CONSTANT:
                factor = 1
            case Backoff.LINEAR:
                factor = attempt - 1
            case Backoff.EXPONENTIAL:
                factor = 1 << (attempt - 2) if attempt > 1 else 0
        return 0.0 if attempt == 1 else min(self.delay_s * factor, DELAY_S_MAX)


ONCE: Final = Persistence()


@value
class Served(Generic[Answer]):
    """An answer and the attempt that it is the answer to. step: 0 for the model asked for, n for the nth fallback.

    ids: of all attempts, the last one's the request's.
    """

    request: GenerationRequest
    answer: Answer
    step: int
    ids: tuple[str, ...]


class Attempts:
    """new_id: gives ids like the first one's."""

    def __init__(self, pipeline: Pipeline, *, new_id: Callable[[], str]) -> None:
        self._pipeline = pipeline
        self._new_id = new_id

    async def complete(
        self, request: GenerationRequest, persistence: Persistence, begun: Callable[[str], None]
    ) -> Served[Completion]:
        """begun: told the id of each attempt after the first before it begins. Raises what the last attempt raised."""
        return await self._tried(self._pipeline.complete, request, persistence, begun)

    async def stream(
        self, request: GenerationRequest, persistence: Persistence, begun: Callable[[str], None]
    ) -> Served[Stream]:
        """As `complete`. The stream has its first chunk, so that no failure is left that could be tried again."""
        asked = replace(request, first_event_s=persistence.first_byte_s or _FIRST_EVENT_S)
        return await self._tried(self._pipeline.stream, asked, persistence, begun)

    async def _tried(
        self,
        deed: Callable[[GenerationRequest], Coroutine[Any, Any, Answer]],
        request: GenerationRequest,
        persistence: Persistence,
        begun: Callable[[str], None],
    ) -> Served[Answer]:
        ids: list[str] = []
        for step, model in enumerate((request.model, *request.fallbacks)):
            for attempt in range(1, persistence.attempts + 1):
                if ids:
                    await asyncio.sleep(persistence.delay_before(attempt))
                    request = replace(request, id=self._new_id(), model=model)
                    begun(request.id)
                ids.append(request.id)
                try:
                    answer = await _in_time(deed(request), persistence.first_byte_s)
                except _ELSEWHERE as error:
                    log.info("attempt failed", request_id=request.id, model=model, code=error.code)
                    again = attempt < persistence.attempts and isinstance(error, _FAULTS)
                    last = step == len(request.fallbacks) and not again
                    if last or isinstance(error, Draining | GenerationCutOff):
                        raise
                    if not again:
                        break
                else:
                    return Served(request, answer, step, tuple(ids))
        raise AssertionError("the last attempt returns or raises")


async def _in_time(answer: Coroutine[Any, Any, Answer], seconds: float | None) -> Answer:
    """Raises FirstByteLate. The pipeline then ends the attempt as one whose client has left."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        assert seconds is not None, "nothing else times out here"
        raise FirstByteLate(seconds) from None
