"""What an account's first page tells: this month beside the last one and its budgets, today's neurons, the last day.

Called by api/dashboard. Every figure comes from the queries of the console's API.
"""

from dataclasses import dataclass
from typing import Final

from billing.budgets import BudgetPeriod, Budgets, BudgetStanding
from billing.latency import Latency
from billing.rollups import DAY_NS
from billing.store import UsageEvent, UsageStore
from billing.summaries import GroupBy, UsageTotals

_RECENT: Final = 6
# Ended through no fault of the caller and without an answer; a departed client got what it stayed for.
ERRORS: Final = frozenset({"upstream_failed", "integrity_abort"})
REFUSALS: Final = frozenset({"refused", "evicted"})


@dataclass(frozen=True, slots=True)
class Overview:
    """Periods are UTC. month_ns, last_month_ns, today_ns: [from, to). errors, refusals: requests of this month.

    same_days_ago: the last month up to the same moment, so that the two can be compared.
    """

    month_ns: tuple[int, int]
    last_month_ns: tuple[int, int]
    today_ns: tuple[int, int]
    month: UsageTotals
    last_month: UsageTotals
    same_days_ago: UsageTotals
    today: UsageTotals
    errors: int
    refusals: int
    latency: Latency
    budgets: tuple[BudgetStanding, ...]
    recent: tuple[UsageEvent, ...]


def look_over(usage: UsageStore, budgets: Budgets, account_id: str, now_ns: int) -> Overview:
    month_ns, today_ns = BudgetPeriod.MONTH.around(now_ns), BudgetPeriod.DAY.around(now_ns)
    last_month_ns = BudgetPeriod.MONTH.around(month_ns[0] - 1)
    same_moment_ns = min(last_month_ns[0] + now_ns - month_ns[0], last_month_ns[1])
    month = usage.usage_summary(account_id, *month_ns, GroupBy.OUTCOME)
    counts = {group.key: group.totals.requests for group in month.groups}
    return Overview(
        month_ns=month_ns,
        last_month_ns=last_month_ns,
        today_ns=today_ns,
        month=month.totals,
        last_month=usage.usage_summary(account_id, *last_month_ns).totals,
        same_days_ago=usage.usage_summary(account_id, last_month_ns[0], same_moment_ns).totals,
        today=usage.usage_summary(account_id, *today_ns).totals,
        errors=sum(count for outcome, count in counts.items() if outcome in ERRORS),
        refusals=sum(count for outcome, count in counts.items() if outcome in REFUSALS),
        latency=usage.latency(account_id, max(0, now_ns - DAY_NS), now_ns + 1),
        budgets=tuple(budgets.standings(account_id, now_ns)),
        recent=tuple(usage.recent_requests(account_id, _RECENT)),
    )
