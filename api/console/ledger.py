"""GET /console/v1/accounts/{account_id}/wallet and …/ledger: an account's money, for its own admin keys.

Reading only: money is moved by the operator's command line. Both see what has ended before they were asked.
"""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import bearer
from api.console.accounts import iso
from api.console.schemas import StatementQuery, read_query
from api.services import Services
from billing.ledger.statement import StatementLine, read_statement
from billing.ledger.wallet import Grant
from billing.money import usd_decimal
from tenancy.errors import AccountNotFound, ScopeMissing
from tenancy.principal import Scope


class LedgerRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def wallet(self, request: Request) -> Response:
        """How the account pays, what it has, what it owes, and its grants."""
        account_id = await self._administered(request)
        await self._services.settled()
        view = await self._services.database.call(self._services.wallets.show, account_id)
        return _json(
            {
                "account_id": account_id,
                "mode": view.mode.value,
                "hold_mode": view.hold_mode.value,
                **_amount("wallet", view.wallet_nano),
                **_amount("owed", view.owed_nano),
                "grants": [_grant(grant) for grant in view.grants],
            }
        )

    async def ledger(self, request: Request) -> Response:
        """What was booked, newest first, a page at a time: `next` is the `before` of the page behind it."""
        account_id = await self._administered(request)
        query = read_query(StatementQuery, request)
        await self._services.settled()
        lines = await self._services.database.call(
            read_statement, self._services.database, account_id, query.limit, query.before
        )
        more = len(lines) == query.limit
        return _json(
            {
                "transactions": [_line(line) for line in lines],
                "next": f"{lines[-1].posted_at_ns}.{lines[-1].source}" if more else None,
            }
        )

    async def _administered(self, request: Request) -> str:
        principal = await bearer(request, self._services)
        if request.path_params["account_id"] != principal.account_id:
            raise AccountNotFound("There is no such account.")
        if Scope.ACCOUNT_ADMIN not in principal.scopes:
            raise ScopeMissing(f"This API key lacks the scope {Scope.ACCOUNT_ADMIN.value}.")
        return principal.account_id


def _amount(name: str, nano: int) -> dict[str, Any]:
    return {name: usd_decimal(nano), f"{name}_nano": nano}


def _grant(grant: Grant) -> dict[str, Any]:
    return {
        "id": grant.id,
        **_amount("amount", grant.amount_nano),
        **_amount("left", grant.left_nano),
        "priority": grant.priority,
        "expires_at": None if grant.expires_at_ns is None else iso(grant.expires_at_ns),
        "created_at": iso(grant.created_at_ns),
    }


def _line(line: StatementLine) -> dict[str, Any]:
    return {
        "source": line.source,
        "kind": line.kind,
        "occurred_at": iso(line.occurred_at_ns),
        "posted_at": iso(line.posted_at_ns),
        "reverses": line.reverses,
        "memo": line.memo,
        "entries": [{"ledger_account": account, **_amount("amount", nano)} for account, nano in line.entries],
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
