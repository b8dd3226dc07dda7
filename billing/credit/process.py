"""Credit of one process that serves alone: nothing but its first look at an account asks the database.

An account's funds are read from SQL on its first hold and kept up to date from then on by what
is settled here; they are read again when a deed changed them, a grant expires, or a budget's period ends. All but
such a load is synchronous, so no two holds see the same money.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import structlog

from billing.budgets import Budget
from billing.credit.protocol import Clamp, Credit, Spending
from billing.errors import BillingUnavailable, BudgetExceeded, InsufficientCredits
from billing.funds import Funds, read_funds, read_revisions
from billing.ledger.payers import AccountMode, HoldMode
from billing.money import usd_decimal
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

# A request that began just before a period's end may ask just after it; budgets of a period are kept this much longer.
_LATE_NS = 3_600 * 1_000_000_000

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Hold:
    account: "_Account"
    spending: Spending
    amount_nano: int = 0


@dataclass(slots=True)
class _BudgetUse:
    """One period of one budget."""

    budget: Budget
    from_ns: int
    to_ns: int
    spent_nano: int
    held_nano: int = 0

    def counts(self, spending: Spending) -> bool:
        return self.from_ns <= spending.at_ns < self.to_ns and spending.counts_for(self.budget)


@dataclass(slots=True)
class _Account:
    """funds is None until they are loaded. open: its holds. settled_while_loading: what a load may not have seen.
    looked_at: the revision that was found meanwhile, None if nobody looked: a later one than was read is not in it.
    """

    funds: Funds | None = None
    stale: bool = False
    balance_nano: int = 0
    held_nano: int = 0
    uses: list[_BudgetUse] = field(default_factory=list)
    open: dict[str, _Hold] = field(default_factory=dict)
    settled_while_loading: list[tuple[Spending, int]] = field(default_factory=list)
    looked_at: int | None = None
    loading: asyncio.Task[None] | None = None

    def knows(self, at_ns: int) -> bool:
        """Whether the funds, as they are known, hold for a request that began at this instant."""
        funds = self.funds
        if funds is None or self.stale or at_ns >= funds.until_ns:
            return False
        return all(at_ns >= standing.from_ns or self._has_use(standing.budget, at_ns) for standing in funds.budgets)

    def refusal(self, spending: Spending, amount_nano: int) -> InsufficientCredits | BudgetExceeded | None:
        """Why so much more can't be held, None if it can. Nothing costs nothing, whatever is left."""
        if amount_nano == 0:
            return None
        left_nano = self._left(spending)
        if left_nano is not None and amount_nano > left_nano:
            return InsufficientCredits(
                f"This request may cost {usd_decimal(amount_nano)} USD, "
                f"the account has {usd_decimal(max(0, left_nano))} left.",
                left_nano=max(0, left_nano),
            )
        for use in self.uses:
            if use.counts(spending) and use.spent_nano + use.held_nano + amount_nano > use.budget.limit_nano:
                left_nano = max(0, use.budget.limit_nano - use.spent_nano - use.held_nano)
                return BudgetExceeded(
                    f"This request may cost {usd_decimal(amount_nano)} USD, "
                    f"of the budget {use.budget.id} ({use.budget.period}) {usd_decimal(left_nano)} are left.",
                    budget_id=use.budget.id,
                    period_start_ns=use.from_ns,
                    left_nano=left_nano,
                )
        return None

    def clamped(self, refusal: InsufficientCredits | BudgetExceeded, clamp: Clamp | None, amount_nano: int) -> int:
        """What may be asked for instead, less than before; 0 if the refusal stands."""
        assert self.funds is not None, "a hold waits until the funds are known"
        if clamp is None or self.funds.hold_mode is HoldMode.REFUSE:
            return 0
        less_nano = clamp(refusal.left_nano)
        assert 0 <= less_nano <= refusal.left_nano < amount_nano or less_nano == 0, "a clamp takes of what is left"
        return less_nano

    def hold(self, hold: _Hold, amount_nano: int) -> None:
        """Hold more, or with a negative amount less."""
        hold.amount_nano += amount_nano
        self.held_nano += amount_nano
        for use in self.uses:
            if use.counts(hold.spending):
                use.held_nano += amount_nano

    def spend(self, spending: Spending, cost_nano: int) -> None:
        self.balance_nano -= cost_nano
        _count(self.uses, spending, cost_nano)
        if self.loading is not None:
            self.settled_while_loading.append((spending, cost_nano))

    def loaded(self, funds: Funds, at_ns: int) -> None:
        """Take over what was read; what settled meanwhile is not in it."""
        read = [_BudgetUse(one.budget, one.from_ns, one.to_ns, one.spent_nano) for one in funds.budgets]
        self.balance_nano = funds.balance_nano
        for spending, cost_nano in self.settled_while_loading:
            self.balance_nano -= cost_nano
            _count(read, spending, cost_nano)
        for use in read:
            use.held_nano = sum(hold.amount_nano for hold in self.open.values() if use.counts(hold.spending))
        fresh = {(use.budget.id, use.from_ns) for use in read}
        ids = {use.budget.id for use in read}
        late = [
            use
            for use in self.uses
            if use.budget.id in ids and (use.budget.id, use.from_ns) not in fresh and use.to_ns > at_ns - _LATE_NS
        ]
        self.uses = read + late
        self.funds = funds
        self.stale = self.looked_at is not None and funds.revision < self.looked_at

    def _left(self, spending: Spending) -> int | None:
        assert self.funds is not None, "a hold waits until the funds are known"
        if self.funds.mode is AccountMode.PREPAID:
            return self.balance_nano - self.held_nano
        if spending.limit_nano is None:
            return None
        return spending.limit_nano + self.balance_nano - self.held_nano

    def _has_use(self, budget: Budget, at_ns: int) -> bool:
        return any(use.budget.id == budget.id and use.from_ns <= at_ns < use.to_ns for use in self.uses)


