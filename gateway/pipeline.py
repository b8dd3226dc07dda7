"""Read this first: what happens to one request. Admit, hold, wait, dispatch, relay, settle.

The dialects call `complete` or `stream` with a validated GenerationRequest and get typed errors, a Completion or a
Stream. Every request that got as far as a hold ends in exactly one usage record, whoever leaves or dies on the way.
Knows no HTTP, no SQL and no engine's dialect: those are the dialects', the stores' and the client's.
"""

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import structlog

from backends.errors import BackendError, EngineRefused, EngineUnreachable
from billing.errors import BillingError
from billing.metering import Metering
from billing.price_book import Price, PriceBook, Tier
from billing.rating import hold_nano
from billing.usage import NO_USAGE, RequestFacts, TokenUsage, UsageRecord
from gateway import admission
from gateway.assemble import Assembly
from gateway.cache_scope import CacheScopes
from gateway.catalogue import TEXT_GENERATION, Catalogue, ModelCard
from gateway.decision import Decision
from gateway.door import Let
from gateway.engine_call import EngineCall, engine_body, outcome_of
from gateway.errors import (
    AnswerTooLarge,
    Draining,
    EngineUnavailable,
    Evicted,
    GatewayError,
    ModelWarming,
    RegionNotServed,
    RequestRefused,
)
from gateway.fleet import Fleet
from gateway.hold import Holds, amounts
from gateway.lifecycle.waking import Waking
from gateway.metrics import GatewayMetrics
from gateway.model_fleet import ModelFleet
from gateway.pair_call import PairCall
from gateway.prompt import PromptReader
from gateway.request import Completion, GenerationRequest, Outcome, OutputCap
from gateway.run import Desk, Run, failure
from gateway.run_want import wait_s_max, want_of
from gateway.settings import GatewaySettings
from gateway.stream import Stream
from tenancy.errors import ModelNotAllowed, TenancyError
from tenancy.meters.protocol import Reservation

log = structlog.get_logger(__name__)

T = TypeVar("T")

# A replica that can't be reached has seen nothing of the request: it may go elsewhere, or wait for a restart, once.
_DISPATCHES_MAX = 2
# A pair's half that can be reached is told that the request goes elsewhere; it stops at once.
_WITHDRAW_S = 1.0
# Statuses with which an engine says that the request is wrong, not the engine.
_REQUESTS_FAULT = frozenset({400, 413, 422})


@dataclass(frozen=True, slots=True)
class Parts:
    """What the pipeline is made of; wired by the composition root."""

    catalogue: Catalogue
    prompts: dict[str, PromptReader]
    fleet: Fleet
    holds: Holds
    metering: Metering
    price_book: PriceBook
    cache_scopes: CacheScopes
    metrics: GatewayMetrics
    settings: GatewaySettings
    waking: Waking


