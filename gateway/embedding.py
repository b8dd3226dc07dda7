"""Embeddings: texts in, one vector each out. Admit, hold meters and money, ask the engine, settle once.

The small sister of pipeline.py: nothing is generated, so there are no pages to wait for, only a bounded number of calls
at a time. Prompts are tokenised here, so that what is held and billed is what the engine reads.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import structlog
from tokenizers import Tokenizer

from backends.client import EngineClient
from backends.errors import BackendError, EngineBroke, EngineRefused
from billing.attribution import UNATTRIBUTED, Attribution
from billing.errors import BillingError
from billing.metering import Metering
from billing.price_book import Price, PriceBook, Tier
from billing.rating import NO_CHARGE, hold_nano, rate
from billing.usage import NO_USAGE, RequestFacts, TokenUsage, UsageRecord
from gateway.call_room import CallRoom
from gateway.catalogue import TEXT_EMBEDDINGS, Catalogue
from gateway.errors import (
    Draining,
    GatewayError,
    GenerationFailed,
    PromptInvalid,
    PromptTooLong,
    QueueFull,
    RegionNotServed,
)
from gateway.hold import Hold, Holds, amounts
from gateway.metrics import GatewayMetrics
from gateway.overlong import refuse_overlong
from gateway.regions import DEFAULT_REGION, allows
from gateway.request import CHARGED_OUTCOMES, Outcome, Settlement
from tenancy.claims import Standing
from tenancy.errors import ModelNotAllowed, TenancyError
from tenancy.meters.protocol import Reservation
from tenancy.principal import Principal
from tenancy.quotas import NOTHING

log = structlog.get_logger(__name__)

# More at once would only wait for the encoder's one thread, and the waiting are bounded here rather than there.
_CALLS_MAX = 8
_WAITING_MAX = 128  # of one account half as many
# Of one call: some seconds on a busy CPU, with as many calls as there may be before it. A large request is many calls,
# so that others have their turns in between, and the bound on an engine's silence is one on what it does at a time.
_CALL_TOKENS = 4_096
_READ_AT_ONCE = 64
# One request's tokens: a minute's work and more on a CPU.
TOKENS_MAX = 1 << 17

_InputTooLong = partial(PromptTooLong, subject="An input has", limit="its context")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One validated request. texts: each a text or token ids. id, route, received_at_ns: as GenerationRequest's.

    written: the client's word for how vectors are written; here it only tells one request from another.
    """

    id: str
    principal: Principal
    model: str
    route: str
    texts: tuple[str | tuple[int, ...], ...]
    received_at_ns: int
    stream: bool = False
    service_tier: Tier = Tier.STANDARD
    attribution: Attribution = UNATTRIBUTED
    written: str = "float"

    def asked(self) -> dict[str, Any]:
        """What makes two requests the same."""
        return {"model": self.model, "texts": self.texts, "written": self.written}


@dataclass(frozen=True, slots=True)
class Embedded:
    """vectors: float32 values, in the order of the texts."""

    vectors: tuple[list[float], ...]
    settlement: Settlement
    standings: tuple[Standing, ...]


@dataclass(slots=True)
class _Caller:
    """Whoever waits for one request's vectors."""

    has_left: bool = False


