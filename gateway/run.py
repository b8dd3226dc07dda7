"""One request from its hold to its settlement: what it uses, how it is stopped, and that it ends exactly once.

Made by pipeline.py when the hold is open. `settle` may be called by whoever sees the end first, any number of times;
it runs in a task of its own, because a departing client cancels whatever was awaiting.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from billing.errors import BillingError
from billing.metering import Metering, Written
from billing.price_book import Price, Tier
from billing.rating import NO_CHARGE
from billing.usage import NO_USAGE, RequestFacts, TokenUsage, UsageRecord, UsageSource
from gateway.admission import pages_for
from gateway.catalogue import ModelCard
from gateway.engine_call import EngineCall
from gateway.errors import GenerationCutOff, GenerationFailed
from gateway.health import ENGINE_FAULTS
from gateway.hold import Hold
from gateway.metrics import GatewayMetrics
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.request import CHARGED_OUTCOMES, Endpoint, GenerationRequest, Outcome, OutputCap, Settlement
from gateway.settings import GatewaySettings
from gateway.want import Ended, Want
from tenancy.quotas import NOTHING, Amounts
from tenancy.values import value

log = structlog.get_logger(__name__)


@value
class _Books:
    """An ended request whose record is written. charged: whether anybody pays for what was made of it. written: what is
    to become durable; None where nothing is owed.
    """

    settlement: Settlement
    charged: bool
    taken: Amounts
    written: Written | None


@dataclass(frozen=True, slots=True)
class Desk:
    """What every run needs of the process: the durable record, the metrics, the bounds; and who is open."""

    metering: Metering
    metrics: GatewayMetrics
    settings: GatewaySettings
    runs: "set[Run]" = field(default_factory=set)  # open ones
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while nothing runs
    endings: "set[asyncio.Future[Settlement]]" = field(default_factory=set)  # owns settle tasks; emptied as they end


class Run:
    """One admitted request."""

    def __init__(  # noqa: PLR0917 - made in one place, by the pipeline
        self,
        desk: Desk,
        request: GenerationRequest,
        prompt_ids: list[int],
        cap: OutputCap,
        price: Price,
        hold: Hold,
        fleet: ModelFleet,
        card: ModelCard,
        tokens_of: Callable[[str], int],
    ) -> None:
        self._desk = desk
        self._tokens_of = tokens_of
        self.request = request
        self.prompt_ids = prompt_ids
        self.cap = cap
        self.price = price
        self.hold = hold
        self.fleet = fleet
        self.want: Want | None = None  # set when it asks for pages
        self.replica: Replica | None = None
        self.prefill: Replica | None = None  # that computes its prompt, where that is another engine
        self.calls: list[EngineCall] = []
        self.readers: list[
            asyncio.Task[None]
        ] = []  # whoever reads several calls at once; ended before they are stopped
        self.started_at = time.monotonic()
        self.queued_s = 0.0
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._progress_at = 0.0
        self._page_tokens = 0
        self._pages = 0  # in use, as far as is known, since the moment beside it
        self._pages_at = 0.0
        self._page_s = 0.0
        self._ending: asyncio.Future[Settlement] | None = None
        self._cancelled = False
        desk.runs.add(self)
        desk.idle.clear()
        self.facts = RequestFacts(
            request_id=request.id,
            account_id=request.principal.account_id,
            key_id=request.principal.key_id,
            model=request.model,
            endpoint=request.route,
            stream=request.stream,
            prompt_tokens=len(prompt_ids),
            price_version=price.version,
            started_at_ns=request.received_at_ns,
            tier=price.tier,
            attribution=request.attribution,
            deployment=card.revision or None,
            precisions=card.served_as or None,
        )

    def placed(self, replica: Replica) -> None:
        """Pages are held at `replica`: from here on the hold gives them back."""
        self.replica, self.prefill = replica, replica.ledger.prompts.get(self.request.id)
        self.hold.pages_taken(replica.ledger)
        assert replica.info is not None, "a replica that took a request has said its page size"
        self._page_tokens = replica.info.page_tokens
        served = replica.served
        if served.deployment and served.deployment != self.facts.deployment:
            self.facts = dataclasses.replace(
                self.facts, deployment=served.deployment, precisions=served.precisions or None
            )
        self._pages, self._pages_at = self._pages_for(0), time.monotonic()

    def unplaced(self) -> None:
        """The replica could not be reached: the pages go back, the rest of the hold stays."""
        if self.replica is not None:
            self._count_pages(self._pages)
            self._pages = 0
            self.hold.release_pages()
            if self.want is not None:
                self.fleet.ended(self.want, Ended(0, 0))
            if self.fleet.tally is not None:
                self.fleet.tally.failed(self.replica.served.revision)
            self.suspect()
            self.replica = self.prefill = None
        self._count_wasted_prefill()
        self.calls = []

    def suspect(self) -> None:
        """An engine could not be reached: of a pair, the half that the calls blame."""
        if self.replica is not None:
            blamed = {call.at_fault for call in self.calls} - {None}
            for engine in blamed or {self.replica}:
                assert engine is not None, "None was taken out"
                self.fleet.suspect(engine)

    def _count_wasted_prefill(self) -> None:
        wasted = sum(call.wasted_prefill_tokens for call in self.calls)
        if wasted:
            self._desk.metrics.wasted_prefill(self.request.model, wasted)

    def note_progress(self) -> None:
        """After a chunk: first and last token's times, the durable running count, the pages really in use."""
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = now
            self.request.decision.first_token_s = now - self.started_at - self.queued_s
        self.last_at = now
        if now - self._progress_at < self._desk.settings.progress_interval_s:
            return
        self._progress_at = now
        usage = self.usage_so_far()
        self._desk.metering.progress(self.request.id, usage)
        self._count_pages(self._pages_for(usage.completion))
        self.hold.grow_pages(self._pages)
        if self.replica is not None and self.want is not None:
            self.fleet.progressed(self.want, -(-usage.completion // self.request.n))

    def _pages_for(self, outputs: int) -> int:
        return pages_for(len(self.prompt_ids) * self.request.n + outputs, self._page_tokens)

    def _count_pages(self, pages: int) -> None:
        """So many are in use now; between two looks they grew evenly."""
        now = time.monotonic()
        self._page_s += (self._pages + pages) / 2 * (now - self._pages_at)
        self._pages, self._pages_at = pages, now

    def produced_each(self) -> int:
        """Outputs of each choice by now, as its stream has shown."""
        return -(-sum(call.usage.completion for call in self.calls if call.usage) // self.request.n)

    def usage_so_far(self) -> TokenUsage:
        """Prompt once, outputs of all choices, by the engine's running figures."""
        prompt = cached = completion = reasoning = 0
        source = UsageSource.ENGINE
        for call in self.calls:
            if call.usage is not None:
                prompt, cached = max(prompt, call.usage.prompt), max(cached, call.usage.cached)
                completion += call.usage.completion
                reasoning += min(call.usage.reasoning, call.usage.completion)
                if call.finish_reason is None:
                    source = UsageSource.ENGINE_RUNNING
            else:
                # The engine did not say: a whole answer's text has so many tokens at least, and each event of a stream
                # one, but for the one that opens a chat's.
                # Without any event nothing shows that the prompt was worked on, and the customer has the benefit.
                source = UsageSource.ESTIMATED
                if call.unmetered is not None:
                    prompt = max(prompt, len(self.prompt_ids))
                    completion += min(self._tokens_of(call.unmetered), self.cap.tokens)
                elif call.produced_events:
                    prompt = max(prompt, len(self.prompt_ids))
                    completion += call.produced_events - (self.request.endpoint is Endpoint.CHAT)
        if cached > prompt:
            self._desk.metrics.usage_violations.inc()
            cached = prompt
        return TokenUsage(prompt=prompt, cached=cached, completion=completion, reasoning=reasoning, source=source)

    async def settle(self, outcome: Outcome, *, code: str | None = None) -> Settlement:
        """End the request; the first caller's outcome stands. Returns when the record is durable, whoever is cancelled.

        Raises BillingUnavailable if it can't be made durable; the hold is closed all the same.
        """
        if self._ending is None and outcome is Outcome.FINISHED and not self.readers:
            return await self._settle_here(code)
        return await asyncio.shield(self.begin_settling(outcome, code=code))

    def begin_settling(self, outcome: Outcome, *, code: str | None = None) -> "asyncio.Future[Settlement]":
        """As settle, without waiting for it."""
        return self._ending or self._in_a_task(self._settle(outcome, code))

    async def _settle_here(self, code: str | None) -> Settlement:
        """Nothing is to be stopped: it needs no task, unless the caller leaves while it waits for the disk."""
        ending = self._ending = asyncio.get_running_loop().create_future()
        books = self._close_books(Outcome.FINISHED, code)
        assert books.written is not None, "what was finished is owed"
        try:
            await self._desk.metering.durable(books.written)
        except asyncio.CancelledError:
            self._in_a_task(self._conclude(books))
            raise
        except BillingError as error:
            ending.set_exception(error)
            ending.exception()  # whoever asks later is told; perhaps nobody does
            await self._let_go(books)
            raise
        ending.set_result(books.settlement)
        await self._let_go(books)
        return books.settlement

    def _in_a_task(self, rest: Coroutine[Any, Any, Settlement]) -> "asyncio.Task[Settlement]":
        task = self._ending = asyncio.create_task(rest, name=f"settle {self.request.id}")
        self._desk.endings.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """End it from our side (shutdown): whoever reads its stream sees the abort and settles as cancelled."""
        self._cancelled = True
        for call in self.calls:
            await call.abort()
        if self._ending is None:
            await asyncio.sleep(self._desk.settings.abort_wait_s)  # the readers' time to see the end
        for call in self.calls:
            call.close()

    def _ended(self, task: "asyncio.Future[Settlement]") -> None:
        self._desk.endings.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error(
                "a request's record could not be written", request_id=self.request.id, error=str(task.exception())
            )

    @property
    def settled(self) -> bool:
        return self._ending is not None

    async def _settle(self, outcome: Outcome, code: str | None) -> Settlement:
        if self._cancelled and outcome is not Outcome.FINISHED:
            outcome, code = Outcome.CANCELLED, "draining"
        try:
            await self.stop_readers()
            if outcome is not Outcome.FINISHED and self.calls:
                self._desk.metrics.aborts.inc(len(self.calls))
                await asyncio.gather(*(call.stop(wait_s=self._desk.settings.abort_wait_s) for call in self.calls))
                self._desk.metrics.aborts_failed.inc(sum(call.abort_failed for call in self.calls))
        except Exception:
            # A bug in stopping must not keep pages, money and a slot for ever: it is said loudly, and the hold closes.
            log.exception("an engine call could not be stopped", request_id=self.request.id)
        return await self._conclude(self._close_books(outcome, code))

    def _close_books(self, outcome: Outcome, code: str | None) -> _Books:
        """All of an end that needs no wait: the engine has stopped, pages go back, the record is written."""
        for call in self.calls:
            call.close()
        self._count_wasted_prefill()
        self.hold.release_pages()
        if self.replica is not None:
            self.replica.poke.set()  # the next report should show it: ask soon
        usage = self.usage_so_far() if self.calls else NO_USAGE
        if self._pages:
            self._count_pages(max(self._pages, self._pages_for(usage.completion)))
        if self.calls:
            self.request.decision.cached_tokens = usage.cached
        if self.want is not None:
            self.fleet.ended(self.want, self._end(usage))
        if self.replica is not None and self.calls:
            self._tell_health(self.replica, outcome, code)
            self._compare(self.replica, outcome, code, usage)
        record = self._record(outcome, usage, code)
        charge, written = NO_CHARGE, None
        if outcome in {Outcome.REFUSED, Outcome.EVICTED}:
            self._desk.metering.refuse(record, self.price)  # nothing is owed: nobody waits for the disk
        else:
            written = self._desk.metering.write(record, self.price)
            charge = written.charge
        settlement = Settlement(
            outcome, usage, charge.cost_nano, charge.neurons_micro, self.price.version, self.price.tier
        )
        return _Books(settlement, record.charged, _taken(settlement, charged=record.charged), written)

    async def _conclude(self, books: _Books) -> Settlement:
        """The hold closes even if the record can't be made durable now: it is kept, and written later."""
        try:
            if books.written is not None:
                await self._desk.metering.durable(books.written)
        finally:
            await self._let_go(books)
        return books.settlement

    async def _let_go(self, books: _Books) -> None:
        try:
            await self.hold.settle(books.settlement.cost_nano, books.taken)
        finally:
            self._desk.runs.discard(self)
            if not self._desk.runs:
                self._desk.idle.set()
            self._observe(books)

    def _tell_health(self, replica: Replica, outcome: Outcome, code: str | None) -> None:
        """Only the engine's own faults speak against it. What it has not ended by its own word may still run."""
        fault = outcome is Outcome.UPSTREAM_FAILED and code in ENGINE_FAULTS
        if fault or outcome is Outcome.FINISHED:
            at_fault = next((call.at_fault for call in self.calls if call.at_fault is not None), None)
            self.fleet.finished(replica, fault=fault, half=self.prefill, at_fault=at_fault)
        now = time.monotonic()
        for call in self.calls:
            if call.finish_reason is None:
                for engine in (replica,) if self.prefill is None else (replica, self.prefill):
                    engine.ghosts.died(call.rid, now)

    def _compare(self, replica: Replica, outcome: Outcome, code: str | None, usage: TokenUsage) -> None:
        """While a new revision is tried beside the old one."""
        if self.fleet.tally is not None:
            self.fleet.tally.ended(replica.served.revision, outcome, self._end(usage), code=code)

    async def stop_readers(self) -> None:
        """End the tasks that read the engine's streams. Idempotent."""
        if not self.readers:
            return
        for task in self.readers:
            task.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)

    def _end(self, usage: TokenUsage) -> Ended:
        """What the forecast learns from it."""
        between_s = None
        if self.first_at is not None and self.last_at is not None and usage.completion > self.request.n:
            between_s = (self.last_at - self.first_at) / (usage.completion / self.request.n - 1)
        return Ended(
            produced=-(-usage.completion // self.request.n),
            uncached=usage.prompt - usage.cached,
            first_s=None if self.first_at is None else self.first_at - self.started_at - self.queued_s,
            between_s=between_s,
            whole_s=time.monotonic() - self.started_at - self.queued_s if self.calls else None,
        )

    def _record(self, outcome: Outcome, usage: TokenUsage, code: str | None) -> UsageRecord:
        return UsageRecord(
            facts=self.facts,
            outcome=outcome.value,
            usage=usage,
            charged=self._is_charged(outcome),
            ended_at_ns=max(self.facts.started_at_ns, time.time_ns()),  # the clock may have been set back meanwhile
            queued_ms=round(self.queued_s * 1000),
            ttft_ms=None if self.first_at is None else round((self.first_at - self.started_at) * 1000),
            replica=None if self.replica is None else self.replica.id,
            region=None if self.replica is None else self.replica.region,
            finish_reason=self.calls[0].finish_reason if self.calls else None,
            code=code,
            kv_page_ms=round(self._page_s * 1000),
        )

    def _is_charged(self, outcome: Outcome) -> bool:
        """A line of a batch that a stop of ours cuts off runs again: what was made of it is of use to nobody."""
        runs_again = outcome is Outcome.CANCELLED and self.request.service_tier is Tier.BATCH
        return outcome in CHARGED_OUTCOMES and not runs_again

    def _observe(self, books: _Books) -> None:
        settlement = books.settlement
        between = None
        if self.first_at is not None and self.last_at is not None and settlement.usage.completion > 1:
            between = (self.last_at - self.first_at) / (settlement.usage.completion - 1)
        self._desk.metrics.ended(
            self.request.model,
            settlement,
            charged=books.charged,
            queued_s=self.queued_s,
            first_s=None if self.first_at is None else self.first_at - self.started_at,
            between_s=between,
        )


def failure(settlement: Settlement, said: str, *, retry_after_s: int | None = None) -> GenerationFailed:
    """What a client is told of an answer that the engine did not complete. said: where that is the engine's fault."""
    if settlement.outcome is Outcome.CANCELLED and settlement.cost_nano:
        return GenerationCutOff(
            "This server stopped before the answer was complete. What was made until then is charged.",
            retry_after_s=retry_after_s,
        )
    return GenerationFailed(f"{said} You are not charged.", retry_after_s=retry_after_s)


def _taken(settlement: Settlement, *, charged: bool) -> Amounts:
    """What the meters keep: nothing of a request that no engine worked on, no tokens that nobody pays for."""
    if settlement.outcome in {Outcome.REFUSED, Outcome.EVICTED}:
        return NOTHING
    if not charged:
        return Amounts()
    usage = settlement.usage
    return Amounts(1, usage.prompt, usage.completion, settlement.neurons_micro)
