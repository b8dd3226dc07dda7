"""The contract of an account's live meters: reserve all or none, settle once. Implementations stand beside this file.

A reservation is keyed by the request id, so that settling twice is harmless.
"""

from dataclasses import replace
from typing import Protocol

from tenancy.claims import Claim, Standing
from tenancy.principal import Principal
from tenancy.quotas import Amounts, bucket_at, claims
from tenancy.values import value


@value
class Reservation:
    """What one request may take: its prompt, the outputs that are held ahead of it, and the neurons of both."""

    request_id: str
    model: str
    amounts: Amounts


@value
class Ticket:
    """What a request holds of the meters.

    claims, buckets: what was booked where, 0 for slots; an extension adds to both. standings: as the reservation left
    them.
    """

    account_id: str
    request_id: str
    claims: tuple[Claim, ...]
    buckets: tuple[int, ...]
    standings: tuple[Standing, ...]

    def extended(self, claims: tuple[Claim, ...], now_ms: int) -> "Ticket":
        """With what was booked now beside what was booked before."""
        buckets = tuple(bucket_at(now_ms, claim) for claim in claims)
        return replace(self, claims=self.claims + claims, buckets=self.buckets + buckets)

    def extension(self, amounts: Amounts) -> tuple[Claim, ...]:
        """The claims of so much more, under the limits that were in force at the reservation."""
        counters = {claim.name: claim for claim in self.claims if claim.bucket_ms}
        more = (replace(claim, amount=amounts.of(claim.meter)) for claim in counters.values())
        return tuple(claim for claim in more if claim.amount)

    def corrections(self, actual: Amounts) -> tuple[int, ...]:
        """For each claim, the difference of what was taken to what was booked; 0 for slots.

        What was booked last is given back first, and what is above all bookings goes on top of the last.
        """
        excess: dict[str, int] = {}
        for claim in self.claims:
            if claim.bucket_ms:
                excess[claim.name] = excess.get(claim.name, -actual.of(claim.meter)) + claim.amount
        differences: list[int] = []
        for claim in reversed(self.claims):
            left = excess.get(claim.name, 0) if claim.bucket_ms else 0
            given_back = min(left, claim.amount)
            if claim.bucket_ms:
                excess[claim.name] = left - given_back
            differences.append(-given_back)
        return tuple(reversed(differences))


class Meters(Protocol):
    """Live meters of all accounts in this service."""

    async def reserve(self, principal: Principal, reservation: Reservation) -> Ticket:
        """Take every meter that the request falls under, or none.

        Raises a QuotaExceeded for the meter that is hardest to wait for. A refused request has consumed nothing.
        """

    async def extend(self, ticket: Ticket, amounts: Amounts) -> Ticket:
        """Take more ahead of a running request: all or none. The ticket to settle from here on.

        Raises a QuotaExceeded; nothing has changed then.
        """

    async def settle(self, ticket: Ticket, actual: Amounts) -> None:
        """Give the slots back and correct what was reserved to what was taken, where it was booked.

        Idempotent: the second call does nothing. `quotas.NOTHING` undoes the reservation.
        """

    async def standings(self, principal: Principal, model: str) -> tuple[Standing, ...]:
        """How the meters stand that a request for the model would take from. Looking costs nothing."""

    def live_slots(self) -> int:
        """How many requests hold a slot through this object, over all accounts; 0 when it is idle."""


def claims_of(principal: Principal, model: str, amounts: Amounts) -> tuple[Claim, ...]:
    """What a request of this principal takes."""
    return claims(
        principal.quotas,
        principal.concurrency,
        key_id=principal.lineage,
        project_id=principal.project,
        model=model,
        amounts=amounts,
    )
