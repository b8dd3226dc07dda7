"""GET …/limits: every limit, what is left and when it is whole again; budgets, and the forms that set them.

Looking takes nothing. Limits are set by the operator; budgets by whoever may in the account.
"""

import time
from functools import partial
from typing import Annotated

from pydantic import BaseModel
from starlette.responses import RedirectResponse, Response

from api.console.schemas import Name, parse_query
from api.dashboard.access import Visit
from api.dashboard.key_names import PLAYGROUND, key_names
from api.dashboard.pages import Pages
from api.dashboard.usage_filter import MAYBE
from api.errors import FormInvalid
from api.rate_limit_headers import limit, remaining, reset_s
from billing.budgets import BudgetPeriod
from billing.errors import LedgerConflict
from billing.money import parse_usd
from tenancy import provisioning
from tenancy.authenticate import act_for
from tenancy.claims import Standing
from tenancy.errors import AccountSuspended
from tenancy.principal import Scope


class LimitsPageQuery(BaseModel):
    """Whose limits: those of a key and a model beside the account's own."""

    key: Annotated[Name | None, MAYBE] = None
    model: Annotated[Name | None, MAYBE] = None


class LimitPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def add_budget(self, visit: Visit) -> Response:
        form, budgets = visit.form, visit.services.budgets
        try:
            limit_nano = parse_usd(form.get("limit", ""))
            period = BudgetPeriod(form.get("period", ""))
        except ValueError:
            return await self._page(visit, fault="A budget is an amount in USD, such as 12.50.", status=400)
        add = partial(
            budgets.add,
            key_id=form.get("key") or None,
            model=(form.get("model") or "")[:200] or None,
            hard=form.get("hard") == "1",
            by=visit.actor,
        )
        try:
            if form.get("key"):
                await visit.services.database.call(
                    provisioning.get_key, visit.services.database, visit.account_id, form["key"]
                )
            await visit.services.database.call(add, visit.account_id, limit_nano, period)
        except (FormInvalid, LedgerConflict) as error:
            return await self._page(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/limits", 303)

    async def remove_budget(self, visit: Visit) -> Response:
        remove = partial(visit.services.budgets.remove, by=visit.actor)
        await visit.services.database.call(remove, visit.account_id, visit.request.path_params["budget_id"])
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/limits", 303)

    async def _page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        services = visit.services
        query = parse_query(LimitsPageQuery, dict(visit.request.query_params))
        await services.settled()
        now_ns = time.time_ns()
        suspended = False
        standings: tuple[Standing, ...] = ()
        try:
            principal = await services.database.call(
                act_for, services.database, visit.account_id, query.key or PLAYGROUND, frozenset[Scope]()
            )
            standings = await services.holds.meters.standings(principal, query.model or "")
        except AccountSuspended:
            suspended = True
        told = [one for one in standings if one.claim.limit is not None]
        budgets = await services.database.call(services.budgets.standings, visit.account_id, now_ns)
        account = await services.database.call(provisioning.get_account, services.database, visit.account_id)
        rules = await services.database.call(provisioning.list_quotas, services.database, visit.account_id)
        return self._pages.page(
            visit,
            "limits.html.j2",
            here="limits",
            title="Limits & budgets",
            as_of_ns=now_ns,
            status=status,
            limits=[(one.claim, limit(one), remaining(one), reset_s(one)) for one in told],
            rules=rules,
            regions=account.regions,
            budgets=budgets,
            now_ns=now_ns,
            suspended=suspended,
            q=query,
            names=await key_names(visit),
            models=[card.id for card in services.catalogue.all()],
            periods=tuple(BudgetPeriod),
            fault=fault,
            form=visit.form if fault else {},
        )
