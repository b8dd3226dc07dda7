"""Runs one line of a batch as a request of its account, by the same pipeline as every other request, at its own price.

The dialects' forms call it with a request that they have read, and say how the answer is written. It only begins where
there is room at once, and an account's lines leave half of its concurrent requests, and of a minute's, to others. A
line may wait, so it falls back to another model when its own one's engines are gone or failed it, not when they are
busy.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import orjson

from api.errors import row_of
from api.intake import Arrival
from backends.errors import BackendError
from billing.errors import BillingError, RecordDelayed
from billing.price_book import Tier
from billing.usage import TokenUsage
from gateway.assemble import Assembly
from gateway.batches.batch import Batch, Line
from gateway.batches.form import Answered, Cut, Fruitless, Keep, Later, LineEnd
from gateway.catalogue import TEXT_EMBEDDINGS, TEXT_GENERATION, Catalogue
from gateway.decision import Decision
from gateway.embedding import Embedded, EmbeddingRequest, Embeddings
from gateway.errors import AnswerTooLarge, GenerationFailed
from gateway.pipeline import Pipeline
from gateway.request import Completion, Endpoint, GenerationRequest, Outcome, Settlement
from gateway.stream import Stream
from tenancy.authenticate import principal_of_key
from tenancy.claims import Meter
from tenancy.database import Database
from tenancy.errors import TenancyError, TenancyUnavailable
from tenancy.principal import Principal, Scope
from tenancy.quotas import Quota

# Behind every account's own tier: nobody waits behind a line.
LAST_TIER: Final = 1_000_000
# Nothing that a line waits for is asked for more often, or forgotten for longer.
_LATER_S_LEAST: Final = 1.0
_LATER_S_MOST: Final = 60.0
# A model without an engine that answers: no line of it is tried, and no refusal recorded, so soon again.
_ABSENT_S: Final = 5.0
_UNFINISHED: Final = b'"finish_reason":null'


@dataclass(frozen=True, slots=True)
class LineWork:
    """What lines are run with. answers: does some engine of the model? wakes: would one, once it is asked for?
    room: may background work begin at it now?
    """

    database: Database
    catalogue: Catalogue
    pipeline: Pipeline
    embeddings: Embeddings | None
    choices_max: int
    answer_bytes_max: int
    clock: Callable[[], int]
    answers: Callable[[str], bool]
    wakes: Callable[[str], bool]
    room: Callable[[str], bool]

    async def bearer(self, batch: Batch) -> Principal:
        """Whose batch it is, as the key and the account are now. Raises what principal_of_key raises."""
        principal = await self.database.call(
            principal_of_key, self.database, batch.account_id, batch.key_id, Scope.AI_RUN, self.clock()
        )
        limit = principal.concurrency
        return replace(
            principal,
            tier=LAST_TIER,
            concurrency=None if limit is None else _half(limit),
            quotas=tuple(_half_a_minutes(quota) for quota in principal.quotas),
        )

    def arrival(self, batch: Batch, line: Line, principal: Principal) -> Arrival:
        return Arrival(
            id=line.request_id,
            principal=principal,
            received_at_ns=self.clock(),
            deadline_s=_LATER_S_MOST,
            choices_max=self.choices_max,
            session=batch.id,
            decision=Decision(),
        )

    def embeds(self, model: str) -> bool:
        card = self.catalogue.find(model)
        return card is not None and card.task == TEXT_EMBEDDINGS

    def _model(self, wanted: GenerationRequest, attempts: int) -> str | None:
        """The one asked for, after each failed attempt the next one, of those that answer or sleep; None without any.

        Raises ModelNotFound, ModelRetired or TaskMismatch now for a fallback that could only fail when it is needed.
        """
        for model in wanted.fallbacks:
            self.catalogue.get_for(TEXT_GENERATION, model, wanted.received_at_ns)
        models = (wanted.model, *wanted.fallbacks)
        first = attempts % len(models)
        turns = models[first:] + models[:first]
        return next((model for model in turns if self.answers(model) or self.wakes(model)), None)

    async def generate(
        self,
        line: Line,
        wanted: GenerationRequest,
        write: Callable[[GenerationRequest, Completion], bytes],
        wrong: Callable[[Exception], bytes],
        *,
        keep: Keep,
        begun: Callable[[], None],
    ) -> LineEnd:
        """Raises what the pipeline raises, while nothing was produced. write, wrong: what the line says."""
        model = self._model(wanted, line.attempts)
        if model is None:
            return Later(_ABSENT_S, account_alone=False)
        if not self.answers(model):  # it is awake when the line comes again: a refusal now would be on record
            await self.pipeline.wake(model)
            return Later(_ABSENT_S, account_alone=False)
        if model != wanted.model and not self.room(model):
            return Later(_LATER_S_LEAST, account_alone=False)
        asked = replace(wanted, model=model, stream=False, reject_if_busy=True, service_tier=Tier.BATCH)
        stream = await self.pipeline.stream(asked)
        begun()
        assembly = Assembly(asked.endpoint)
        # A chat's stream opens with an event that says nothing.
        silent, finished = int(asked.endpoint is Endpoint.CHAT), 0
        try:
            async for payload in stream:
                assembly.add(payload)
                silent -= 1
                finished += _finishes(payload)
                too_large = assembly.taken_bytes > self.answer_bytes_max and stream.settlement is None
                if too_large:
                    assembly.cut_short()
                if finished == asked.n or too_large:
                    await keep(write(asked, _completion(stream, assembly, None)))
                if too_large:
                    await stream.cut(AnswerTooLarge.code)
        except GenerationFailed as error:
            if silent >= 0:
                raise
            if self.pipeline.draining:
                return Cut()
            return Answered(wrong(error), good=False, usage=TokenUsage())
        except RecordDelayed:
            pass  # the record is written when the disk takes it; the answer is whole
        finally:
            await asyncio.shield(stream.aclose())
        completion = _completion(stream, assembly, stream.settlement)
        return Answered(write(asked, completion), good=True, usage=completion.settlement.usage)

    async def embed(
        self,
        wanted: EmbeddingRequest,
        write: Callable[[EmbeddingRequest, Embedded], bytes],
        keep: Keep,
        begun: Callable[[], None],
    ) -> LineEnd:
        assert self.embeddings is not None, "an embedding model in the catalogue is served"
        asked = replace(wanted, service_tier=Tier.BATCH)

        async def kept(embedded: Embedded) -> None:
            await keep(write(asked, embedded))

        begun()
        embedded = await self.embeddings.embed(asked, kept)
        return Answered(write(asked, embedded), good=True, usage=embedded.settlement.usage)


def end_by(error: Exception, answer: bytes) -> LineEnd:
    """How a line ends, or does not, that met an error: what can't succeed later ends it, all else is tried again."""
    row = row_of(error)
    if isinstance(error, GenerationFailed | BackendError):
        return Fruitless(answer, _bounded(row.retry_after_s))
    if row.hopeless or (row.status < 500 and row.status not in {408, 429}):
        return Answered(answer, good=False, usage=TokenUsage())
    after_s = _bounded(getattr(error, "retry_after_s", None) or row.retry_after_s)
    own = isinstance(error, TenancyError | BillingError) and not isinstance(error, TenancyUnavailable)
    return Later(after_s, account_alone=own)


def _half(limit: int) -> int:
    return max(1, limit // 2)


def _half_a_minutes(quota: Quota) -> Quota:
    """Of a minute's requests half are left to others. Not of its tokens: a large line might then never fit."""
    if quota.meter is not Meter.REQUESTS_PER_MINUTE:
        return quota
    return replace(quota, limit=_half(quota.limit))


def _finishes(payload: bytes) -> bool:
    if _UNFINISHED in payload:
        return False
    return any(choice.get("finish_reason") for choice in orjson.loads(payload)["choices"])


def _bounded(seconds: float | None) -> float:
    return min(_LATER_S_MOST, max(_LATER_S_LEAST, seconds or _LATER_S_LEAST))


def _completion(stream: Stream, assembly: Assembly, settlement: Settlement | None) -> Completion:
    """settlement: None before the end, when the figures are the engine's running ones."""
    known = settlement or Settlement(Outcome.FINISHED, stream.usage, 0, 0, 0)
    return Completion(stream.created, assembly.choices(), stream.cap, known, stream.standings)