class ProcessCredit(Credit):
    """Belongs to one event loop. `flush` brings every record of this process to SQL (Metering.flush).

    note_exhausted: is told (account, budget, start of its period, when) of every hold that a budget refuses.
    """

    def __init__(
        self,
        database: Database,
        flush: Callable[[], Awaitable[None]],
        note_exhausted: Callable[[str, str, int, int], None] = lambda *_: None,
    ) -> None:
        self._note_exhausted = note_exhausted
        self._database = database
        self._flush = flush
        self._accounts: dict[str, _Account] = {}
        self._holds: dict[str, _Hold] = {}
        self._held_nano = 0
        self.over_hold_nano = 0  # charged beyond what was held, since the process began: 0 unless a hold is a bug

    async def hold(self, spending: Spending, request_id: str, amount_nano: int, *, clamp: Clamp | None = None) -> int:
        """Set the amount aside for one request, or what `clamp` makes of what is left. A refused one holds nothing.

        Raises InsufficientCredits if it would take the balance below its floor, BudgetExceeded if a hard budget can't
        bear it, BillingUnavailable if the funds can't be read.
        """
        assert amount_nano >= 0, "a hold is not negative"
        account = self._accounts.setdefault(spending.account_id, _Account())
        # Whoever comes while a load runs waits for it: a request that began and ended meanwhile might or might not be
        # in the sums that are read.
        while account.loading is not None or not account.knows(spending.at_ns):
            load = account.loading or self._begin_load(account, spending)
            await asyncio.wait([load])  # a waiting client that leaves does not end the load of the others
            load.result()
        assert request_id not in self._holds, f"request {request_id} held twice"
        refusal = account.refusal(spending, amount_nano)
        while refusal is not None:  # each other limit that refuses has less left
            amount_nano = account.clamped(refusal, clamp, amount_nano)
            if not amount_nano:
                self._note(spending, refusal)
                raise refusal
            refusal = account.refusal(spending, amount_nano)
        hold = self._holds[request_id] = account.open[request_id] = _Hold(account, spending)
        account.hold(hold, amount_nano)
        self._held_nano += amount_nano
        return amount_nano

    async def extend(self, request_id: str, amount_nano: int) -> bool:
        """Hold more for a request that runs on; False, and nothing changes, if it does not fit."""
        assert amount_nano >= 0, "an extension is not negative"
        hold = self._holds[request_id]
        refusal = hold.account.refusal(hold.spending, amount_nano)
        if refusal is not None:
            self._note(hold.spending, refusal)
            return False
        hold.account.hold(hold, amount_nano)
        self._held_nano += amount_nano
        return True

    def settle(self, request_id: str, cost_nano: int) -> None:
        """Close the hold and count the cost as spent, beyond every limit too if it comes to that.

        Call it after the usage record is written. Idempotent: a second call, or one for an unknown id, does nothing.
        """
        assert cost_nano >= 0, "a cost is not negative"
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return
        if cost_nano > hold.amount_nano:
            self.over_hold_nano += cost_nano - hold.amount_nano
            log.error("cost_above_hold", request_id=request_id, over_hold_nano=cost_nano - hold.amount_nano)
        self._held_nano -= hold.amount_nano
        hold.account.hold(hold, -hold.amount_nano)
        del hold.account.open[request_id]
        hold.account.spend(hold.spending, cost_nano)

    def held_nano(self) -> int:
        """What is held over all accounts; 0 when the service is idle."""
        return self._held_nano

    async def refresh(self) -> None:
        """Notice what deeds have changed; the composition root calls it each second. Raises BillingUnavailable."""
        try:
            revisions = await self._database.call(read_revisions, self._database)
        except TenancyUnavailable as error:
            raise BillingUnavailable("Accounts' funds can't be read now.", retry_after_s=1) from error
        for account_id, account in self._accounts.items():
            account.looked_at = revisions.get(account_id, 0)
            if account.funds is not None and account.funds.revision != account.looked_at:
                account.stale = True

    def _note(self, spending: Spending, refusal: InsufficientCredits | BudgetExceeded) -> None:
        if isinstance(refusal, BudgetExceeded):
            self._note_exhausted(spending.account_id, refusal.budget_id, refusal.period_start_ns, spending.at_ns)

    def _begin_load(self, account: _Account, spending: Spending) -> asyncio.Task[None]:
        load = asyncio.get_running_loop().create_task(self._load(account, spending), name="credit load")
        load.add_done_callback(_retrieve)
        account.loading = load
        return load

    async def _load(self, account: _Account, spending: Spending) -> None:
        # Requests that are open now may or may not be in SQL when the sums are read: they leave them out, and what
        # they cost is counted as they settle. Whatever settled before is in SQL once everything recorded so far is.
        open_before = frozenset(account.open)
        account.settled_while_loading = []
        account.looked_at = None
        read = partial(read_funds, self._database, spending.account_id, at_ns=spending.at_ns, without=open_before)
        try:
            await self._flush()
            account.loaded(await self._database.call(read), spending.at_ns)
        except TenancyUnavailable as error:
            raise BillingUnavailable("The account's funds can't be read now.", retry_after_s=1) from error
        finally:
            account.loading = None
            account.settled_while_loading = []


def _count(uses: Iterable[_BudgetUse], spending: Spending, cost_nano: int) -> None:
    for use in uses:
        if use.counts(spending):
            use.spent_nano += cost_nano


def _retrieve(load: asyncio.Task[None]) -> None:
    if not load.cancelled():
        load.exception()  # whoever waited was told; perhaps nobody waits any more