class _CallerLeft(Exception):
    """What a request ends with that nobody waits for any more. tokens: of the calls that were made for it."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class Embeddings:
    """One embedding model behind one engine. folder: holds its tokenizer.json. threads: shared; its maker closes it.

    region: where the engine is. awake: returns once the engine is awake, where it may sleep; raises GatewayError if
    that takes too long.
    """

    def __init__(
        self,
        client: EngineClient,
        folder: Path,
        threads: ThreadPoolExecutor,
        *,
        catalogue: Catalogue,
        holds: Holds,
        metering: Metering,
        price_book: PriceBook,
        metrics: GatewayMetrics,
        region: str = DEFAULT_REGION,
        awake: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._awake = awake
        self._region = region
        self._client = client
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = threads
        self._catalogue = catalogue
        self._holds = holds
        self._metering = metering
        self._price_book = price_book
        self._metrics = metrics
        self._room = CallRoom(calls_max=_CALLS_MAX, waiting_max=_WAITING_MAX)
        self._waking: Counter[str] = Counter()  # who waits for the engine to wake, by account
        self._running: set[asyncio.Task[Embedded]] = set()
        self._draining = False

    async def embed(
        self, request: EmbeddingRequest, keep: Callable[[Embedded], Awaitable[None]] | None = None
    ) -> Embedded:
        """Raises what the pipeline raises. When the caller leaves, no further call is made, and those that were made
        are paid for: a call can't be taken back. keep: awaited with the answer before its usage record ends; with it
        all calls are made even if the caller leaves.
        """
        if self._draining:
            raise Draining("This server is shutting down.", retry_after_s=1)
        card = self._catalogue.get_for(TEXT_EMBEDDINGS, request.model, request.received_at_ns)
        if not request.principal.may_use(request.model):
            raise ModelNotAllowed(f"This API key may not use the model {request.model}.")
        bound = request.principal.regions
        if bound is not None and not allows(bound, self._region):
            raise RegionNotServed(request.model, bound)
        ids = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._read, request.texts, card.context_tokens
        )
        longest, tokens = max(len(text) for text in ids), sum(len(text) for text in ids)
        if longest > card.context_tokens:
            raise _InputTooLong(prompt_tokens=longest, limit_tokens=card.context_tokens)
        if self._is_full_for(request.principal.account_id):
            raise QueueFull("Too many embedding requests wait already.", retry_after_s=1)
        if self._awake is not None:
            await self._wake(self._awake, request, tokens)
        caller = _Caller()
        task = asyncio.create_task(self._run(request, ids, tokens, keep, caller), name=f"embed {request.id}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller.has_left = keep is None
            raise

    async def _wake(self, awake: Callable[[], Awaitable[None]], request: EmbeddingRequest, tokens: int) -> None:
        """Before anything is held: whoever leaves meanwhile has asked for nothing."""
        account_id = request.principal.account_id
        self._waking[account_id] += 1
        try:
            await awake()
        except GatewayError as error:
            self._refused(request, None, tokens, error.code)
            raise
        finally:
            self._waking[account_id] -= 1
            self._waking = +self._waking  # without those of whom nobody waits
        if self._draining:
            raise Draining("This server is shutting down.", retry_after_s=1)

    def _is_full_for(self, account_id: str) -> bool:
        if self._waking.total() >= _WAITING_MAX or self._waking[account_id] >= _WAITING_MAX // 2:
            return True
        return self._room.is_full_for(account_id)

    @property
    def idle(self) -> bool:
        """Nobody waits, and half of the calls are free."""
        return not self._waking and not self._room.waiting and len(self._running) < _CALLS_MAX // 2

    async def drain(self, *, within_s: float) -> None:
        """Take nothing new, and give what runs `within_s` to end."""
        self._draining = True
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)

    def _ended(self, task: "asyncio.Task[Embedded]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever waited for it may have left

    def _read(self, texts: Sequence[str | tuple[int, ...]], context_tokens: int) -> list[list[int]]:
        """What is far beyond the context or the bound of a request is not tokenised to its end."""
        ids: list[list[int]] = []
        tokens = 0
        for start in range(0, len(texts), _READ_AT_ONCE):
            ids += self._encoded(texts[start : start + _READ_AT_ONCE], context_tokens)
            tokens += sum(len(text) for text in ids[start:])
            if tokens > TOKENS_MAX:
                raise PromptTooLong(
                    prompt_tokens=tokens,
                    limit_tokens=TOKENS_MAX,
                    at_least=len(ids) < len(texts),
                    subject="The inputs together have",
                    limit="in one request",
                )
        known = self._tokenizer.get_vocab_size()
        if any(not 0 <= token < known for text in ids for token in text):
            raise PromptInvalid(f"Token ids must lie in 0..{known - 1}.")
        return ids

    def _encoded(self, texts: Sequence[str | tuple[int, ...]], context_tokens: int) -> list[list[int]]:
        written = [text for text in texts if isinstance(text, str)]
        try:
            for text in written:
                refuse_overlong(text, context_tokens, self._tokens_of, too_long=_InputTooLong)
            encoded = iter(self._tokenizer.encode_batch_fast(written)) if written else iter(())
        except TypeError:
            raise PromptInvalid("A text holds half of a surrogate pair, which is not Unicode text.") from None
        return [next(encoded).ids if isinstance(text, str) else list(text) for text in texts]

    def _tokens_of(self, text: str) -> int:
        return len(self._tokenizer.encode_batch_fast([text])[0].ids)

    async def _run(
        self,
        request: EmbeddingRequest,
        ids: list[list[int]],
        tokens: int,
        keep: Callable[[Embedded], Awaitable[None]] | None,
        caller: _Caller,
    ) -> Embedded:
        price: Price | None = None
        usage = TokenUsage(prompt=tokens)
        try:
            price = self._price_book.price_in_force(
                request.model,
                request.received_at_ns,
                account_id=request.principal.account_id,
                tier=request.service_tier,
                prompt_tokens=tokens,
            )
            hold = await self._holds.open(
                request.principal,
                request.id,
                hold_nano(tokens, 0, price),
                Reservation(request.id, request.model, amounts(usage, price)),
                at_ns=request.received_at_ns,
                end_user=request.attribution.end_user,
            )
        except (BillingError, TenancyError) as error:
            self._refused(request, price, tokens, error.code)
            raise
        facts = _facts(request, price, tokens)
        try:
            vectors = await self._ask(facts, ids, caller)
            if keep is not None:
                await keep(Embedded(vectors, _foreseen(usage, price), hold.standings))
        except _CallerLeft as left:
            made = TokenUsage(prompt=left.tokens)
            await self._settle(price, hold, _record(facts, Outcome.CLIENT_DISCONNECTED, made))
            raise
        except BaseException as error:
            outcome, code = _blame(error)
            await self._settle(price, hold, _record(facts, outcome, NO_USAGE, code=code))
            raise
        settlement = await self._settle(price, hold, _record(facts, Outcome.FINISHED, usage))
        return Embedded(vectors, settlement, hold.standings)

    def _refused(self, request: EmbeddingRequest, price: Price | None, tokens: int, code: str) -> None:
        facts = _facts(request, price, tokens)
        self._metering.refuse(_record(facts, Outcome.REFUSED, NO_USAGE, code=code), price)
        self._metrics.refused(request.model, Outcome.REFUSED)

    async def _ask(self, facts: RequestFacts, ids: list[list[int]], caller: _Caller) -> tuple[list[float], ...]:
        vectors: tuple[list[float], ...] = ()
        for some in _calls(ids):
            await self._room.enter(facts.account_id)
            try:
                if caller.has_left:
                    raise _CallerLeft(sum(len(text) for text in ids[: len(vectors)]))
                if not vectors:
                    self._metering.begin(facts)
                vectors += await self._call(facts, some)
            finally:
                self._room.leave()
        return vectors

    async def _call(self, facts: RequestFacts, ids: list[list[int]]) -> tuple[list[float], ...]:
        body = orjson.dumps({"model": facts.model, "input": ids})
        try:
            answer = await self._client.ask("/v1/embeddings", body, brief=True)
            try:
                return _vectors(await answer.fields(), len(ids))
            finally:
                answer.close()
        except BackendError as error:
            log.warning("embedding engine failed", request_id=facts.request_id, code=error.code, error=error.message)
            busy = isinstance(error, EngineRefused) and error.status in (429, 503)
            raise GenerationFailed(
                "The engine could not serve the request. You are not charged.", retry_after_s=1 if busy else None
            ) from error

    async def _settle(self, price: Price, hold: Hold, record: UsageRecord) -> Settlement:
        """Durable when this returns; the hold closes whatever happens."""
        usage = record.usage
        charge = rate(usage, price) if record.charged else NO_CHARGE
        try:
            charge = await self._metering.finish(record, price)
        finally:
            await hold.settle(charge.cost_nano, amounts(usage, price) if record.charged else NOTHING)
        settlement = Settlement(
            Outcome(record.outcome), usage, charge.cost_nano, charge.neurons_micro, price.version, price.tier
        )
        self._metrics.ended(
            record.facts.model, settlement, charged=record.charged, queued_s=0.0, first_s=None, between_s=None
        )
        return settlement


def _foreseen(usage: TokenUsage, price: Price) -> Settlement:
    """What the settlement of an answer will be: nothing about it is open any more."""
    charge = rate(usage, price)
    return Settlement(Outcome.FINISHED, usage, charge.cost_nano, charge.neurons_micro, price.version, price.tier)


def _facts(request: EmbeddingRequest, price: Price | None, tokens: int) -> RequestFacts:
    return RequestFacts(
        request_id=request.id,
        account_id=request.principal.account_id,
        key_id=request.principal.key_id,
        model=request.model,
        endpoint=request.route,
        stream=False,
        prompt_tokens=tokens,
        price_version=price.version if price else 0,
        started_at_ns=request.received_at_ns,
        tier=price.tier if price else request.service_tier,
        attribution=request.attribution,
    )


def _record(facts: RequestFacts, outcome: Outcome, usage: TokenUsage, *, code: str | None = None) -> UsageRecord:
    return UsageRecord(
        facts=facts,
        outcome=outcome.value,
        usage=usage,
        charged=outcome in CHARGED_OUTCOMES,
        ended_at_ns=time.time_ns(),
        queued_ms=0,
        ttft_ms=None,
        replica=None,
        finish_reason=None,
        code=code,
    )


def _blame(error: BaseException) -> tuple[Outcome, str]:
    if isinstance(error, BillingError):
        return Outcome.REFUSED, error.code
    return Outcome.UPSTREAM_FAILED, error.code if isinstance(error, GatewayError) else "internal_error"


def _calls(ids: list[list[int]]) -> Iterator[list[list[int]]]:
    """The texts in their order, as many for each call as it may have; one at least."""
    some: list[list[int]] = []
    tokens = 0
    for text in ids:
        if some and tokens + len(text) > _CALL_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(text)
        tokens += len(text)
    yield some


def _vectors(answer: dict[str, Any], count: int) -> tuple[list[float], ...]:
    """One for each text, in order. Raises EngineBroke if the answer has others."""
    data = answer.get("data")
    if not isinstance(data, list) or len(data) != count:
        raise EngineBroke("the engine's answer has not one vector for each text")
    rows = sorted(data, key=lambda row: int(row["index"]))
    vectors = tuple(row["embedding"] for row in rows)
    if not all(isinstance(vector, list) and vector for vector in vectors):
        raise EngineBroke("the engine's answer has a vector that is none")
    return vectors
