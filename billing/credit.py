"""Credit: money held before work begins, so that an account never spends above its limit. The gateway's hold calls it.

Exact for one process. What an account has spent is read from SQL once, on its first limited hold, and kept up to date
from then on by what is settled here. Everything but that first load is synchronous, so no two holds see the same money.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from billing.errors import BillingUnavailable, InsufficientCredits
from billing.money import usd_decimal
from billing.store import UsageStore
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable


@dataclass(slots=True)
class _Hold:
    account: "_Account"
    limit_nano: int | None
    amount_nano: int


@dataclass(slots=True)
class _Account:
    """spent_nano is None until it is loaded. open: ids of its holds."""

    spent_nano: int | None = None
    held_nano: int = 0
    open: set[str] = field(default_factory=set)
    settled_while_loading_nano: int = 0
    loading: asyncio.Task[None] | None = None

    def fits(self, limit_nano: int | None, amount_nano: int) -> bool:
        if limit_nano is None:
            return True
        assert self.spent_nano is not None, "a limited hold waits for what was spent"
        return self.spent_nano + self.held_nano + amount_nano <= limit_nano


class Credit:
    """Belongs to one event loop. `flush` brings every record of this process to SQL (Metering.flush)."""

    def __init__(self, database: Database, flush: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._store = UsageStore(database)
        self._flush = flush
        self._accounts: dict[str, _Account] = {}
        self._holds: dict[str, _Hold] = {}
        self._held_nano = 0

    async def hold(self, account_id: str, limit_nano: int | None, request_id: str, amount_nano: int) -> None:
        """Set the amount aside for one request. A refused request holds nothing.

        Raises InsufficientCredits if spent + held + amount is above the limit; BillingUnavailable if what was spent is
        needed and can't be read. Without a limit nothing is refused, and the hold is still counted.
        """
        assert amount_nano >= 0, "a hold is not negative"
        account = self._accounts.setdefault(account_id, _Account())
        # Whoever comes while a load runs waits for it, limited or not: a request that began and ended meanwhile might
        # or might not be in the sum that is read.
        while account.loading is not None or (limit_nano is not None and account.spent_nano is None):
            load = account.loading or self._begin_load(account_id, account)
            await asyncio.wait([load])  # a waiting client that leaves does not end the load of the others
            if limit_nano is not None:
                load.result()
        assert request_id not in self._holds, f"request {request_id} held twice"
        if not account.fits(limit_nano, amount_nano):
            left_nano = max(0, (limit_nano or 0) - (account.spent_nano or 0) - account.held_nano)
            raise InsufficientCredits(
                f"This request may cost {usd_decimal(amount_nano)} USD, the account has {usd_decimal(left_nano)} left.",
            )
        self._holds[request_id] = _Hold(account, limit_nano, 0)
        account.open.add(request_id)
        self._add(self._holds[request_id], amount_nano)

    def extend(self, request_id: str, amount_nano: int) -> bool:
        """Hold more for a request that runs on; False, and nothing changes, if it does not fit under the limit."""
        assert amount_nano >= 0, "an extension is not negative"
        hold = self._holds[request_id]
        if not hold.account.fits(hold.limit_nano, amount_nano):
            return False
        self._add(hold, amount_nano)
        return True

    def settle(self, request_id: str, cost_nano: int) -> None:
        """Close the hold and count the cost as spent, above the limit too if it comes to that.

        Call it after the usage record is written. Idempotent: a second call, or one for an unknown id, does nothing.
        """
        assert cost_nano >= 0, "a cost is not negative"
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return
        account = hold.account
        self._add(hold, -hold.amount_nano)
        account.open.remove(request_id)
        if account.spent_nano is not None:
            account.spent_nano += cost_nano
        elif account.loading is not None:
            account.settled_while_loading_nano += cost_nano

    def held_nano(self) -> int:
        """What is held over all accounts; 0 when the service is idle."""
        return self._held_nano

    def _add(self, hold: _Hold, amount_nano: int) -> None:
        hold.amount_nano += amount_nano
        hold.account.held_nano += amount_nano
        self._held_nano += amount_nano

    def _begin_load(self, account_id: str, account: _Account) -> asyncio.Task[None]:
        load = asyncio.get_running_loop().create_task(self._load(account_id, account), name="credit load")
        load.add_done_callback(_retrieve)
        account.loading = load
        return load

    async def _load(self, account_id: str, account: _Account) -> None:
        # Requests that are open now may or may not be in SQL when the sum is read: it leaves them out, and what they
        # cost is counted as they settle. Whatever settled before is in SQL once everything recorded so far is.
        open_before = frozenset(account.open)
        account.settled_while_loading_nano = 0
        try:
            await self._flush()
            spent_nano = await self._database.call(self._spent, account_id, open_before)
            account.spent_nano = spent_nano + account.settled_while_loading_nano
        except TenancyUnavailable as error:
            raise BillingUnavailable("What the account has spent can't be read now.", retry_after_s=1) from error
        finally:
            account.loading = None

    def _spent(self, account_id: str, open_before: frozenset[str]) -> int:
        return self._store.spent_nano(account_id, without=open_before)


def _retrieve(load: asyncio.Task[None]) -> None:
    if not load.cancelled():
        load.exception()  # whoever waited was told; perhaps nobody waits any more
