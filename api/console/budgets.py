"""/console/v1/accounts/{account_id}/budgets: its own admin keys, and an operator's, list, set and remove them."""

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from api.auth import governed, key_actor, rule_setter
from api.body import parse, read_body
from api.console.accounts import iso
from api.console.answers import json_answer
from api.console.schemas import BudgetsQuery, EndUser, Name, read_query
from api.services import Services
from billing.budgets import BudgetPeriod, BudgetStanding
from billing.money import USD_TEXT, parse_usd, usd_decimal
from tenancy import projects, provisioning
from tenancy.principal import Principal


def _usd(text: str) -> str:
    try:
        parse_usd(text)
    except ValueError:
        raise ValueError("must be US dollars in digits, such as 12.50.") from None
    return text


Usd = Annotated[
    str,
    Field(max_length=40),
    AfterValidator(_usd),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": f"^{USD_TEXT.pattern}$",
            "description": "US dollars, exact: such as 12.50.",
            "examples": ["12.50"],
        }
    ),
]


class BudgetBody(BaseModel):
    """hard: refuse what would go beyond it; else only tell. Of one project or key, model or end user, or of all."""

    model_config = ConfigDict(extra="forbid")

    limit: Usd
    period: BudgetPeriod
    hard: Annotated[bool, Field(strict=True)] = True
    project_id: Name | None = None
    key_id: Name | None = None
    model: Name | None = None
    end_user: EndUser | None = None


class BudgetRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_budgets(self, request: Request) -> Response:
        """Every budget, and what is spent of it in the period around `at`: now, if it is not given."""
        principal, account_id = await governed(request, self._services)
        query = read_query(BudgetsQuery, request)
        await self._known(principal, account_id)
        await self._services.settled()
        standings = await self._services.database.call(self._services.budgets.standings, account_id, query.at_ns)
        return json_answer({"budgets": [_budget(standing) for standing in standings]})

    async def add(self, request: Request) -> Response:
        """Set a budget. What the current period has spent already counts. It holds at once where this is answered, at
        other processes within some seconds.
        """
        principal, account_id = await governed(request, self._services)
        body = parse(BudgetBody, await read_body(request))
        call, database = self._services.database.call, self._services.database
        await self._known(principal, account_id)
        if body.key_id is not None:
            await call(provisioning.get_key, database, account_id, body.key_id)
        if body.project_id is not None:
            await call(projects.get_project, database, account_id, body.project_id)
        await self._services.settled()
        bounds = body.model_dump(include={"hard", "project_id", "key_id", "model", "end_user"})
        deed = partial(self._services.budgets.add, **bounds, setter=rule_setter(principal), by=key_actor(principal))
        standing = await call(deed, account_id, parse_usd(body.limit), body.period)
        await self._services.heeded()
        return json_answer(_budget(standing), status=201)

    async def remove(self, request: Request) -> Response:
        """Remove a budget. One that an operator set is removed with `operator:write` alone."""
        principal, account_id = await governed(request, self._services)
        deed = partial(self._services.budgets.remove, remover=rule_setter(principal), by=key_actor(principal))
        await self._services.database.call(deed, account_id, request.path_params["budget_id"])
        await self._services.heeded()
        return Response(status_code=204)

    async def _known(self, principal: Principal, account_id: str) -> None:
        """Raises AccountNotFound: an operator's key may name any."""
        if account_id != principal.account_id:
            await self._services.database.call(provisioning.get_account, self._services.database, account_id)


def _budget(standing: BudgetStanding) -> dict[str, Any]:
    budget = standing.budget
    total = budget.period is BudgetPeriod.TOTAL
    return {
        "id": budget.id,
        "key_id": budget.key_id,
        "model": budget.model,
        "project_id": budget.project_id,
        "end_user": budget.end_user,
        "period": budget.period.value,
        "hard": budget.hard,
        "set_by": budget.set_by.value,
        "limit": usd_decimal(budget.limit_nano),
        "limit_nano": budget.limit_nano,
        "spent": usd_decimal(standing.spent_nano),
        "spent_nano": standing.spent_nano,
        "from": None if total else iso(standing.from_ns),
        "to": None if total else iso(standing.to_ns),
        "created_at": iso(budget.created_at_ns),
    }
