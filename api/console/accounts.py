"""GET /console/v1/accounts/{account_id}/usage and …/requests[/{request_id}]: what an account used, and what it cost.

All three see what has ended before they were asked: they wait until it is in the database.
"""

import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import bearer
from api.console.schemas import RequestsQuery, UsageQuery, parse_query
from api.errors import InputInvalid
from api.services import Services
from billing.money import neurons_decimal, usd_decimal
from billing.store import DAY_NS, GroupBy, UsageEvent, UsageGroup, UsageTotals
from tenancy.errors import AccountNotFound, ScopeMissing
from tenancy.principal import Scope

_DEFAULT_PERIOD_NS: Final = 30 * DAY_NS


class AccountRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def usage(self, request: Request) -> Response:
        """Totals of a period, half open, and the same by model, day or key. The last 30 days if it is not given."""
        account_id = await self._own_account(request)
        query = parse_query(UsageQuery, dict(request.query_params))
        to_ns = time.time_ns() if query.to_ns is None else query.to_ns
        from_ns = max(0, to_ns - _DEFAULT_PERIOD_NS) if query.from_ns is None else query.from_ns
        if from_ns >= to_ns:
            raise InputInvalid(("from",), "must be earlier than to.")
        await self._services.metering.flush()
        summary = await self._services.database.call(
            self._services.usage.usage_summary, account_id, from_ns, to_ns, query.group_by
        )
        return _json(
            {
                "account_id": account_id,
                "from": iso(from_ns),
                "to": iso(to_ns),
                "group_by": query.group_by.value,
                "totals": _totals(summary.totals),
                "groups": [_group(group, query.group_by) for group in summary.groups],
            }
        )

    async def requests(self, request: Request) -> Response:
        """Newest first, a page at a time: `next` is the `before` of the page behind it, null at the end."""
        account_id = await self._own_account(request)
        query = parse_query(RequestsQuery, dict(request.query_params))
        await self._services.metering.flush()
        events = await self._services.database.call(
            self._services.usage.recent_requests, account_id, query.limit, query.before
        )
        more = len(events) == query.limit
        return _json(
            {
                "requests": [_record(event) for event in events],
                "next": f"{events[-1].started_at_ns}.{events[-1].id}" if more else None,
            }
        )

    async def request_record(self, request: Request) -> Response:
        """One request, ended. Another account's and an unknown one are the same 404."""
        account_id = await self._own_account(request)
        await self._services.metering.flush()
        event = await self._services.database.call(
            self._services.usage.request_record, account_id, request.path_params["request_id"]
        )
        return _json(_record(event))

    async def _own_account(self, request: Request) -> str:
        principal = await bearer(request, self._services)
        if request.path_params["account_id"] != principal.account_id:
            raise AccountNotFound("There is no such account.")
        if Scope.USAGE_READ not in principal.scopes:
            raise ScopeMissing(f"This API key lacks the scope {Scope.USAGE_READ.value}.")
        return principal.account_id


def iso(instant_ns: int) -> str:
    """UTC, to the microsecond."""
    moment = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=instant_ns // 1_000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _totals(totals: UsageTotals) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt_tokens": totals.prompt_tokens,
        "cached_tokens": totals.cached_tokens,
        "completion_tokens": totals.completion_tokens,
        "reasoning_tokens": totals.reasoning_tokens,
        "cost": usd_decimal(totals.cost_nano),
        "cost_nano": totals.cost_nano,
        "neurons": neurons_decimal(totals.neurons_micro),
    }


def _group(group: UsageGroup, by: GroupBy) -> dict[str, Any]:
    key = iso(int(group.key) * DAY_NS)[:10] if by is GroupBy.DAY else group.key
    return {by.value: key, **_totals(group.totals)}


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
        "duration_ms": (event.ended_at_ns - event.started_at_ns) // 1_000_000,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
