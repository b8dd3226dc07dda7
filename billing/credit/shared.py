"""Credit of several processes that serve the same accounts: each holds against allowances that SQL keeps for it.

While a process has allowance to spare, a hold asks nobody; else it takes more in one transaction, many requests' worth
while there is plenty and exactly one's near the floor. What it does not use goes back within seconds. So what all
processes hold together never exceeds what there is, and a process that dies keeps its allowances for one lease.

metering.py posts under `lock` and tells what it posted, since costs lessen an allowance as they lessen the balance.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
import structlog

from billing.budgets import Budget, read_budgets
from billing.credit.allowances import (
    Granted,
    Pot,
    forget,
    give_back,
    grant,
    post_against,
    read_amounts,
    renew,
)
from billing.credit.protocol import Clamp, Credit, Spending
from billing.errors import BillingUnavailable, BudgetExceeded, InsufficientCredits
from billing.funds import read_revisions
from billing.ledger.payers import AccountMode, HoldMode, Paying, read_paying
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

_SECOND_NS = 1_000_000_000
_IDLE_NS = 2 * _SECOND_NS
_TEND_INTERVAL_S = 1
# A lease is taken to end so much before SQL lets it: clocks differ, and a query takes time.
_LEASE_MARGIN_NS = 5 * _SECOND_NS
# Others may take what is left between two looks at it: so often a hold tries to have less.
_CLAMPS_MAX = 4

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Use:
    """Of one pot: granted in SQL; held by running requests; unposted: spent by ended ones that are not in SQL yet."""

    granted_nano: int = 0
    held_nano: int = 0
    unposted_nano: int = 0
    used_at_ns: int = 0

    @property
    def used_nano(self) -> int:
        return self.held_nano + self.unposted_nano

    @property
    def free_nano(self) -> int:
        return max(0, self.granted_nano - self.used_nano)


@dataclass(slots=True)
class _Hold:
    """posted: its record was in SQL before it was settled here."""

    spending: Spending
    pots: tuple[Pot, ...]
    amount_nano: int = 0
    posted: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """What says which pots a request of the account counts for; good while the revision stays."""

    paying: Paying
    budgets: tuple[Budget, ...]

    def pots(self, spending: Spending) -> tuple[Pot, ...]:
        account_id = spending.account_id
        bounded = self.paying.mode is AccountMode.PREPAID or spending.limit_nano is not None
        of_budgets = tuple(
            Pot(account_id, budget.id, budget.period.around(spending.at_ns)[0])
            for budget in self.budgets
            if spending.counts_for(budget)
        )
        return (Pot(account_id), *of_budgets) if bounded else of_budgets


class SharedCredit(Credit):
    """process: a name that stays with this process's spool. Call `open` when the spool is posted; then run `run`."""

    def __init__(
        self,
        database: Database,
        process: str,
        *,
        lease_s: int = 60,
        clock: Callable[[], int] = time.time_ns,
        note_exhausted: Callable[[str, str, int, int], None] = lambda *_: None,
    ) -> None:
        self.lock = asyncio.Lock()
        self.over_hold_nano = 0
        self._database = database
        self._process = process
        self._lease_ns = lease_s * _SECOND_NS
        self._clock = clock
        self._note_exhausted = note_exhausted
        self._known: dict[str, _Known] = {}
        self._uses: dict[Pot, _Use] = {}
        self._holds: dict[str, _Hold] = {}
        self._unposted: dict[str, tuple[tuple[Pot, ...], int]] = {}
        self._held_nano = 0
        self._lease_until_ns = 0

    async def open(self) -> None:
        """Free what an earlier life of this process was allowed: its records are posted. Raises TenancyUnavailable."""
        await self._database.call(self._written, forget)
        self._lease_until_ns = self._clock() + self._lease_ns - _LEASE_MARGIN_NS

    async def close(self) -> None:
        """Leave nothing to expire, if everything is posted. Never raises: the lease bounds what stays."""
        if not self._holds and not self._unposted:
            with suppress(TenancyUnavailable):
                await self._database.call(self._written, forget)

    async def hold(self, spending: Spending, request_id: str, amount_nano: int, *, clamp: Clamp | None = None) -> int:
        assert amount_nano >= 0, "a hold is not negative"
        assert request_id not in self._holds, f"request {request_id} held twice"
        pots = await self._take(spending, amount_nano)
        for _ in range(_CLAMPS_MAX):
            if not isinstance(pots, InsufficientCredits | BudgetExceeded) or not self._clamps(spending):
                break
            less_nano = 0 if clamp is None else clamp(pots.left_nano)
            if not less_nano:
                break
            amount_nano = less_nano
            pots = await self._take(spending, amount_nano)
        if isinstance(pots, Exception):
            self._note(spending, pots)
            raise pots
        assert request_id not in self._holds, f"request {request_id} held twice"
        self._holds[request_id] = _Hold(spending, pots, amount_nano)
        self._held_nano += amount_nano
        return amount_nano

    async def extend(self, request_id: str, amount_nano: int) -> bool:
        assert amount_nano >= 0, "an extension is not negative"
        hold = self._holds[request_id]
        pots = await self._take(hold.spending, amount_nano, hold.pots)
        if isinstance(pots, Exception):
            self._note(hold.spending, pots)
            return False
        if self._holds.get(request_id) is not hold:  # it ended meanwhile: what was taken goes back
            self._release(pots, amount_nano)
            return False
        hold.amount_nano += amount_nano
        self._held_nano += amount_nano
        return True

    def settle(self, request_id: str, cost_nano: int) -> None:
        assert cost_nano >= 0, "a cost is not negative"
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return
        if cost_nano > hold.amount_nano:
            self.over_hold_nano += cost_nano - hold.amount_nano
            log.error("cost_above_hold", request_id=request_id, over_hold_nano=cost_nano - hold.amount_nano)
        self._held_nano -= hold.amount_nano
        self._release(hold.pots, hold.amount_nano)
        if cost_nano and not hold.posted:
            self._unposted[request_id] = (hold.pots, cost_nano)
            for pot in hold.pots:
                self._uses.setdefault(pot, _Use()).unposted_nano += cost_nano

    def held_nano(self) -> int:
        return self._held_nano

    async def refresh(self) -> None:
        try:
            revisions = await self._database.call(read_revisions, self._database)
        except TenancyUnavailable as error:
            raise BillingUnavailable("Accounts' funds can't be read now.", retry_after_s=1) from error
        for account_id, known in list(self._known.items()):
            if known.paying.revision != revisions.get(account_id, 0):
                del self._known[account_id]

    def post(self, connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> dict[Pot, int]:
        """Lessen this process's allowances by requests that are posted in this transaction, which metering holds the
        lock for; returns what is left of each.
        """
        post_against(connection, self._process, rows)
        return read_amounts(connection, self._process, list(self._uses))

    def posted(self, request_ids: Sequence[str], amounts: dict[Pot, int]) -> None:
        """The transaction of `post` is committed; the lock is still held."""
        for pot, use in self._uses.items():
            use.granted_nano = amounts.get(pot, 0)
        for request_id in request_ids:
            pots, cost_nano = self._unposted.pop(request_id, ((), 0))
            for pot in pots:
                self._uses.setdefault(pot, _Use()).unposted_nano -= cost_nano
            if request_id in self._holds:
                self._holds[request_id].posted = True

    async def run(self) -> None:
        """Renew what is used and give back what is not, for ever. Trouble is waited out: the lease bounds it."""
        away = False
        while True:
            await asyncio.sleep(_TEND_INTERVAL_S)
            try:
                await self.tend()
            except TenancyUnavailable as error:
                if not away:
                    log.warning("allowances_not_renewed", reason=error.message)
                away = True
            else:
                away = False

    async def tend(self) -> None:
        """One round of `run`. Raises TenancyUnavailable."""
        async with self.lock:
            now_ns = self._clock()
            idle = {
                pot: use.free_nano
                for pot, use in self._uses.items()
                if use.free_nano and now_ns - use.used_at_ns >= _IDLE_NS
            }
            for pot, unused_nano in idle.items():
                self._uses[pot].granted_nano -= unused_nano  # first, so that nobody holds it while it goes back
            if idle:
                self._learn(await self._database.call(self._written, partial(give_back, unused_nano=idle)))
            if self._uses and self._lease_until_ns - now_ns < self._lease_ns // 2:
                await self._renew(now_ns)
            for pot in [pot for pot, use in self._uses.items() if not use.granted_nano and not use.used_nano]:
                del self._uses[pot]

    async def _take(
        self, spending: Spending, amount_nano: int, pots: tuple[Pot, ...] | None = None
    ) -> tuple[Pot, ...] | Exception:
        """Hold so much more of every pot, or of none: then the refusal. Raises BillingUnavailable."""
        known = self._known.get(spending.account_id)
        pots = known.pots(spending) if pots is None and known is not None else pots
        if pots is None or not self._fits(pots, amount_nano):
            try:
                async with self.lock:
                    taken = await self._taken_from_sql(spending, amount_nano, pots)
            except TenancyUnavailable as error:
                raise BillingUnavailable("The account's funds can't be read now.", retry_after_s=1) from error
            return taken
        self._add(pots, amount_nano)
        return pots

    def _clamps(self, spending: Spending) -> bool:
        known = self._known.get(spending.account_id)
        return known is not None and known.paying.hold_mode is HoldMode.CLAMP

    def _note(self, spending: Spending, refusal: Exception) -> None:
        if isinstance(refusal, BudgetExceeded):
            self._note_exhausted(spending.account_id, refusal.budget_id, refusal.period_start_ns, spending.at_ns)

    async def _taken_from_sql(
        self, spending: Spending, amount_nano: int, pots: tuple[Pot, ...] | None
    ) -> tuple[Pot, ...] | Exception:
        account_id = spending.account_id
        if account_id not in self._known:
            self._known[account_id] = await self._database.call(self._read_known, account_id)
        if pots is None:
            pots = self._known[account_id].pots(spending)
        now_ns = self._clock()
        if now_ns >= self._lease_until_ns:
            await self._renew(now_ns)
        if not self._fits(pots, amount_nano):
            free = {pot: self._uses[pot].free_nano for pot in pots if pot in self._uses}
            deed = partial(
                grant,
                spending=spending,
                needed_nano=amount_nano,
                free_nano=free,
                now_ns=now_ns,
                lease_ns=self._lease_ns,
            )
            granted: Granted = await self._database.call(self._written, deed)
            for pot in granted.amounts:
                self._uses.setdefault(pot, _Use())
            self._learn(granted.amounts)
            if granted.refusal is not None:
                return granted.refusal
        self._add(pots, amount_nano)
        return pots

    async def _renew(self, now_ns: int) -> None:
        used = {pot: use.used_nano for pot, use in self._uses.items()}
        deed = partial(renew, used_nano=used, expires_at_ns=now_ns + self._lease_ns)
        self._learn(await self._database.call(self._written, deed))
        self._lease_until_ns = now_ns + self._lease_ns - _LEASE_MARGIN_NS

    def _fits(self, pots: tuple[Pot, ...], amount_nano: int) -> bool:
        if amount_nano == 0 or not pots:
            return True
        if self._clock() >= self._lease_until_ns:
            return False
        return all(pot in self._uses and self._uses[pot].free_nano >= amount_nano for pot in pots)

    def _add(self, pots: tuple[Pot, ...], amount_nano: int) -> None:
        now_ns = self._clock()
        for pot in pots:
            use = self._uses.setdefault(pot, _Use())
            use.held_nano += amount_nano
            use.used_at_ns = now_ns

    def _release(self, pots: tuple[Pot, ...], amount_nano: int) -> None:
        for pot in pots:
            # A hold of nothing keeps no pot: it may have been put away meanwhile.
            self._uses.setdefault(pot, _Use()).held_nano -= amount_nano

    def _learn(self, amounts: Mapping[Pot, int]) -> None:
        for pot, nano in amounts.items():
            if pot in self._uses:
                self._uses[pot].granted_nano = nano

    def _written(self, deed: Callable[..., Any]) -> Any:
        with self._database.write() as connection:
            return deed(connection, self._process)

    def _read_known(self, account_id: str) -> _Known:
        with self._database.read() as connection:
            paying = read_paying(connection, account_id)
            hard = tuple(budget for budget in read_budgets(connection, account_id) if budget.hard)
        return _Known(paying, hard)
