"""Live meters inside one process: concurrent slots, as leases keyed by request id. Chosen by api/wiring.py.

Exact for one process. Several would each grant the whole limit: they need meters that they share.
"""

from tenancy.errors import ConcurrencyExceeded
from tenancy.principal import Principal


class ProcessMeters:
    """Implements tenancy.meters.protocol.Meters. A set and no counter: a lease can't be given back twice."""

    def __init__(self) -> None:
        self._leases: dict[str, set[str]] = {}
        self._live_slots = 0

    async def reserve(self, principal: Principal, request_id: str) -> None:
        leases = self._leases.get(principal.account_id)
        if leases is None:
            leases = set()
        assert request_id not in leases, f"request {request_id} reserved twice"
        if principal.concurrency is not None and len(leases) >= principal.concurrency:
            raise ConcurrencyExceeded(
                f"The account has {principal.concurrency} requests under way, which is all it may have.",
                retry_after_s=1,
            )
        leases.add(request_id)
        self._leases[principal.account_id] = leases
        self._live_slots += 1

    async def settle(self, account_id: str, request_id: str) -> None:
        leases = self._leases.get(account_id)
        if leases is None or request_id not in leases:
            return
        leases.remove(request_id)
        self._live_slots -= 1
        if not leases:
            del self._leases[account_id]

    def live_slots(self) -> int:
        return self._live_slots
