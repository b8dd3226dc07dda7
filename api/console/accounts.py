"""GET /console/v1/accounts/{account_id}/usage, …/costs, …/latency and …/requests[/{id}]: what an account used and paid.

All see what has ended before they were asked: they wait until it is in the database.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import bearer
from api.console.schemas import CostsQuery, LatencyQuery, RequestsQuery, UsageQuery, read_query
from api.errors import InputInvalid
from api.services import Services
from billing.attributed_usage import is_attributed
from billing.attribution import read_tags
from billing.money import neurons_decimal, usd_decimal
from billing.rollups import DAY_NS
from billing.store import UsageEvent
from billing.summaries import PERIODS_NS, GroupBy, UsageFilter, UsageGroup, UsageSummary, UsageTotals
from tenancy.errors import AccountNotFound, ScopeMissing
from tenancy.principal import Scope

_DEFAULT_PERIOD_NS: Final = 30 * DAY_NS


class AccountRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def usage(self, request: Request) -> Response:
        """Totals of a period, half open, and the same by group. The last 30 days if it is not given."""
        account_id = await self._own_account(request)
        query = read_query(UsageQuery, request)
        from_ns, to_ns = _period_of(query)
        if query.group_by is GroupBy.MINUTE and to_ns - from_ns > DAY_NS:
            raise InputInvalid(("group_by",), "minutes are told for at most 24 hours.")
        summary = await self._summary(account_id, from_ns, to_ns, query)
        return _json(
            {
                "account_id": account_id,
                "from": iso(from_ns),
                "to": iso(to_ns),
                "group_by": query.group_by.value,
                "totals": _totals(summary.totals),
                "groups": [{**_key(group, query.group_by), **_totals(group.totals)} for group in summary.groups],
                "truncated": summary.truncated,
                **_overlap(query.group_by),
            }
        )

    async def costs(self, request: Request) -> Response:
        """What the same requests cost, in dollars and in neurons; by UTC day if nothing else is asked for."""
        account_id = await self._own_account(request)
        query = read_query(CostsQuery, request)
        from_ns, to_ns = _period_of(query)
        summary = await self._summary(account_id, from_ns, to_ns, query)
        return _json(
            {
                "account_id": account_id,
                "from": iso(from_ns),
                "to": iso(to_ns),
                "currency": "USD",
                "group_by": query.group_by.value,
                "totals": _costs(summary.totals),
                "groups": [{**_key(group, query.group_by), **_costs(group.totals)} for group in summary.groups],
                "truncated": summary.truncated,
                **_overlap(query.group_by),
            }
        )

    async def requests(self, request: Request) -> Response:
        """Newest first, a page at a time: `next` is the `before` of the page behind it, null at the end."""
        account_id = await self._own_account(request)
        query = read_query(RequestsQuery, request)
        await self._services.settled()
        only = _only(query)
        events = await self._services.database.call(
            self._services.usage.recent_requests, account_id, query.limit, query.before, only, query.from_ns
        )
        more = len(events) == query.limit
        return _json(
            {
                "requests": [_record(event) for event in events],
                "next": f"{events[-1].started_at_ns}.{events[-1].id}" if more else None,
            }
        )

    async def latency(self, request: Request) -> Response:
        """Times to the first token over all answers of the period, in fixed buckets and as the ends of two of them."""
        account_id = await self._own_account(request)
        query = read_query(LatencyQuery, request)
        from_ns, to_ns = _period(query.from_ns, query.to_ns)
        await self._services.settled()
        found = await self._services.database.call(
            self._services.usage.latency, account_id, from_ns, to_ns, query.model
        )
        return _json(
            {
                "account_id": account_id,
                "from": iso(from_ns),
                "to": iso(to_ns),
                "answers": found.answers,
                "ttft_ms_p50": found.ttft_ms_p50,
                "ttft_ms_p95": found.ttft_ms_p95,
                "ttft_ms_buckets": [{"up_to": bound, "answers": answers} for bound, answers in found.buckets],
            }
        )

    async def request_record(self, request: Request) -> Response:
        """One request, ended. Another account's and an unknown one are the same 404."""
        account_id = await self._own_account(request)
        await self._services.settled()
        event = await self._services.database.call(
            self._services.usage.request_record, account_id, request.path_params["request_id"]
        )
        return _json(_record(event))

    async def _summary(self, account_id: str, from_ns: int, to_ns: int, query: UsageQuery) -> UsageSummary:
        only = _only(query)
        await self._services.settled()
        return await self._services.database.call(
            self._services.usage.usage_summary, account_id, from_ns, to_ns, query.group_by, only
        )

    async def _own_account(self, request: Request) -> str:
        principal = await bearer(request, self._services)
        if request.path_params["account_id"] != principal.account_id:
            raise AccountNotFound("There is no such account.")
        if Scope.USAGE_READ not in principal.scopes:
            raise ScopeMissing(f"This API key lacks the scope {Scope.USAGE_READ.value}.")
        return principal.account_id


