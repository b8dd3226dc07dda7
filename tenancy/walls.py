"""A second wall between accounts: PostgreSQL's row-level security, which shows a transaction one account's rows alone.

`pagegate db protect` puts it up; database.py says for whom each transaction works. A table's rows are its account's by
their `account_id`, or by the row that they belong to. Where the service has a role of its own, that role may not alter
what is booked or logged. Knows tables by what the database says of them, so that a new one is not forgotten.
"""

import re
from typing import Final

import sqlalchemy as sa

from tenancy.database import ACCOUNT_SETTING, EVERY_ACCOUNT
from tenancy.errors import WallRefused

_POLICY: Final = "of_one_account"
# (column, table it refers to, its column) of tables whose rows are an account's without saying so.
_BELONGS: Final = {
    "ledger_entries": ("source", "ledger_transactions", "source"),
    "file_parts": ("file_id", "files", "id"),
}
# Of no account: people, who may be members of several, the lists of prices and of models, engines, and alembic's own.
UNWALLED: Final = frozenset(
    {
        *("users", "user_sessions", "sign_in_failures"),
        *("prices", "volume_prices", "disabled_models", "alembic_version"),
        *("units", "unit_starts", "unit_uses", "unit_deployers", "demand"),
        *("rollouts", "rollout_counts", "rollout_tellings"),
    }
)
APPEND_ONLY: Final = ("audit_log", "ledger_entries", "ledger_transactions")
_ROLE: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


def protect(connection: sa.Connection, role: str | None = None) -> list[str]:
    """Put the wall up in the caller's write transaction, as the tables' owner; again after each upgrade of the schema.

    role: whom the service connects as, if that is not the owner; it may then append to ledger and audit log, and not
    alter them. Returns the walled tables. Raises WallRefused.
    """
    if connection.dialect.name != "postgresql":
        raise WallRefused("Row-level security is PostgreSQL's: SQLite has none.")
    if role is not None and _ROLE.fullmatch(role) is None:
        raise WallRefused("A role's name has lower-case letters, digits and underscores.")
    inspector = sa.inspect(connection)
    walled = []
    for table in sorted(set(inspector.get_table_names()) - UNWALLED):
        rule = _rule(table, {column["name"] for column in inspector.get_columns(table)})
        connection.execute(sa.text(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY"))
        connection.execute(sa.text(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY"))  # for its owner, too
        connection.execute(sa.text(f"DROP POLICY IF EXISTS {_POLICY} ON {table}"))
        connection.execute(sa.text(f"CREATE POLICY {_POLICY} ON {table} USING ({rule}) WITH CHECK ({rule})"))
        walled.append(table)
    if role is not None:
        _grant(connection, role)
    return walled


def unprotected(connection: sa.Connection) -> list[str]:
    """Sentences on what of the wall is missing, if it was put up at all; none on SQLite."""
    if connection.dialect.name != "postgresql":
        return []
    secured = sa.text(
        "SELECT relname, relrowsecurity AND relforcerowsecurity AS walled FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
    )
    tables = {row.relname: row.walled for row in connection.execute(secured) if row.relname not in UNWALLED}
    if not any(tables.values()):
        return []
    missing = [
        f"the table {name} has no wall: run 'pagegate db protect'"
        for name, walled in sorted(tables.items())
        if not walled
    ]
    above = connection.scalar(sa.text("SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"))
    return [*missing, *(["the service's role is above row-level security: give it an ordinary one"] if above else [])]


def _rule(table: str, columns: set[str]) -> str:
    everything = f"current_setting('{ACCOUNT_SETTING}', true) = '{EVERY_ACCOUNT}'"
    if table in _BELONGS:
        column, parent, parents = _BELONGS[table]
        # The parent's own wall holds inside this question.
        belongs = f"SELECT 1 FROM {parent} AS parent WHERE parent.{parents} = {table}.{column}"  # noqa: S608 - names from above
        return f"{everything} OR EXISTS ({belongs})"
    column = "id" if table == "accounts" else "account_id"
    if column not in columns:
        raise WallRefused(f"Nobody has said whose the rows of the table {table} are.")
    return f"{everything} OR {column} = current_setting('{ACCOUNT_SETTING}', true)"


def _grant(connection: sa.Connection, role: str) -> None:
    for statement in (
        f"GRANT USAGE ON SCHEMA public TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
        f"GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO {role}",
        f"REVOKE UPDATE, DELETE, TRUNCATE ON {', '.join(APPEND_ONLY)} FROM {role}",
        # A transaction that a process of the version before booked without its month is told it.
        f"GRANT UPDATE (month) ON ledger_transactions TO {role}",
        f"REVOKE INSERT, UPDATE, DELETE ON alembic_version FROM {role}",
    ):
        connection.execute(sa.text(statement))
