"""The operator's pages: live KV, tenants, backends, prices, users, the audit log, invariants. For operators alone."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal

from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from api.console.operations import capacity_together_of, invariants_of
from api.console.rollouts import rollouts_of
from api.console.schemas import parse_query
from api.dashboard.access import Visit
from api.dashboard.account_log import log_page, user_names
from api.dashboard.live import SAMPLE_S, VIEWERS_MAX, LiveFigures
from api.dashboard.pages import Pages
from api.errors import LiveViewersTooMany
from billing.budgets import BudgetPeriod
from billing.price_book import Price, read_prices
from billing.store import UsageStore
from billing.summaries import UsageTotals
from tenancy import audit_log, people, provisioning
from tenancy.accounts import Account
from tenancy.database import Database

_TENANTS_MAX: Final = 500
# A session that was ended elsewhere sees no more than this of what came after.
_SESSION_CHECKED_S: Final = 15.0
_PING_S: Final = 15


@dataclass(frozen=True, slots=True)
class Tenant:
    account: Account
    month: UsageTotals


class TenantsQuery(BaseModel):
    everything: Annotated[bool, "also accounts that used nothing"] = False
    by: Literal["spend", "pages"] = "spend"


class OperatorPages:
    def __init__(self, pages: Pages, figures: LiveFigures) -> None:
        self._pages = pages
        self._figures = figures

    async def live(self, visit: Visit) -> Response:
        view = await self._figures.look()
        return self._pages.page(
            visit, "live.html.j2", here="live", title="Live KV", as_of_ns=view.sample.at_ns, view=view
        )

    async def events(self, visit: Visit) -> Response:
        """The live part of the page each second, as server-sent events."""
        if self._figures.viewers >= VIEWERS_MAX:
            raise LiveViewersTooMany
        return EventSourceResponse(
            self._fragments(visit), ping=_PING_S, send_timeout=10, headers={"cache-control": "no-store"}
        )

    async def tenants(self, visit: Visit) -> Response:
        services = visit.services
        query = parse_query(TenantsQuery, dict(visit.request.query_params))
        await services.settled()
        now_ns = time.time_ns()
        found = await services.database.call(_tenants, services.database, services.usage, now_ns)
        if query.by == "pages":
            found.sort(key=lambda tenant: (-tenant.month.kv_page_ms, tenant.account.name))
        shown = [tenant for tenant in found if query.everything or tenant.month.requests]
        return self._pages.page(
            visit,
            "tenants.html.j2",
            here="tenants",
            title="Tenants",
            as_of_ns=now_ns,
            tenants=shown,
            by=query.by,
            idle=len(found) - len(shown),
            month_ns=BudgetPeriod.MONTH.around(now_ns),
        )

    async def backends(self, visit: Visit) -> Response:
        services = visit.services
        ready, reason = services.ready()
        now = time.monotonic()
        replicas = {replica.id: replica for fleet in services.fleet.all() for replica in fleet.engines()}
        return self._pages.page(
            visit,
            "backends.html.j2",
            here="backends",
            title="Backends",
            capacity=await capacity_together_of(services),
            replicas=replicas,
            standings={name: replica.health.verdict(now).value for name, replica in replicas.items()},
            ready=ready,
            reason=reason,
            cards={card.id: card for card in services.catalogue.all()},
            lag=services.metering.lag_records(),
            rollouts=await rollouts_of(services),
        )

    async def prices(self, visit: Visit) -> Response:
        rows = await visit.services.database.call(_prices, visit.services.database)
        served = [card.price_id for card in visit.services.catalogue.all()]
        now_ns = time.time_ns()
        return self._pages.page(
            visit,
            "prices.html.j2",
            here="prices",
            title="Price book",
            as_of_ns=now_ns,
            prices=sorted(rows, key=lambda price: (price.model, -price.version)),
            now_ns=now_ns,
            unpriced=sorted(set(served) - {price.model for price in rows}),
        )

    async def users(self, visit: Visit) -> Response:
        database = visit.services.database
        users = await database.call(people.list_users, database)
        return self._pages.page(visit, "users.html.j2", here="users", title="Users", users=users)

    async def audit(self, visit: Visit) -> Response:
        database = visit.services.database
        accounts = await database.call(provisioning.list_accounts, database)
        names = {account.id: account.name for account in accounts} | await user_names(visit)
        return await log_page(self._pages, visit, None, here="operator audit", names=names)

    async def invariants(self, visit: Visit) -> Response:
        """Recomputes everything: for the eye, not for a monitor."""
        services = visit.services
        state = await invariants_of(services)
        verdict = await services.database.call(partial(audit_log.verify, services.database))
        return self._pages.page(
            visit, "invariants.html.j2", here="invariants", title="Invariants", state=state, verdict=verdict
        )

    async def _fragments(self, visit: Visit) -> AsyncIterator[ServerSentEvent]:
        self._figures.viewers += 1
        checked_at = time.monotonic()
        try:
            while True:
                view = await self._figures.look()
                yield ServerSentEvent(self._pages.fragment("live_figures.html.j2", view=view))
                await asyncio.sleep(SAMPLE_S)
                if time.monotonic() - checked_at >= _SESSION_CHECKED_S:
                    checked_at = time.monotonic()
                    session = await visit.services.sign_ins.find(visit.token)
                    if session is None or not session.user.operator:
                        return
        finally:
            self._figures.viewers -= 1


def _tenants(database: Database, usage: UsageStore, now_ns: int) -> list[Tenant]:
    """By this month's spend. Each account's sum is one short query over rollups."""
    month_ns = BudgetPeriod.MONTH.around(now_ns)
    accounts = provisioning.list_accounts(database)[:_TENANTS_MAX]
    found = [Tenant(account, usage.usage_summary(account.id, *month_ns).totals) for account in accounts]
    return sorted(found, key=lambda tenant: (-tenant.month.cost_nano, tenant.account.name))


def _prices(database: Database) -> list[Price]:
    with database.read() as connection:
        return read_prices(connection)