class Pipeline:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._settings = parts.settings
        self._desk = Desk(parts.metering, parts.metrics, parts.settings)
        parts.metrics.live.set_function(lambda: len(self._desk.runs))
        self._draining = False
        self._desk.idle.set()

    async def complete(self, request: GenerationRequest) -> Completion:
        """The whole answer. Cancel the caller when the client leaves: the engine stops and what it made is billed."""
        run = await self._admit(request)
        try:
            if run.cap.tokens * request.n > self._settings.hold_outputs_ahead:
                # A long answer is read as a stream: its holds grow and its progress is recorded as it goes.
                return await self._assemble(await self._open_stream(run))
            return await self._answer(run)
        except BaseException as error:
            _end_of(run, error)
            raise

    async def stream(self, request: GenerationRequest) -> Stream:
        """A stream that has begun: every refusal has been raised already, and most early failures of the engine."""
        run = await self._admit(request)
        try:
            stream = await self._open_stream(run)
            wait_s = request.first_event_s
            await stream.wait_for_first(self._settings.first_event_wait_s if wait_s is None else wait_s)
        except BaseException as error:
            _end_of(run, error)
            raise
        return stream

    async def wake(self, model: str) -> None:
        """Wish an engine of it awake if all sleep: for work that comes again by itself, and leaves no record."""
        with suppress(GatewayError):
            await self._parts.waking.wake(model, wait_s=math.inf)

    @property
    def draining(self) -> bool:
        """Nothing new is taken, and what runs is ended: the process is about to stop."""
        return self._draining

    async def drain(self, *, within_s: float) -> None:
        """Take nothing new; give running requests `within_s` to end, then stop the rest as cancelled."""
        self._draining = True
        for fleet in self._parts.fleet.all():
            fleet.room.refuse_all(Draining("This server is shutting down.", retry_after_s=1))
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._desk.idle.wait()
        await asyncio.gather(*(run.cancel() for run in list(self._desk.runs)))
        if self._desk.endings:
            await asyncio.wait(self._desk.endings, timeout=self._settings.abort_wait_s + 5)

    async def _admit(self, request: GenerationRequest) -> Run:
        """From a request to a run whose hold is open and whose pages are taken.

        Bad input leaves no trace. A refusal leaves one record without charge and holds nothing.
        """
        if self._draining:
            raise Draining("This server is shutting down.", retry_after_s=1)
        card = self._parts.catalogue.get_for(TEXT_GENERATION, request.model, request.received_at_ns)
        if not request.principal.may_use(request.model):
            raise ModelNotAllowed(f"This API key may not use the model {request.model}.")
        fleet = self._parts.fleet.of(request.model)
        if request.principal.regions is not None and not fleet.serves_in(request.principal.regions):
            raise RegionNotServed(request.model, request.principal.regions)
        prompt_ids = await self._parts.prompts[request.model].read(request, context_tokens=card.context_tokens)
        known = fleet.known()
        cap = admission.output_cap(
            requested=request.max_tokens,
            prompt_tokens=len(prompt_ids),
            output_tokens_max=card.output_tokens_max,
            context_tokens=card.context_tokens,
            pool_tokens=known.total_tokens if known else card.context_tokens,
            prompt_tokens_max=fleet.prompt_tokens_max(),
        )
        if not request.stream and request.max_tokens is not None:
            # Where nothing says how long it may be, most are short: it is cut if it grows too large.
            outputs = cap.tokens * request.n
            admission.refuse_too_large(request.sampling, outputs=outputs, bytes_max=self._settings.answer_bytes_max)
        price: Price | None = None
        try:
            price = self._parts.price_book.price_in_force(
                card.price_id,
                request.received_at_ns,
                account_id=request.principal.account_id,
                tier=request.service_tier or Tier.STANDARD,
                prompt_tokens=len(prompt_ids),
            )
            run = await self._open_hold(request, prompt_ids, cap, price, fleet, card)
        except (BillingError, TenancyError) as error:
            self._record_refusal(request, len(prompt_ids), price, Outcome.REFUSED, error.code)
            raise
        try:
            await self._place(run)
        except GatewayError as error:
            outcome = Outcome.EVICTED if isinstance(error, Evicted) else Outcome.REFUSED
            await run.settle(outcome, code=error.code)
            raise
        except asyncio.CancelledError:
            run.begin_settling(Outcome.CLIENT_DISCONNECTED)
            raise
        return run

    async def _open_hold(  # noqa: PLR0917 - called in one place, by _admit
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        cap: OutputCap,
        price: Price,
        fleet: ModelFleet,
        card: ModelCard,
    ) -> Run:
        ahead = min(cap.tokens, self._settings.hold_outputs_ahead)
        amount_nano = hold_nano(len(prompt_ids), ahead * request.n, price)
        wanted = TokenUsage(prompt=len(prompt_ids), cached=0, completion=ahead * request.n)
        hold = await self._parts.holds.open(
            request.principal,
            request.id,
            amount_nano,
            Reservation(request.id, request.model, amounts(wanted, price)),
            at_ns=request.received_at_ns,
            end_user=request.attribution.end_user,
            clamp=partial(admission.clamped_hold, prompt_tokens=len(prompt_ids), choices=request.n, price=price),
        )
        if hold.first_nano < amount_nano:
            cap = admission.cap_within(hold.first_nano, prompt_tokens=len(prompt_ids), choices=request.n, price=price)
        tokens_of = self._parts.prompts[request.model].tokens_of
        return Run(self._desk, request, prompt_ids, cap, price, hold, fleet, card, tokens_of)

    async def _place(self, run: Run) -> None:
        """Wait for pages, and for an engine to wake if all sleep. Raises CapacityExceeded, QueueFull, Evicted,
        ModelWarming, or EngineUnavailable if no replica answers.
        """
        request, fleet = run.request, run.fleet
        run.want = want_of(run, self._settings)
        try:
            until = run.started_at + min(wait_s_max(request, self._settings), request.deadline_s)
            if not fleet.up_in(request.principal.regions):
                until = await self._wake(run, until)
            wait_s = until - time.monotonic()
            replica, let = await fleet.place(run.want, wait_s=wait_s, reject_if_busy=request.reject_if_busy)
        except GatewayError as error:
            request.decision.verdict, request.decision.refused = "refused", error.code
            awake = fleet.up_in(request.principal.regions)
            if not awake and not isinstance(error, ModelWarming | EngineUnavailable | Draining):
                units = fleet.units_in(request.principal.regions)
                raise self._parts.waking.refusal(request.model, units) or EngineUnavailable(
                    "No engine of this model answers at the moment.", retry_after_s=error.retry_after_s or 5
                ) from error
            raise
        run.queued_s = time.monotonic() - run.started_at
        run.placed(replica)
        _explain(request.decision, let, run.queued_s)

    async def _wake(self, run: Run, until: float) -> float:
        """No replica answers. If they sleep one is woken; until when the request may then wait (monotonic seconds)."""
        request, waking = run.request, self._parts.waking
        wait_s = waking.wait_s_max(request.model)
        if wait_s is not None:
            until = run.started_at + min(wait_s, request.deadline_s)
        may_wait_s = 0.0 if request.reject_if_busy else until - time.monotonic()
        units = run.fleet.units_in(request.principal.regions)
        if await waking.wake(request.model, wait_s=may_wait_s, among=units):
            assert run.want is not None, "it is known what it wants"
            # The promise of a first token is one of engines that are awake.
            run.want = replace(run.want, first_s_max=math.inf)
        return until

    def _record_refusal(
        self, request: GenerationRequest, prompt_tokens: int, price: Price | None, outcome: Outcome, code: str
    ) -> None:
        """One record without charge for a request that never held anything."""
        facts = RequestFacts(
            request_id=request.id,
            account_id=request.principal.account_id,
            key_id=request.principal.key_id,
            model=request.model,
            endpoint=request.route,
            stream=request.stream,
            prompt_tokens=prompt_tokens,
            price_version=price.version if price else 0,
            started_at_ns=request.received_at_ns,
            tier=price.tier if price else request.service_tier or Tier.STANDARD,
            attribution=request.attribution,
        )
        record = UsageRecord(
            facts=facts,
            outcome=outcome.value,
            usage=NO_USAGE,
            charged=False,
            ended_at_ns=time.time_ns(),
            queued_ms=0,
            ttft_ms=None,
            replica=None,
            finish_reason=None,
            code=code,
        )
        self._parts.metering.refuse(record, price)
        self._parts.metrics.refused(request.model, outcome)

    def _call(self, run: Run, index: int, *, stream: bool) -> EngineCall:
        assert run.replica is not None, "dispatch follows placement"
        weights = run.replica.served.weights
        salt = self._parts.cache_scopes.of(run.request.principal.account_id, run.request.model, weights)
        body = engine_body(run.request, run.prompt_ids, run.cap.tokens, index, stream=stream, cache_salt=salt)
        if run.prefill is None:
            return EngineCall(run.request, run.replica, index, body)
        assert run.want is not None, "it was placed as it wanted"
        prompt_done = partial(run.fleet.prompt_done, run.prefill, run.want)
        return PairCall(run.request, run.prefill, run.replica, index, body, prompt_done=prompt_done)

    async def _dispatch(self, run: Run, *, stream: bool) -> list[dict[str, Any]]:
        """Send every choice's call; whole answers if not streamed. An engine that can't be reached is tried once more.

        Raises GenerationFailed, settled, when the engine fails.
        """
        try:
            self._parts.metering.begin(run.facts)
        except BillingError as error:
            with suppress(BillingError):  # its own record waits for the disk as well
                await run.settle(Outcome.REFUSED, code=error.code)
            raise
        for attempt in range(1, _DISPATCHES_MAX + 1):
            run.calls = [self._call(run, index, stream=stream) for index in range(run.request.n)]
            try:
                if stream:
                    await _all([call.open() for call in run.calls])
                    return []
                return await _all([call.answer() for call in run.calls])
            except EngineUnreachable as error:
                if attempt == _DISPATCHES_MAX or any(call.produced_events for call in run.calls):
                    raise await self._failed(run, error) from error
                await self._place_again(run)
            except BackendError as error:
                raise await self._failed(run, error) from error
        raise AssertionError("the last attempt returns or raises")

    async def _place_again(self, run: Run) -> None:
        await asyncio.gather(*(call.withdraw(wait_s=_WITHDRAW_S) for call in run.calls))
        run.unplaced()
        try:
            await self._place(run)
        except GatewayError as error:
            await run.settle(Outcome.UPSTREAM_FAILED, code=error.code)
            raise

    async def _failed(self, run: Run, error: BackendError) -> GatewayError:
        """Settle a request that the engine failed; the error to raise."""
        log.warning("engine failed", request_id=run.request.id, code=error.code, error=error.message)
        if isinstance(error, EngineUnreachable):
            run.suspect()
        if isinstance(error, EngineRefused) and error.status in _REQUESTS_FAULT:
            await run.settle(Outcome.REFUSED, code=RequestRefused.code)
            return RequestRefused("The engine of this model refuses the request: some parameter is out of its range.")
        settlement = await run.settle(outcome_of(error), code=error.code)
        busy = isinstance(error, EngineRefused) and error.status in (429, 503)
        return failure(settlement, "The engine could not serve the request.", retry_after_s=1 if busy else None)

    async def _open_stream(self, run: Run) -> Stream:
        await self._dispatch(run, stream=True)
        return Stream(run, outputs_ahead=self._settings.hold_outputs_ahead)

    async def _answer(self, run: Run) -> Completion:
        answers = await self._dispatch(run, stream=False)
        choices = [{**choice, "index": index} for index, choice in enumerate(answers)]
        settlement = await run.settle(Outcome.FINISHED)
        created = run.request.received_at_ns // 1_000_000_000
        return Completion(created, tuple(choices), run.cap, settlement, run.hold.standings)

    async def _assemble(self, stream: Stream) -> Completion:
        assembly = Assembly(stream.endpoint)
        try:
            async for payload in stream:
                assembly.add(payload)
                if assembly.taken_bytes > self._settings.answer_bytes_max:
                    await stream.cut(AnswerTooLarge.code)
        finally:
            await asyncio.shield(stream.aclose())
        assert stream.settlement is not None, "a stream that ended well is settled"
        return Completion(stream.created, assembly.choices(), stream.cap, stream.settlement, stream.standings)


