"""GET …/limits: every limit, what is left and when it is whole again; budgets, and the forms that set them.

Looking takes nothing. Limits of the whole account are set by operators, those of its projects and keys by who
administers it; budgets by whoever may in the account.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

from pydantic import BaseModel
from starlette.responses import RedirectResponse, Response

from api.console.schemas import Name, parse_query
from api.dashboard.access import Visit
from api.dashboard.key_names import PLAYGROUND, key_names, project_names
from api.dashboard.pages import Pages
from api.dashboard.usage_filter import MAYBE
from api.errors import FormInvalid
from api.rate_limit_headers import limit, remaining, reset_s
from billing.budgets import BudgetPeriod
from billing.errors import LedgerConflict
from billing.money import parse_usd
from tenancy import provisioning
from tenancy.authenticate import act_for
from tenancy.claims import Meter, Standing
from tenancy.errors import AccountSuspended, RightMissing
from tenancy.principal import Scope
from tenancy.provisioning import ProvisioningInvalid
from tenancy.rule_setters import RuleSetter

_DIGITS_MAX: Final = 13


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
            setter=visit.rule_setter,
            by=visit.actor,
        )
        try:
            if form.get("key"):
                await visit.services.database.call(
                    provisioning.get_key, visit.services.database, visit.account_id, form["key"]
                )
            await visit.services.database.call(add, visit.account_id, limit_nano, period)
            await visit.services.heeded()
        except (FormInvalid, LedgerConflict) as error:
            return await self._page(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/limits", 303)

    async def remove_budget(self, visit: Visit) -> Response:
        remove = partial(visit.services.budgets.remove, remover=visit.rule_setter, by=visit.actor)
        await visit.services.database.call(remove, visit.account_id, visit.request.path_params["budget_id"])
        await visit.services.heeded()
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/limits", 303)

    async def set_rule(self, visit: Visit) -> Response:
        """of: `project:ID`, `key:ID`, or nothing for the whole account, which is for operators."""
        text = visit.form.get("limit", "").replace(",", "").strip()
        if not text.isascii() or not text.isdigit() or len(text) > _DIGITS_MAX:
            return await self._page(visit, fault="A limit is a whole number.", status=400)
        return await self._ruled(visit, partial(provisioning.set_quota, limit=int(text), setter=visit.rule_setter))

    async def remove_rule(self, visit: Visit) -> Response:
        try:
            set_by = RuleSetter(visit.form.get("set_by", visit.rule_setter.value))
        except ValueError:
            return await self._page(visit, fault="A limit is the operator's or the account's.", status=400)
        return await self._ruled(visit, partial(provisioning.remove_quota, set_by=set_by, remover=visit.rule_setter))

    async def _ruled(self, visit: Visit, deed: Callable[..., object]) -> Response:
        form, database = visit.form, visit.services.database
        kind, _, id_ = form.get("of", "").partition(":")
        bounds = {f"{kind}_id": id_} if kind in {"project", "key"} and id_ else {}
        try:
            meter = Meter(form.get("meter", ""))
        except ValueError:
            return await self._page(visit, fault="Choose what is limited.", status=400)
        if not bounds and not visit.user.operator:
            raise RightMissing("A limit of the whole account is set by the operator.")
        change = partial(deed, meter=meter, model=form.get("model") or None, by=visit.actor, **bounds)
        try:
            await database.call(change, database, visit.account_id)
        except ProvisioningInvalid as error:
            return await self._page(visit, fault=str(error), status=400)
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
            projects=await project_names(visit),
            meters=tuple(Meter),
            models=[card.id for card in services.catalogue.all()],
            periods=tuple(BudgetPeriod),
            fault=fault,
            form=visit.form if fault else {},
        )
