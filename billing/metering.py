"""Records each request once, prices it, and brings the records to SQL. The gateway calls it around every request.

A request's END is durable in the spool before its answer is complete; the drain posts ENDs to SQL in batches, where the
request id makes a second posting harmless. Nothing is ever dropped: without a database records wait in the spool, and
without a disk ENDs wait here, while no new billable work is admitted.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa
import structlog

from billing.alerts import alert_spending
from billing.errors import BillingUnavailable, PriceUnavailable, RecordDelayed
from billing.ledger.posting import post_usage
from billing.price_book import Price, PriceBook
from billing.rating import NO_CHARGE, Charge, rate
from billing.records import (
    OpenRequests,
    decode_end,
    encode_begin,
    encode_end,
    encode_progress,
    is_end,
    recovered,
)
from billing.spool import Position, Spool
from billing.usage import RequestFacts, TokenUsage, UsageRecord
from tenancy.database import EVERY_ACCOUNT, Database, acting_for
from tenancy.errors import TenancyUnavailable
from tenancy.values import value

_BACK_OFF_S_MAX = 2

log = structlog.get_logger(__name__)


class Allowances(Protocol):
    """What the process may hold of money that others hold too; what it posts lessens it. None where it serves alone.

    lock is held from before a batch is posted until `posted` is told what `post` returned.
    """

    lock: asyncio.Lock

    def post(self, connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> Any: ...

    def posted(self, request_ids: Sequence[str], amounts: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Posted:
    """One batch that is in SQL: its requests, the position behind the last record that was looked at, allowances."""

    request_ids: tuple[str, ...]
    position: Position
    amounts: Any


@value
class Written:
    """An END that was handed to the spool. position: behind it; None if the disk refused it."""

    request_id: str
    charge: Charge
    payload: bytes
    position: Position | None


class Metering:
    """Belongs to one event loop. `recover` comes first, after the price book's first refresh; then `run` as a task."""

    def __init__(
        self,
        spool: Spool,
        database: Database,
        price_book: PriceBook,
        *,
        clock: Callable[[], int] = time.time_ns,
        drain_interval_s: float = 0.2,
        drain_batch_records_max: int = 500,
        allowances: Allowances | None = None,
    ) -> None:
        self._allowances = allowances
        self._spool = spool
        self._database = database
        self._price_book = price_book
        self._clock = clock
        self._interval_s = drain_interval_s
        self._batch_max = drain_batch_records_max
        self._cursor = spool.checkpoint
        self._draining = asyncio.Lock()
        self._begun: dict[str, Position] = {}  # oldest first: where the BEGIN of each running request lies
        self._unwritten: dict[str, bytes] = {}  # ENDs the disk refused; bounded by what was running when it did
        self._lag = 0

    def begin(self, facts: RequestFacts) -> None:
        """Note that a request is dispatched. Raises BillingUnavailable: then it must not be."""
        position = self._spool.end
        self._spool.append(encode_begin(facts), admits=True)
        self._begun[facts.request_id] = position

    def progress(self, request_id: str, usage: TokenUsage) -> None:
        """Note what the engine has produced so far; the caller does so every 250 ms. A lost one favours the client."""
        if not self._spool.failed:
            try:
                self._spool.append(encode_progress(request_id, usage, self._clock()))
            except BillingUnavailable:
                log.warning("progress_not_recorded", request_id=request_id)

    async def finish(self, record: UsageRecord, price: Price) -> Charge:
        """Price the request and record it; it is durable on return. Raises RecordDelayed as `durable`."""
        written = self.write(record, price)
        await self.durable(written)
        return written.charge

    def write(self, record: UsageRecord, price: Price) -> Written:
        """Price the request and write its record; `durable` waits for the disk, and has to be called."""
        charge = rate(record.usage, price) if record.charged else NO_CHARGE
        payload = encode_end(record, charge, price.version)
        position: Position | None = None
        with suppress(BillingUnavailable):  # `durable` says it
            position = self._spool.append(payload)
            self._lag += 1
        return Written(record.facts.request_id, charge, payload, position)

    async def durable(self, written: Written) -> None:
        """Return when the record is durable. A wait that was cancelled may be begun again.

        Raises RecordDelayed if it is not: the record is kept and written as soon as the disk takes it.
        """
        try:
            await self._spool.commit(written.position)
        except BillingUnavailable as error:
            self._unwritten[written.request_id] = written.payload
            raise RecordDelayed from error
        except asyncio.CancelledError:
            self._begun.pop(written.request_id, None)  # the record is on its way; only the wait for it was given up
            raise
        self._begun.pop(written.request_id, None)

    def refuse(self, record: UsageRecord, price: Price | None) -> None:
        """Record a request that no engine saw: it costs nothing, so it need not be durable before the answer."""
        assert not record.charged, "a refused request is charged nothing"
        payload = encode_end(record, NO_CHARGE, None if price is None else price.version)
        try:
            self._spool.append(payload)
        except BillingUnavailable:
            log.warning("refusal_not_recorded", request_id=record.facts.request_id)
            return
        self._lag += 1

    def lag_records(self) -> int:
        """How many ENDs are not in SQL yet."""
        return self._lag + len(self._unwritten)

    async def recover(self) -> int:
        """End what a process that died had begun, before anything new begins. Returns how many requests that were.

        May be killed and begun again at any point: a request that has an END gets no second one, and the request id
        keeps a second one out of SQL.
        """
        assert not self._begun, "recovery comes before the first request"
        found = await asyncio.to_thread(self._scan, self._spool.checkpoint, self._spool.end)
        self._lag = found.ends
        requests = found.remaining()
        position = self._spool.end
        for request in requests:
            try:
                price = self._price_book.by_version(request.facts.price_version)
                record, charge = recovered(request, charged=True), rate(request.usage, price)
            except PriceUnavailable:
                log.exception("recovered_without_price", request_id=request.facts.request_id)
                record, charge = recovered(request, charged=False), NO_CHARGE
            position = self._spool.append(encode_end(record, charge, request.facts.price_version))
            self._lag += 1
        await self._spool.commit(position)
        if requests:
            log.warning("requests_recovered", count=len(requests))
        return len(requests)

    async def drain_once(self) -> int:
        """Post one batch of ENDs to SQL in one transaction; returns how many. Raises BillingUnavailable."""
        async with self._draining:
            end = self._spool.end
            if self._cursor >= end:
                return 0
            try:
                posted = await self._posted(self._cursor, end)
                ends = len(posted.request_ids)
                self._cursor = posted.position
                self._lag = 0 if self._cursor >= self._spool.end else self._lag - ends
                # The BEGIN of a running request must stay readable: without it a crash would forget the request.
                oldest = next(iter(self._begun.values()), self._cursor)
                await self._database.call(self._spool.save_checkpoint, min(self._cursor, oldest))
            except TenancyUnavailable as error:
                raise BillingUnavailable("Usage can't be posted now.", retry_after_s=1) from error
            return ends

    async def _posted(self, position: Position, end: Position) -> _Posted:
        # Perhaps for a request of one account; the records are of all.
        with acting_for(EVERY_ACCOUNT):
            if self._allowances is None:
                return await self._database.call(self._post, position, end)
            async with self._allowances.lock:
                posted = await self._database.call(self._post, position, end)
                self._allowances.posted(posted.request_ids, posted.amounts)
                return posted

    async def flush(self) -> None:
        """Return when everything recorded so far is in SQL, so that a caller reads its own writes."""
        end = self._spool.end
        while self._cursor < end:
            await self.drain_once()

    async def run(self) -> None:
        """Drain for ever, and bring a failed spool back. Trouble is logged and waited out, with a bounded back-off."""
        delay_s = self._interval_s
        waits = False
        while True:
            await asyncio.sleep(delay_s)
            try:
                try:
                    while await self.drain_once() >= self._batch_max:
                        pass
                finally:
                    await self._write_unwritten()  # whatever the database does; the drain also frees a full disk
            except BillingUnavailable as error:
                delay_s = min(2 * delay_s, _BACK_OFF_S_MAX)
                if not waits:
                    log.warning("drain_waits", reason=error.message, lag_records=self.lag_records())
                waits = True
            except Exception:
                # The loop of a worker: a bug must not end the drain, and must not go unseen.
                delay_s = min(2 * delay_s, _BACK_OFF_S_MAX)
                log.exception("drain_failed", lag_records=self.lag_records(), retry_in_s=delay_s)
            else:
                delay_s = self._interval_s
                if waits:
                    log.info("drain_goes_on", lag_records=self.lag_records())
                waits = False

    async def _write_unwritten(self) -> None:
        await self._spool.probe()
        while self._unwritten:
            waiting = list(self._unwritten.items())
            position = self._spool.end
            for _, payload in waiting:
                position = self._spool.append(payload)
                self._lag += 1
            await self._spool.commit(position)
            for request_id, _ in waiting:
                del self._unwritten[request_id]
                self._begun.pop(request_id, None)

    def _scan(self, position: Position, end: Position) -> OpenRequests:
        found = OpenRequests()
        for payload, _ in self._spool.read(position, end):
            found.see(payload)
        return found

    def _post(self, position: Position, end: Position) -> _Posted:
        rows = []
        amounts: Any = {}
        behind = end
        for payload, behind_record in self._spool.read(position, end):
            if is_end(payload):
                rows.append(decode_end(payload))
                if len(rows) == self._batch_max:
                    behind = behind_record
                    break
        if rows:
            with self._database.write() as connection:
                now_ns = self._clock()
                fresh = post_usage(connection, rows, now_ns)
                alert_spending(connection, rows, now_ns)
                if self._allowances is not None:
                    amounts = self._allowances.post(connection, fresh)
        return _Posted(tuple(row["id"] for row in rows), behind, amounts)
