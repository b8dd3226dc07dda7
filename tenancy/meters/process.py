"""Live meters inside one process. Chosen by api/wiring.py; also what meters/redis.py falls back on.

Exact for one process. Several would each grant the whole limit: they need meters that they share.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tenancy.claims import Claim, Standing
from tenancy.meters.protocol import Reservation, Ticket, claims_of
from tenancy.principal import Principal
from tenancy.quotas import NOTHING, Amounts, bucket_at, judge, judge_slot, refusal, taken

# Accounts that are quiet are dropped once in so many reservations: the sweep costs little, and memory stays bounded.
_SWEEP_EVERY = 1_000


@dataclass(slots=True)
class _Counter:
    """Counts by bucket. bucket_ms, buckets: its window, as in Claim."""

    bucket_ms: int
    buckets: int
    counts: dict[int, int] = field(default_factory=dict)

    def forget_before(self, now_ms: int) -> None:
        oldest = now_ms // self.bucket_ms - self.buckets + 1
        for bucket in [bucket for bucket in self.counts if bucket < oldest]:
            del self.counts[bucket]


@dataclass(slots=True)
class _Account:
    counters: dict[str, _Counter] = field(default_factory=dict)
    slots: dict[str, set[str]] = field(default_factory=dict)


class ProcessMeters:
    """Implements tenancy.meters.protocol.Meters. Slots are sets and no counters: none can be given back twice."""

    def __init__(self, *, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._clock_ms = clock_ms
        self._accounts: dict[str, _Account] = {}
        self._live_slots = 0
        self._until_sweep = _SWEEP_EVERY

    async def reserve(self, principal: Principal, reservation: Reservation) -> Ticket:
        claims = claims_of(principal, reservation.model, reservation.amounts)
        return self.reserve_claims(principal.account_id, reservation.request_id, claims)

    def reserve_claims(self, account_id: str, request_id: str, claims: tuple[Claim, ...]) -> Ticket:
        """As reserve, for claims that are known."""
        now_ms = self._clock_ms()
        account = self._accounts.get(account_id) or _Account()
        standings = [_judged(account, claim, now_ms) for claim in claims]
        refused = refusal(standings)
        if refused is not None:
            raise refused
        ticket = Ticket(
            account_id,
            request_id,
            claims,
            tuple(bucket_at(now_ms, claim) for claim in claims),
            tuple(taken(standing, now_ms) for standing in standings),
        )
        self.take(ticket)
        return ticket

    def take(self, ticket: Ticket) -> None:
        """Count what was granted, here or elsewhere."""
        account = self._accounts.setdefault(ticket.account_id, _Account())
        for claim, bucket in zip(ticket.claims, ticket.buckets, strict=True):
            if claim.bucket_ms:
                _book(account, claim, bucket)
            else:
                slots = account.slots.setdefault(claim.name, set())
                assert ticket.request_id not in slots, f"request {ticket.request_id} reserved twice"
                slots.add(ticket.request_id)
        self._live_slots += 1
        self._sweep()

    async def extend(self, ticket: Ticket, amounts: Amounts) -> Ticket:
        more = ticket.extension(amounts)
        return self.extend_claims(ticket, more) if more else ticket

    def extend_claims(self, ticket: Ticket, claims: tuple[Claim, ...]) -> Ticket:
        """As extend, for claims that are known."""
        now_ms = self._clock_ms()
        account = self._accounts[ticket.account_id]
        refused = refusal([_judged(account, claim, now_ms) for claim in claims])
        if refused is not None:
            raise refused
        longer = ticket.extended(claims, now_ms)
        self.take_more(ticket, longer)
        return longer

    def take_more(self, ticket: Ticket, longer: Ticket) -> None:
        """Count an extension that was granted, here or elsewhere."""
        account = self._accounts[ticket.account_id]
        for claim, bucket in list(zip(longer.claims, longer.buckets, strict=True))[len(ticket.claims) :]:
            _book(account, claim, bucket)

    async def settle(self, ticket: Ticket, actual: Amounts = NOTHING) -> None:
        self.settle_now(ticket, actual)

    def settle_now(self, ticket: Ticket, actual: Amounts) -> None:
        account = self._accounts.get(ticket.account_id)
        if account is None or ticket.request_id not in account.slots.get(ticket.claims[0].name, ()):
            return
        corrections = ticket.corrections(actual)
        for claim, bucket, difference in zip(ticket.claims, ticket.buckets, corrections, strict=True):
            if claim.bucket_ms:
                _correct(account.counters[claim.name].counts, bucket, difference)
            else:
                slots = account.slots[claim.name]
                slots.discard(ticket.request_id)
                if not slots:
                    del account.slots[claim.name]
        self._live_slots -= 1
        if not account.slots and not account.counters:
            del self._accounts[ticket.account_id]

    async def standings(self, principal: Principal, model: str) -> tuple[Standing, ...]:
        now_ms = self._clock_ms()
        account = self._accounts.get(principal.account_id) or _Account()
        return tuple(_judged(account, claim, now_ms) for claim in claims_of(principal, model, NOTHING))

    def live_slots(self) -> int:
        return self._live_slots

    def _sweep(self) -> None:
        self._until_sweep -= 1
        if self._until_sweep > 0:
            return
        self._until_sweep = _SWEEP_EVERY
        now_ms = self._clock_ms()
        for account_id, account in list(self._accounts.items()):
            if account.slots:
                continue  # an open request's counters are still to be corrected
            for name, counter in list(account.counters.items()):
                counter.forget_before(now_ms)
                if not counter.counts:
                    del account.counters[name]
            if not account.counters:
                del self._accounts[account_id]


def _judged(account: _Account, claim: Claim, now_ms: int) -> Standing:
    if not claim.bucket_ms:
        return judge_slot(claim, len(account.slots.get(claim.name, ())))
    counter = account.counters.get(claim.name)
    if counter is None:
        return judge(claim, {}, now_ms)
    counter.forget_before(now_ms)
    return judge(claim, counter.counts, now_ms)


def _book(account: _Account, claim: Claim, bucket: int) -> None:
    counter = account.counters.setdefault(claim.name, _Counter(claim.bucket_ms, claim.buckets))
    counter.counts[bucket] = counter.counts.get(bucket, 0) + claim.amount


def _correct(counts: dict[int, int], bucket: int, difference: int) -> None:
    """A bucket that has left its window is gone and stays so."""
    if bucket in counts:
        counts[bucket] += difference
        assert counts[bucket] >= 0, "no more is given back than was reserved"
