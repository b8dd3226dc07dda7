"""Who set a limit or a budget: the operator or the account. Rules of both may stand beside each other.

Of rules that exist the audit log tells; one that it does not know, or that a process of the version before sets, is
the account's own, which everybody who could remove it before can remove. What is the whole account's is the operator's.

Revision: 0029, after 0028
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_QUOTA_KEY = ["account_id", "key_id", "model", "meter", "project_id"]
_LOG = sa.table(
    "audit_log",
    *(sa.column(name) for name in ("number", "account_id", "actor_kind", "actor_id", "action", "subject", "detail")),
)
_QUOTAS = sa.table("quotas", *(sa.column(name) for name in (*_QUOTA_KEY, "set_by")))
_BUDGETS = sa.table("budgets", sa.column("id"), sa.column("set_by"))


def upgrade() -> None:
    with op.batch_alter_table("quotas") as quotas:
        quotas.add_column(_set_by())
        quotas.drop_constraint(op.f("pk_quotas"), type_="primary")
        quotas.create_primary_key(op.f("pk_quotas"), [*_QUOTA_KEY, "set_by"])
    op.add_column("budgets", _set_by())
    op.execute("UPDATE quotas SET set_by = 'operator' WHERE key_id = '' AND project_id = ''")
    for entry in _of_operators(op.get_bind()):
        if entry.action == "budget.add":
            op.execute(_BUDGETS.update().where(_BUDGETS.c.id == entry.subject).values(set_by="operator"))
        else:
            rule = {"account_id": entry.account_id, "meter": entry.subject} | _bounds(entry.detail)
            same = [_QUOTAS.c[name] == value for name, value in rule.items()]
            op.execute(_QUOTAS.update().where(*same).values(set_by="operator"))


def downgrade() -> None:
    # Two rules for the same thing can't be said any more: the tighter one is kept.
    same = " AND ".join(f"other.{name} = quotas.{name}" for name in _QUOTA_KEY)
    tighter = (
        "other.limit_amount < quotas.limit_amount "
        "OR (other.limit_amount = quotas.limit_amount AND other.set_by > quotas.set_by)"
    )
    op.execute(f"DELETE FROM quotas WHERE EXISTS (SELECT 1 FROM quotas AS other WHERE {same} AND ({tighter}))")  # noqa: S608 - names from above
    op.drop_column("budgets", "set_by")
    with op.batch_alter_table("quotas") as quotas:
        quotas.drop_constraint(op.f("pk_quotas"), type_="primary")
        quotas.create_primary_key(op.f("pk_quotas"), _QUOTA_KEY)
        quotas.drop_column("set_by")


def _set_by() -> sa.Column[str]:
    return sa.Column("set_by", sa.String(16), nullable=False, server_default="account")


def _of_operators(connection: sa.Connection) -> list[sa.Row[Any]]:
    """The newest entry on each rule that was set, where an operator set it."""
    users = set(connection.scalars(sa.text("SELECT id FROM users WHERE operator")))
    keys = set(connection.scalars(sa.text("SELECT id FROM api_keys WHERE scopes LIKE '%operator:write%'")))
    who = {"command line": {""}, "user": users, "key": keys}
    newest: dict[tuple[object, ...], sa.Row[Any]] = {}
    set_ones = sa.select(_LOG).where(_LOG.c.action.in_(["limit.set", "budget.add"])).order_by(_LOG.c.number)
    for entry in connection.execute(set_ones):
        bounds = () if entry.action == "budget.add" else tuple(_bounds(entry.detail).values())
        newest[entry.account_id, entry.action, entry.subject, *bounds] = entry
    return [entry for entry in newest.values() if entry.actor_id in who.get(entry.actor_kind, ())]


def _bounds(detail: str) -> dict[str, str]:
    told = json.loads(detail)
    return {name: told.get(name) or "" for name in ("key_id", "model", "project_id")}
