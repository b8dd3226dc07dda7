"""The one hold of a request: the account's meters, money, and KV pages, taken in that order and settled once.

A refusal at any step gives back the earlier ones: refused by one, charged by none. Used by pipeline.py, and by
embedding.py without pages. Whether and where pages may be taken is the door's decision (door.py); this file keeps the
accounts of what was promised.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from billing.credit.protocol import Clamp, Credit, Spending
from billing.price_book import Price
from billing.rating import neurons_micro
from billing.usage import TokenUsage
from tenancy.claims import Standing
from tenancy.key_groups import KeyGroups
from tenancy.meters.protocol import Meters, Reservation, Ticket
from tenancy.principal import Principal
from tenancy.quotas import NOTHING, Amounts


@dataclass(slots=True)
class _PageHold:
    pages: int
    taken_at: float


class PageLedger:
    """What is promised at one replica, in pages. One writer: the event loop of this process."""

    def __init__(self) -> None:
        self._holds: OrderedDict[str, _PageHold] = OrderedDict()
        self.held_pages = 0

    def __len__(self) -> int:
        return len(self._holds)

    def holders(self) -> Iterable[str]:
        """The requests that pages are promised to."""
        return self._holds.keys()

    def take(self, request_id: str, pages: int, *, now: float) -> None:
        """Promise pages to a request that holds none here. now: the monotonic clock, in seconds."""
        assert request_id not in self._holds, "a request holds pages at a replica once"
        self._holds[request_id] = _PageHold(pages, now)
        self.held_pages += pages

    def grow(self, request_id: str, pages: int) -> None:
        """Raise a hold to `pages` if it is smaller: the engine has these pages already, so this can't be refused."""
        hold = self._holds.get(request_id)
        if hold is not None and pages > hold.pages:
            self.held_pages += pages - hold.pages
            hold.pages = pages

    def shrink(self, request_id: str, pages: int) -> None:
        """Give `pages` of a hold back, or what is left of it."""
        hold = self._holds.get(request_id)
        if hold is None:
            return
        if hold.pages <= pages:
            self.release(request_id)
        else:
            hold.pages -= pages
            self.held_pages -= pages

    def release(self, request_id: str) -> bool:
        """Give back; idempotent. True if something was held."""
        hold = self._holds.pop(request_id, None)
        if hold is None:
            return False
        self.held_pages -= hold.pages
        assert self.held_pages >= 0, "pages given back were held"
        return True

    def clear(self) -> None:
        """All promises are void: the engine has forgotten them."""
        self._holds.clear()
        self.held_pages = 0

    def taken_since(self, moment: float) -> int:
        """Pages of the holds taken after `moment`: a snapshot of that age can't have seen them."""
        unseen = 0
        for hold in reversed(self._holds.values()):
            if hold.taken_at <= moment:
                break
            unseen += hold.pages
        return unseen


class Hold:
    """What one request holds. Made by Holds.open, ended by settle, which may be called any number of times."""

    def __init__(self, holds: "Holds", ticket: Ticket, amount_nano: int) -> None:
        self._holds = holds
        self._ticket = ticket
        self.first_nano = amount_nano  # the money that it began with: less than was asked for, if that was clamped
        self.request_id = ticket.request_id
        self.account_id = ticket.account_id
        self._pages: PageLedger | None = None
        self.settled = False

    def pages_taken(self, ledger: PageLedger) -> None:
        """The waiting room took this request's pages in `ledger`; from here on the hold gives them back."""
        assert not self.settled, "a settled hold takes nothing"
        self._pages = ledger

    def grow_pages(self, pages: int) -> None:
        if self._pages is not None:
            self._pages.grow(self.request_id, pages)

    async def extend_money(self, amount_nano: int) -> bool:
        """Hold more ahead of the stream, atomically; False if it does not fit, and then nothing has changed."""
        return await self._holds.credit.extend(self.request_id, amount_nano)

    async def extend_meters(self, amounts: Amounts) -> None:
        """Take more of the account's meters ahead of the stream. Raises QuotaExceeded; nothing has changed then."""
        self._ticket = await self._holds.meters.extend(self._ticket, replace(amounts, requests=0))

    def release_pages(self) -> None:
        """Give the pages back ahead of the settle: the engine has stopped. Idempotent."""
        if self._pages is not None:
            self._pages.release(self.request_id)
            self._pages = None

    @property
    def standings(self) -> tuple[Standing, ...]:
        """The account's meters as this request's reservation left them."""
        return self._ticket.standings

    async def settle(self, cost_nano: int, actual: Amounts = NOTHING) -> None:
        """Close all parts: money at the cost that was recorded, meters at what was taken; by default nothing was.

        Idempotent; parts that were never taken are left alone.
        """
        if self.settled:
            return
        self.settled = True
        self.release_pages()
        self._holds.credit.settle(self.request_id, cost_nano)
        self._holds.live.pop(self.request_id, None)
        await self._holds.meters.settle(self._ticket, actual)


class Holds:
    """All open holds of this process."""

    def __init__(self, meters: Meters, credit: Credit) -> None:
        self.meters = meters
        self.credit = credit
        self.live: dict[str, Hold] = {}

    async def open(
        self,
        principal: Principal,
        request_id: str,
        amount_nano: int,
        reservation: Reservation | None = None,
        *,
        at_ns: int,
        end_user: str | None = None,
        clamp: Clamp | None = None,
    ) -> Hold:
        """Take the account's meters, then money. Without a reservation the meters count the request alone.

        clamp: what may be held of what is left, where the account would rather have less than be refused.
        at_ns: when the request arrived; budgets count it in the period of this instant. Raises QuotaExceeded,
        InsufficientCredits, BudgetExceeded, or what their stores raise; nothing is held then.
        """
        assert request_id not in self.live, "a request opens one hold"
        reservation = reservation or Reservation(request_id, "", Amounts())
        groups = KeyGroups(principal.lineage, principal.project)
        spending = Spending(
            principal.account_id, groups, reservation.model, at_ns, principal.credit_limit_nano, end_user
        )
        ticket = await self.meters.reserve(principal, reservation)
        try:
            held_nano = await self.credit.hold(spending, request_id, amount_nano, clamp=clamp)
        except BaseException:
            await self.meters.settle(ticket, NOTHING)
            raise
        hold = Hold(self, ticket, held_nano)
        self.live[request_id] = hold
        return hold


def more_outputs(tokens: int, price: Price) -> Amounts:
    """So many outputs more of a request that is counted already."""
    return Amounts(requests=0, tokens_out=tokens, neurons_micro=tokens * price.output_neurons_per_m)


def amounts(usage: TokenUsage, price: Price) -> Amounts:
    """One request's usage in the meters' units."""
    return Amounts(
        requests=1,
        tokens_in=usage.prompt,
        tokens_out=usage.completion,
        neurons_micro=neurons_micro(usage, price),
    )
