"""Live meters that several processes share, in Redis (7 or newer) or Valkey. Chosen by api/wiring.py.

One function call reserves all of an account's meters or none, by the server's clock (functions.lua). While the server
is away, requests go by windows of this process alone, at its share of each limit: tighter, never open. Those local
windows also count what was granted through the server, so that they are not empty when they are needed. `run` looks
whether the server is back, renews the slots of running requests, and sends on the settles that could not be delivered.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import structlog

from tenancy.claims import Claim, Standing
from tenancy.errors import RateExceeded, RequestExceedsQuota
from tenancy.meters.calls import TROUBLE, FunctionCalls
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Reservation, Ticket, claims_of
from tenancy.principal import Principal
from tenancy.quotas import NOTHING, Amounts, bucket_at, refusal, taken

log = structlog.get_logger(__name__)

_LIBRARY = Path(__file__).with_name("functions.lua")
# Settles that wait for the server. Beyond these the oldest are forgotten: their slots end with their leases, and their
# tokens stay as reserved until the minute is over.
_UNDELIVERED_MAX = 10_000
_BATCH = 500  # of them on their way at once
_TIGHTER_RETRY_S = 5  # while away: how soon a request that only the full limit has room for may try again


class RedisMeters:
    """Implements tenancy.meters.protocol.Meters. Belongs to one event loop.

    processes: how many share the limits; each goes by its share while the server is away. timeout_s: the most that a
    server in trouble adds to a request, once. lease_s: after this long a slot of a process that died is free again.
    clock_ms: None for the server's own clock.
    """

    def __init__(
        self,
        url: str,
        *,
        processes: int = 1,
        timeout_s: float = 0.08,
        lease_s: float = 60,
        probe_interval_s: float = 1,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        self._calls = FunctionCalls(url, _LIBRARY.read_text(), timeout_s=timeout_s)
        self._processes = processes
        self._lease_ms = round(lease_s * 1_000)
        self._probe_interval_s = probe_interval_s
        self._clock_ms = clock_ms
        self._local = ProcessMeters(clock_ms=clock_ms or _wall_ms)
        # What the server holds of each running request: after one was admitted locally, its slots alone.
        self._open: dict[str, Ticket] = {}
        self._undelivered: deque[tuple[Ticket, Amounts]] = deque(maxlen=_UNDELIVERED_MAX)
        self._renewed_at = time.monotonic()
        self.degraded = False

    async def reserve(self, principal: Principal, reservation: Reservation) -> Ticket:
        claims = claims_of(principal, reservation.model, reservation.amounts)
        account_id, request_id = principal.account_id, reservation.request_id
        assert request_id not in self._open, f"request {request_id} reserved twice"
        if self.degraded:
            return self._reserve_locally(account_id, request_id, claims)
        try:
            granted, now_ms, standings = await self._judged(account_id, request_id, claims)
        except TROUBLE as error:
            self._trouble(error)
            # Perhaps the server has granted it unheard.
            self._undelivered.append((_ticket(account_id, request_id, claims, (), _wall_ms()), NOTHING))
            return self._reserve_locally(account_id, request_id, claims)
        if not granted:
            refused = refusal(standings)
            assert refused is not None, "what was not granted has a reason"
            raise refused
        ticket = _ticket(account_id, request_id, claims, standings, now_ms)
        self._local.take(ticket)
        self._open[request_id] = ticket
        return ticket

    async def extend(self, ticket: Ticket, amounts: Amounts) -> Ticket:
        more = ticket.extension(amounts)
        if not more:
            return ticket
        # What was once booked here alone goes on so: the server hears of all of it at the settle.
        if self.degraded or self._open.get(ticket.request_id) is not ticket:
            return self._local.extend_claims(ticket, self._shares(more))
        try:
            granted, now_ms, standings = await self._judged(ticket.account_id, ticket.request_id, more)
        except TROUBLE as error:
            self._trouble(error)
            return self._local.extend_claims(ticket, self._shares(more))
        if not granted:
            refused = refusal(standings)
            assert refused is not None, "what was not granted has a reason"
            raise refused
        longer = ticket.extended(more, now_ms)
        if self._open.get(ticket.request_id) is ticket:  # else it was settled meanwhile
            self._local.take_more(ticket, longer)
            self._open[ticket.request_id] = longer
        return longer

    async def settle(self, ticket: Ticket, actual: Amounts) -> None:
        shared = self._open.pop(ticket.request_id, None)
        if shared is None:
            return
        self._local.settle_now(ticket, actual)
        if self.degraded:
            self._undelivered.append((shared, actual))
            return
        try:
            await self._deliver(shared, actual)
        except TROUBLE as error:
            self._trouble(error)
            self._undelivered.append((shared, actual))
        except asyncio.CancelledError:
            self._undelivered.append((shared, actual))
            raise

    async def standings(self, principal: Principal, model: str) -> tuple[Standing, ...]:
        claims = claims_of(principal, model, NOTHING)
        if not self.degraded:
            try:
                _, _, standings = await self._judged(principal.account_id, "", claims)
            except TROUBLE as error:
                self._trouble(error)
            else:
                return tuple(standings)
        return await self._local.standings(principal, model)

    def live_slots(self) -> int:
        return self._local.live_slots()

    def undelivered(self) -> int:
        """How many settles wait for the server."""
        return len(self._undelivered)

    async def open(self) -> None:
        """Begin to talk to the server; if it is away, requests go by local windows until `run` finds it."""
        try:
            await self._calls.open()
        except TROUBLE as error:
            self._trouble(error)

    async def run(self) -> None:
        """For ever: see whether the server is back, renew slots, deliver settles."""
        while True:
            await asyncio.sleep(self._probe_interval_s)
            try:
                if self.degraded:
                    await self._recover()
                elif (time.monotonic() - self._renewed_at) * 3_000 >= self._lease_ms:
                    await self._renew()
                await self._deliver_waiting()
            except TROUBLE as error:
                self._trouble(error)

    async def close(self) -> None:
        """What ended last is told the server, if it is there; the rest ends with the leases."""
        if not self.degraded:
            with suppress(*TROUBLE):
                await self._deliver_waiting()
        await self._calls.close()

    def _reserve_locally(self, account_id: str, request_id: str, claims: tuple[Claim, ...]) -> Ticket:
        try:
            ticket = self._local.reserve_claims(account_id, request_id, self._shares(claims))
        except RequestExceedsQuota as error:
            if any(claim.limit is not None and claim.amount > claim.limit for claim in claims):
                raise
            raise RateExceeded(
                "Limits are tighter for a moment, and this request is more than they allow.",
                standings=error.standings,
                retry_after_s=_TIGHTER_RETRY_S,
            ) from error
        slots = tuple(claim for claim in claims if not claim.bucket_ms)
        self._open[request_id] = _ticket(account_id, request_id, slots, (), 0)
        return ticket

    def _shares(self, claims: tuple[Claim, ...]) -> tuple[Claim, ...]:
        """The same under this process's share of each limit."""
        return tuple(
            claim if claim.limit is None else replace(claim, limit=max(1, claim.limit // self._processes))
            for claim in claims
        )

    async def _judged(
        self, account_id: str, request_id: str, claims: tuple[Claim, ...]
    ) -> tuple[bool, int, list[Standing]]:
        arguments: list[str | int] = [self._now(), request_id, self._lease_ms]
        for claim in claims:
            arguments += [claim.amount, claim.limit or 0, claim.bucket_ms, claim.buckets]

        def undo(reply: list[int]) -> None:
            """Nobody waits any more. An abandoned extension stays until its minute is over."""
            if reply[0] and request_id not in self._open:
                self._undelivered.append((_ticket(account_id, request_id, claims, (), reply[1]), NOTHING))

        keys = _keys(account_id, claims)
        answer = self._calls.call("pagegate_reserve_1", keys, arguments, abandoned=undo)
        try:
            reply = await answer
        except asyncio.CancelledError:
            # The reply may have come in the very moment in which its caller was cancelled: then nobody has heard it.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                undo(answer.result())
            raise
        granted, now_ms, *figures = cast("list[int]", reply)
        standings = [Standing(claim, *figures[3 * index : 3 * index + 3]) for index, claim in enumerate(claims)]
        return bool(granted), now_ms, standings

    async def _deliver(self, ticket: Ticket, actual: Amounts) -> None:
        arguments: list[str | int] = [ticket.request_id]
        corrections = ticket.corrections(actual)
        for claim, bucket, difference in zip(ticket.claims, ticket.buckets, corrections, strict=True):
            arguments += [bucket, difference] if claim.bucket_ms else ["", 0]
        await self._calls.call("pagegate_settle_1", _keys(ticket.account_id, ticket.claims), arguments)

    async def _deliver_waiting(self) -> None:
        while self._undelivered:
            batch = [self._undelivered.popleft() for _ in range(min(len(self._undelivered), _BATCH))]
            results = await asyncio.gather(*(self._deliver(*ended) for ended in batch), return_exceptions=True)
            failed = [ended for ended, result in zip(batch, results, strict=True) if result is not None]
            self._undelivered.extendleft(reversed(failed))
            for result in results:
                if result is not None:
                    raise result

    async def _renew(self) -> None:
        """Calls are made in order: a settle that comes meanwhile comes after."""
        self._renewed_at = time.monotonic()
        renewals: list[asyncio.Future[Any]] = []
        for ticket in self._open.values():
            slots = tuple(claim for claim in ticket.claims if not claim.bucket_ms)
            arguments: list[str | int] = [self._now(), ticket.request_id, self._lease_ms]
            renewals.append(self._calls.call("pagegate_renew_1", _keys(ticket.account_id, slots), arguments))
        await asyncio.gather(*renewals)

    async def _recover(self) -> None:
        """What ended meanwhile gives back, what runs takes its slots again, and then all go by the server once more."""
        await self._calls.call("pagegate_settle_1", ["pagegate:probe"], [""])
        await self._deliver_waiting()
        await self._renew()
        await self._deliver_waiting()
        self.degraded = False
        log.info("limits are shared again")

    def _now(self) -> str:
        return "" if self._clock_ms is None else str(self._clock_ms())

    def _trouble(self, error: BaseException) -> None:
        if not self.degraded:
            log.warning("limits are kept by this process alone, at its share", error=f"{type(error).__name__}: {error}")
        self.degraded = True


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _keys(account_id: str, claims: Sequence[Claim]) -> list[str]:
    """The account id is the hash tag: one call's keys lie on one node."""
    return [f"pagegate:{{{account_id}}}:{claim.name}" for claim in claims]


def _ticket(
    account_id: str, request_id: str, claims: tuple[Claim, ...], standings: Sequence[Standing], now_ms: int
) -> Ticket:
    return Ticket(
        account_id,
        request_id,
        claims,
        tuple(bucket_at(now_ms, claim) for claim in claims),
        tuple(taken(standing, now_ms) for standing in standings),
    )
