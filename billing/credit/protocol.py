"""What the hold asks of credit, and the words for it. process.py and shared.py fulfil it; api/wiring.py chooses."""

from collections.abc import Callable
from typing import Protocol

from billing.budgets import Budget
from tenancy.key_groups import KeyGroups
from tenancy.values import value


@value
class Spending:
    """Who spends on what, and when the request began: this says which budgets it counts for, and in which period.

    groups: of the key: its lineage and its project.
    limit_nano: what a postpaid account may owe in all; None is no limit. A prepaid one has its balance.
    """

    account_id: str
    groups: KeyGroups
    model: str
    at_ns: int
    limit_nano: int | None
    end_user: str | None = None

    def counts_for(self, budget: Budget) -> bool:
        return budget.covers(self.groups, self.model, self.end_user)


# From what is left, in nano-USD, to what may be held of it instead: 0 if that is of no use.
Clamp = Callable[[int], int]


class Credit(Protocol):
    """Belongs to one event loop. No balance and no hard budget is ever overspent by what is held and settled here.

    over_hold_nano: charged beyond what was held, since the process began: 0 unless a hold is a bug.
    """

    over_hold_nano: int

    async def hold(self, spending: Spending, request_id: str, amount_nano: int, *, clamp: Clamp | None = None) -> int:
        """Set the amount aside for one request, and return it. A refused request holds nothing; nothing costs nothing.

        An account that would rather have less than be refused (HoldMode.CLAMP) holds what `clamp` makes of the rest.
        Raises InsufficientCredits if it would take the balance below its floor, BudgetExceeded if a hard budget can't
        bear it, BillingUnavailable if neither can be known.
        """

    async def extend(self, request_id: str, amount_nano: int) -> bool:
        """Hold more for a request that runs on; False, and nothing changes, if it does not fit."""

    def settle(self, request_id: str, cost_nano: int) -> None:
        """Close the hold and count the cost as spent, beyond every limit too if it comes to that.

        Call it after the usage record is written. Idempotent: a second call, or one for an unknown id, does nothing.
        """

    def held_nano(self) -> int:
        """What is held over all accounts; 0 when the service is idle."""

    async def refresh(self) -> None:
        """Notice what deeds have changed; the composition root calls it each second. Raises BillingUnavailable."""
