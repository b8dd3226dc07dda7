"""/console/v1/accounts and /console/v1/model_switches: what an operator's key opens, limits and switches.

Each field that is changed is a deed of its own, as of the command line; a change that is cut short can be repeated.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import governed, key_actor, permitted
from api.body import parse, read_body
from api.console.accounts import iso
from api.console.answers import json_answer
from api.console.budgets import Usd
from api.console.schemas import ModelId, ModelList, RegionName
from api.errors import InputInvalid
from api.services import Services
from billing.money import parse_usd, usd_decimal
from tenancy import provisioning
from tenancy.accounts import NAME_CHARACTERS_MAX, TIER_MAX, WEIGHT_PERCENT_MAX, Account
from tenancy.errors import ScopeMissing
from tenancy.model_switches import disabled_model_ids, set_model_disabled
from tenancy.principal import Scope
from tenancy.provisioning import LIST_MAX, ProvisioningInvalid
from tenancy.quotas import Plan

T = TypeVar("T")

_Concurrency = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


class AccountBody(BaseModel):
    """concurrency, credit_limit: null for no limit."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
    concurrency: _Concurrency | None = None
    credit_limit: Usd | None = None


class AccountChangeBody(BaseModel):
    """What is not named stays. null: no limit for `concurrency` and `credit_limit`; any of `regions` and `models`."""

    model_config = ConfigDict(extra="forbid")

    suspended: Annotated[bool, Field(strict=True)] | None = None
    plan: Plan | None = None
    concurrency: _Concurrency | None = None
    credit_limit: Usd | None = None
    regions: Annotated[list[RegionName], Field(min_length=1, max_length=LIST_MAX)] | None = None
    models: ModelList | None = None
    tier: Annotated[int, Field(strict=True, ge=0, le=TIER_MAX)] | None = None
    weight_percent: Annotated[int, Field(strict=True, ge=1, le=WEIGHT_PERCENT_MAX)] | None = None


class SwitchBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: ModelId
    disabled: Annotated[bool, Field(strict=True)]


class TenantRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_accounts(self, request: Request) -> Response:
        """Every account, for an operator's key."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return json_answer({"accounts": [_account(one) for one in await self._call(provisioning.list_accounts)]})

    async def open(self, request: Request) -> Response:
        """Open an account."""
        principal = await permitted(request, self._services, Scope.OPERATOR_WRITE)
        body = parse(AccountBody, await read_body(request))
        deed = partial(
            provisioning.open_account,
            concurrency=body.concurrency,
            credit_limit_nano=_nano(body.credit_limit),
            by=key_actor(principal),
            clock=time.time_ns,
        )
        return json_answer(_account(await self._call(deed, body.name)), status=201)

    async def one_account(self, request: Request) -> Response:
        """One account: its own for an admin key, any for an operator's."""
        _, account_id = await governed(request, self._services)
        return json_answer(_account(await self._call(provisioning.get_account, account_id)))

    async def change(self, request: Request) -> Response:
        """Suspend or resume an account, change its plan, limits, regions, models or turns. It holds within a second."""
        principal, account_id = await governed(request, self._services)
        if Scope.OPERATOR_WRITE not in principal.scopes:
            raise ScopeMissing(f"This API key lacks the scope {Scope.OPERATOR_WRITE.value}.")
        body = parse(AccountChangeBody, await read_body(request))
        account = await self._call(provisioning.get_account, account_id)
        for deed in _deeds(body, account):
            account = await self._call(partial(deed, by=key_actor(principal)), account_id)
        return json_answer(_account(account))

    async def switches(self, request: Request) -> Response:
        """Models that are switched off for everybody."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return json_answer({"disabled": sorted(await self._call(disabled_model_ids))})

    async def switch(self, request: Request) -> Response:
        """Switch a model off or on for everybody: within a second; running answers end normally."""
        principal = await permitted(request, self._services, Scope.OPERATOR_WRITE)
        body = parse(SwitchBody, await read_body(request))
        await self._call(
            partial(set_model_disabled, disabled=body.disabled, by=key_actor(principal)),
            body.model,
        )
        return json_answer({"model": body.model, "disabled": body.disabled})

    async def _call(self, deed: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._services.database.call(deed, self._services.database, *arguments)
        except ProvisioningInvalid as error:
            raise InputInvalid((), str(error)) from error


def _deeds(body: AccountChangeBody, before: Account) -> list[Callable[..., Account]]:
    """One for each thing that is changed."""
    named, deeds = body.model_fields_set, list[Callable[..., Account]]()
    if body.suspended is not None:
        deeds.append(partial(provisioning.set_suspended, suspended=body.suspended))
    if body.plan is not None:
        plan = body.plan
        deeds.append(lambda database, account_id, **who: provisioning.set_plan(database, account_id, plan, **who))
    if named & {"concurrency", "credit_limit"}:
        deeds.append(
            partial(
                provisioning.set_limits,
                concurrency=body.concurrency if "concurrency" in named else before.concurrency,
                credit_limit_nano=_nano(body.credit_limit) if "credit_limit" in named else before.credit_limit_nano,
            )
        )
    if "regions" in named:
        deeds.append(partial(provisioning.set_regions, regions=body.regions))
    if "models" in named:
        deeds.append(partial(provisioning.set_models, models=body.models))
    if body.tier is not None or body.weight_percent is not None:
        deeds.append(
            partial(
                provisioning.set_turns,
                tier=before.tier if body.tier is None else body.tier,
                weight_percent=before.weight_percent if body.weight_percent is None else body.weight_percent,
            )
        )
    return deeds


def _nano(text: str | None) -> int | None:
    return None if text is None else parse_usd(text)


def _account(account: Account) -> dict[str, Any]:
    limit_nano = account.credit_limit_nano
    return {
        "id": account.id,
        "name": account.name,
        "created_at": iso(account.created_at_ns),
        "plan": account.plan.value,
        "suspended": account.suspended,
        "concurrency": account.concurrency,
        "credit_limit": None if limit_nano is None else usd_decimal(limit_nano),
        "credit_limit_nano": limit_nano,
        "regions": None if account.regions is None else list(account.regions),
        "models": None if account.models is None else list(account.models),
        "tier": account.tier,
        "weight_percent": account.weight_percent,
    }