def _explain(decision: Decision, let: Let, waited_s: float) -> None:
    waiting, placed = let.waiting, let.placed
    at_once = waiting.start_by == waiting.arrived_at
    decision.verdict = "fits_now" if at_once else "fits_later"
    decision.predicted_wait_s, decision.predicted_wait_p90_s = waiting.predicted.p50_s, waiting.predicted.p90_s
    decision.waited_s, decision.kept_place = waited_s, waiting.kept
    decision.replica, decision.region = placed.site.id, placed.site.region
    decision.prefill = None if placed.quote is None else placed.quote.half.id
    decision.prompt_tokens = placed.want.prompt_tokens
    decision.expected_cached_tokens = round(waiting.expected.cached_share * placed.want.prompt_tokens)
    decision.predicted_first_token_s = placed.first_s


def _end_of(run: Run, error: BaseException) -> None:
    """Begin to settle a run whose caller got `error`; without effect where that has been done with a better reason."""
    if isinstance(error, asyncio.CancelledError):
        run.begin_settling(Outcome.CLIENT_DISCONNECTED)
    else:
        run.begin_settling(Outcome.UPSTREAM_FAILED, code="internal_error")


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await several calls; the first failure is raised once the others are let go (`EngineCall.stop` ends them)."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.create_task(call, name="one of several choices") for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
