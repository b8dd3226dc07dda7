"""One line for the audit log, as the last thing of a deed's transaction.

Used by the deeds of this package.
"""

from collections.abc import Callable

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.audit_log import Actor


def log(  # noqa: PLR0917 - who, whose, what, to what: always in this order
    connection: sa.Connection,
    clock: Callable[[], int],
    by: Actor,
    account_id: str,
    action: str,
    subject: str,
    **detail: str | int | bool | None,
) -> None:
    audit_log.record(connection, at_ns=clock(), by=by, account_id=account_id, action=action, subject=subject, **detail)
