"""GET …/audit: who changed what in this account; and how the log's entries read, for the operator's page too."""

import time
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from api.console.schemas import parse_query
from api.dashboard.access import Visit
from api.dashboard.key_names import key_names
from api.dashboard.pages import Pages
from tenancy import audit_log, people

_PAGE: Final = 50


class LogQuery(BaseModel):
    before: Annotated[Annotated[int, Field(ge=1, lt=2**63)] | None, BeforeValidator(lambda value: value or None)] = None


class AccountLogPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        names = await key_names(visit) | await user_names(visit)
        return await log_page(self._pages, visit, visit.account_id, here="audit", names=names)


async def log_page(
    pages: Pages, visit: Visit, account_id: str | None, *, here: str, names: Mapping[str, str]
) -> Response:
    """account_id: None for all accounts'."""
    query = parse_query(LogQuery, dict(visit.request.query_params))
    database = visit.services.database
    entries = await database.call(audit_log.read_audit_log, database, account_id, _PAGE, query.before)
    return pages.page(
        visit,
        "audit.html.j2",
        here=here,
        title="Audit log",
        as_of_ns=time.time_ns(),
        entries=entries,
        names=names,
        whole=account_id is None,
        first_page=query.before is None,
        onward=entries[-1].number if len(entries) == _PAGE else None,
    )


async def user_names(visit: Visit) -> dict[str, str]:
    """Of the account's members; of all users on an operator's page."""
    database = visit.services.database
    if visit.account is None:
        return {user.id: user.email for user in await database.call(people.list_users, database)}
    members = await database.call(people.list_members, database, visit.account_id)
    return {member.user.id: member.user.email for member in members}