def _only(query: UsageQuery | RequestsQuery) -> UsageFilter:
    return UsageFilter(
        model=query.model,
        key_id=query.key,
        endpoint=query.endpoint,
        outcome=query.outcome,
        project_id=query.project,
        tag=query.tag,
        end_user=query.end_user,
    )


def iso(instant_ns: int) -> str:
    """UTC, to the microsecond."""
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=instant_ns // 1_000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _period_of(query: UsageQuery) -> tuple[int, int]:
    """Tags and end users are summed by day, so what is not said of their period is midnights."""
    from_ns, to_ns = query.from_ns, query.to_ns
    if to_ns is None and is_attributed(query.group_by, _only(query)):
        to_ns = (time.time_ns() // DAY_NS + 1) * DAY_NS
    return _period(from_ns, to_ns)


def _period(from_ns: int | None, to_ns: int | None) -> tuple[int, int]:
    to_ns = time.time_ns() if to_ns is None else to_ns
    from_ns = max(0, to_ns - _DEFAULT_PERIOD_NS) if from_ns is None else from_ns
    if from_ns >= to_ns:
        raise InputInvalid(("from",), "must be earlier than to.")
    return from_ns, to_ns


def _totals(totals: UsageTotals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "kv_page_ms": totals.kv_page_ms,
        **_costs(totals),
    }


def _costs(totals: UsageTotals) -> dict[str, Any]:
    return {
        "cost": usd_decimal(totals.cost_nano),
        "cost_nano": totals.cost_nano,
        "neurons": neurons_decimal(totals.neurons_micro),
    }


def _key(group: UsageGroup, by: GroupBy) -> dict[str, str | None]:
    """A day is written as a date, an hour and a minute as the instant at which they begin."""
    if by not in PERIODS_NS:
        nobody = by in {GroupBy.TAG, GroupBy.END_USER} and not group.key
        return {by.value: None if nobody else group.key}
    moment = iso(group.starts_at_ns(by))
    return {by.value: moment[:10] if by is GroupBy.DAY else moment}


def _overlap(by: GroupBy) -> dict[str, bool]:
    """A request counts for each of its tags: groups may come to more than the totals, which count it once."""
    return {"overlapping": True} if by is GroupBy.TAG else {}


def _record(event: UsageEvent) -> dict[str, Any]:
    return {
        "id": event.id,
        "model": event.model,
        "endpoint": event.endpoint,
        "stream": event.stream,
        "outcome": event.outcome,
        "code": event.code,
        "finish_reason": event.finish_reason,
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": event.cached_tokens,
        "completion_tokens": event.completion_tokens,
        "reasoning_tokens": event.reasoning_tokens,
        "usage_source": event.usage_source,
        "cost": usd_decimal(event.cost_nano),
        "cost_nano": event.cost_nano,
        "neurons": neurons_decimal(event.neurons_micro),
        "price_version": event.price_version,
        "key_id": event.key_id,
        "started_at": iso(event.started_at_ns),
        "ended_at": iso(event.ended_at_ns),
        "queued_ms": event.queued_ms,
        "ttft_ms": event.ttft_ms,
        "tier": event.tier,
        "end_user": event.end_user,
        "tags": read_tags(event.tags),
        "kv_page_ms": event.kv_page_ms,
        "deployment": event.deployment,
        "precisions": event.precisions,
        "region": event.region,
        "duration_ms": (event.ended_at_ns - event.started_at_ns) // 1_000_000,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
