"""The contract of an account's live meters: reserve all or none, settle once. Implementations stand beside this file.

A reservation is keyed by the request id, so that giving back twice is harmless.
"""

from typing import Protocol

from tenancy.principal import Principal


class Meters(Protocol):
    """Live meters of all accounts in this service."""

    async def reserve(self, principal: Principal, request_id: str) -> None:
        """Take every meter of the account for one request, or none.

        Raises ConcurrencyExceeded if the account's slots are all taken. A refused request has consumed nothing.
        """

    async def settle(self, account_id: str, request_id: str) -> None:
        """Give back what the request holds. Idempotent: the second call, or one for an unknown id, does nothing."""

    def live_slots(self) -> int:
        """How many slots are held now over all accounts; 0 when the service is idle."""
