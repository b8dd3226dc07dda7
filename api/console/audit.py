"""GET /console/v1/accounts/{account_id}/audit, for an account's admin keys: who changed what and when.

For operators GET /console/v1/audit (of all accounts), …/audit/verify (is the log whole) and …/users (who may sign in).
"""

from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import owned, permitted
from api.console.accounts import iso
from api.console.answers import json_answer
from api.console.schemas import read_query
from api.services import Services
from tenancy import audit_log, people
from tenancy.audit_log import AuditEntry, Verdict
from tenancy.principal import Scope
from tenancy.users import User


class AuditQuery(BaseModel):
    """before: the `next` of an earlier page."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=1_000)] = 50
    before: Annotated[int, Field(ge=1, lt=2**63)] | None = None


class VerifyQuery(BaseModel):
    """known_number, known_hash: the head of an earlier answer, which must still stand."""

    model_config = ConfigDict(extra="forbid")

    known_number: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    known_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class AuditRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def of_account(self, request: Request) -> Response:
        """What was changed in the account, newest first; `next` is the `before` of the page behind it."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        return await self._page(request, principal.account_id)

    async def of_all(self, request: Request) -> Response:
        """What was changed anywhere, newest first; `next` is the `before` of the page behind it."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return await self._page(request, None)

    async def verify(self, request: Request) -> Response:
        """Whether every entry is as it was written. `head` is worth noting elsewhere: see known_number."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        query = read_query(VerifyQuery, request)
        known = None
        if query.known_number is not None and query.known_hash is not None:
            known = (query.known_number, query.known_hash)
        database = self._services.database
        return json_answer(verdict_fields(await database.call(partial(audit_log.verify, database, known))))

    async def users(self, request: Request) -> Response:
        """Everybody who may sign in."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        database = self._services.database
        return json_answer({"users": [user_fields(user) for user in await database.call(people.list_users, database)]})

    async def _page(self, request: Request, account_id: str | None) -> Response:
        query = read_query(AuditQuery, request)
        database = self._services.database
        entries = await database.call(audit_log.read_audit_log, database, account_id, query.limit, query.before)
        more = len(entries) == query.limit
        return json_answer(
            {"entries": [entry_fields(entry) for entry in entries], "next": entries[-1].number if more else None}
        )


def entry_fields(entry: AuditEntry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "at": iso(entry.at_ns),
        "account_id": entry.account_id,
        "actor": {"kind": entry.actor_kind, "id": entry.actor_id or None},
        "action": entry.action,
        "subject": entry.subject,
        "detail": orjson.loads(entry.detail),
        "hash": entry.hash,
    }


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    head = None if verdict.head is None else {"number": verdict.head[0], "hash": verdict.head[1]}
    return {"ok": not verdict.broken, "entries": verdict.entries, "head": head, "broken": list(verdict.broken)}


def user_fields(user: User) -> dict[str, Any]:
    return {
        "id": user.id,
        "email": user.email,
        "name": user.name,
        "operator": user.operator,
        "disabled": user.disabled,
        "has_password": user.has_password,
        "created_at": iso(user.created_at_ns),
    }
