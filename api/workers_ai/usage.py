"""GET /client/v4/accounts/{account_id}/ai/usage: what the account used, by model and day, and what is left of today.

Sees what has ended before it was asked: it waits until that is in the database. Sums are billing's, limits tenancy's.
"""

import time
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.console.accounts import iso
from api.console.schemas import read_query
from api.errors import InputInvalid
from api.services import Services
from api.workers_ai.envelope import enveloped
from api.workers_ai.schemas import UsageQuery
from billing.money import neurons_decimal, usd_decimal
from billing.rollups import DAY_NS
from billing.store import UsageStore
from billing.summaries import PERIODS_NS, GroupBy, UsageFilter, UsageGroup, UsageTotals
from tenancy.claims import Meter, Standing
from tenancy.principal import Principal, Scope

_DEFAULT_PERIOD_NS: Final = 30 * DAY_NS
# Each model is a query of its own where models and days are told together.
_MODELS_BY_DAY_MAX: Final = 100

Row = tuple[dict[str, str], UsageTotals]


class UsageRoute:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def usage(self, request: Request) -> Response:
        """Totals of a period, half open, and the same by group. The last 30 days if it is not given."""
        principal = await permitted(request, self._services, Scope.USAGE_READ)
        query = read_query(UsageQuery, request)
        now_ns = time.time_ns()
        to_ns = now_ns if query.to_ns is None else query.to_ns
        from_ns = max(0, to_ns - _DEFAULT_PERIOD_NS) if query.from_ns is None else query.from_ns
        if from_ns >= to_ns:
            raise InputInvalid(("from",), "must be earlier than to.")
        await self._services.settled()
        call, usage, account_id = self._services.database.call, self._services.usage, principal.account_id
        totals, rows, truncated = await call(_grouped, usage, account_id, from_ns, to_ns, query.group_by)
        return enveloped(
            {
                "from": iso(from_ns),
                "to": iso(to_ns),
                "group_by": list(query.group_by),
                "totals": _figures(totals),
                "groups": [{**key, **_figures(figures)} for key, figures in rows],
                "truncated": truncated,
                "today": await self._today(principal, now_ns),
            }
        )

    async def _today(self, principal: Principal, now_ns: int) -> dict[str, Any]:
        """Neurons of the UTC day: used, as recorded; left, as the next request will find it, null without a limit."""
        midnight_ns = now_ns // DAY_NS * DAY_NS
        summary = await self._services.database.call(
            self._services.usage.usage_summary,
            principal.account_id,
            midnight_ns,
            midnight_ns + DAY_NS,
            GroupBy.NONE,
            UsageFilter(),
        )
        tightest = await self._tightest_daily_neurons(principal)
        limit_micro = None if tightest is None else tightest.claim.limit
        left_micro = None if tightest is None else _left_micro(tightest)
        return {
            "date": iso(midnight_ns)[:10],
            "neurons_used": _neurons(summary.totals.neurons_micro),
            "neurons_limit": None if limit_micro is None else _neurons(limit_micro),
            "neurons_left": None if left_micro is None else _neurons(left_micro),
            "resets_at": iso(midnight_ns + DAY_NS),
        }

    async def _tightest_daily_neurons(self, principal: Principal) -> Standing | None:
        """Of the rules that are about no single model, the one with the least left."""
        if not any(quota.meter is Meter.NEURONS_PER_DAY for quota in principal.quotas):
            return None
        standings = await self._services.holds.meters.standings(principal, "")
        daily = (one for one in standings if one.claim.meter is Meter.NEURONS_PER_DAY)
        return min(daily, key=_left_micro, default=None)


def _grouped(
    usage: UsageStore, account_id: str, from_ns: int, to_ns: int, by: tuple[GroupBy, ...]
) -> tuple[UsageTotals, list[Row], bool]:
    first = by[0] if len(by) == 1 else GroupBy.MODEL if by else GroupBy.NONE
    summary = usage.usage_summary(account_id, from_ns, to_ns, first, UsageFilter())
    if len(by) < 2:
        rows = [(_key(group, first), group.totals) for group in summary.groups]
        return summary.totals, rows, summary.truncated
    rows = []
    for model in summary.groups[:_MODELS_BY_DAY_MAX]:
        only = UsageFilter(model=model.key)
        days = usage.usage_summary(account_id, from_ns, to_ns, GroupBy.DAY, only)
        rows += [({**_key(model, GroupBy.MODEL), **_key(day, GroupBy.DAY)}, day.totals) for day in days.groups]
    return summary.totals, rows, summary.truncated or len(summary.groups) > _MODELS_BY_DAY_MAX


def _key(group: UsageGroup, by: GroupBy) -> dict[str, str]:
    return {by.value: iso(group.starts_at_ns(by))[:10] if by in PERIODS_NS else group.key}


def _figures(totals: UsageTotals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "neurons": _neurons(totals.neurons_micro),
        "cost": usd_decimal(totals.cost_nano),
    }


def _left_micro(standing: Standing) -> int:
    assert standing.claim.limit is not None, "a daily meter is counted because it is limited"
    return max(0, standing.claim.limit - standing.used)


def _neurons(micro: int) -> orjson.Fragment:
    """A JSON number with all its digits, as this dialect writes neurons: no float comes between."""
    return orjson.Fragment(neurons_decimal(micro))
