"""The ledger, wallets, budgets, rollups and idempotency keys; what was used before is booked as postpaid.

Revision: 0002, after 0001
"""

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_HOUR_NS = 3_600 * 1_000_000_000
_DIMENSIONS = ("key_id", "model", "endpoint", "outcome")
_VIEWS = {
    "total": (),
    "key": ("key_id",),
    "model": ("model",),
    "endpoint": ("endpoint",),
    "outcome": ("outcome",),
    "all": _DIMENSIONS,
}
_SUMS = "requests, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, cost_nano, neurons_micro"


def upgrade() -> None:
    op.create_table(
        "usage_rollups",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("view", sa.String(8), nullable=False),
        sa.Column("grain", sa.String(8), nullable=False),
        sa.Column("period_start_ns", sa.BigInteger, nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("endpoint", sa.String(50), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_nano", sa.BigInteger, nullable=False),
        sa.Column("neurons_micro", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "account_id",
            "view",
            "grain",
            "period_start_ns",
            "key_id",
            "model",
            "endpoint",
            "outcome",
            name=op.f("pk_usage_rollups"),
        ),
    )
    op.create_table(
        "billing_accounts",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_billing_accounts")),
    )
    op.create_table(
        "ledger_accounts",
        sa.Column("id", sa.String(80), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=True),
        sa.Column("posted_nano", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_accounts")),
    )
    op.create_table(
        "ledger_transactions",
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("reverses", sa.String(200), nullable=True),
        sa.Column("memo", sa.String(200), nullable=True),
        sa.Column("occurred_at_ns", sa.BigInteger, nullable=False),
        sa.Column("posted_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("source", name=op.f("pk_ledger_transactions")),
        sa.UniqueConstraint("reverses", name=op.f("uq_ledger_transactions_reverses")),
        sa.ForeignKeyConstraint(
            ["reverses"], ["ledger_transactions.source"], name=op.f("fk_ledger_transactions_reverses")
        ),
    )
    op.create_index(
        "ix_ledger_transactions_account_id_posted_at_ns_source",
        "ledger_transactions",
        ["account_id", "posted_at_ns", "source"],
    )
    op.create_table(
        "ledger_entries",
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("ledger_account_id", sa.String(80), nullable=False),
        sa.Column("amount_nano", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("source", "ledger_account_id", name=op.f("pk_ledger_entries")),
        sa.ForeignKeyConstraint(["source"], ["ledger_transactions.source"], name=op.f("fk_ledger_entries_source")),
        sa.ForeignKeyConstraint(
            ["ledger_account_id"], ["ledger_accounts.id"], name=op.f("fk_ledger_entries_ledger_account_id")
        ),
    )
    op.create_index("ix_ledger_entries_ledger_account_id", "ledger_entries", ["ledger_account_id"])
    op.create_table(
        "credit_grants",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("source", sa.String(200), nullable=False),
        sa.Column("amount_nano", sa.BigInteger, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=True),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_credit_grants")),
        sa.UniqueConstraint("source", name=op.f("uq_credit_grants_source")),
    )
    op.create_index(op.f("ix_credit_grants_account_id"), "credit_grants", ["account_id"])
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=True),
        sa.Column("model", sa.String(200), nullable=True),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("limit_nano", sa.BigInteger, nullable=False),
        sa.Column("hard", sa.Boolean, nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("removed_at_ns", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
    )
    op.create_index(op.f("ix_budgets_account_id"), "budgets", ["account_id"])
    op.create_table(
        "idempotency_records",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(36), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("status", sa.Integer, nullable=True),
        sa.Column("headers", sa.Text, nullable=True),
        sa.Column("body", sa.LargeBinary, nullable=True),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "key_hash", name=op.f("pk_idempotency_records")),
    )
    op.create_index(op.f("ix_idempotency_records_expires_at_ns"), "idempotency_records", ["expires_at_ns"])
    _book_what_was_used()


def _book_what_was_used() -> None:
    """Events of the time before the ledger: each as a postpaid transaction, and all of them in the rollups."""
    op.execute(
        "INSERT INTO ledger_accounts (id, kind, account_id, posted_nano) "
        "SELECT 'receivable:' || account_id, 'receivable', account_id, -SUM(cost_nano) "
        "FROM usage_events WHERE cost_nano > 0 GROUP BY account_id"
    )
    op.execute(
        "INSERT INTO ledger_accounts (id, kind, account_id, posted_nano) "
        "SELECT 'revenue', 'revenue', NULL, SUM(cost_nano) FROM usage_events WHERE cost_nano > 0 "
        "HAVING SUM(cost_nano) > 0"
    )
    op.execute(
        sa.text(
            "INSERT INTO ledger_transactions (source, kind, account_id, occurred_at_ns, posted_at_ns) "
            "SELECT 'usage:' || id, 'usage', account_id, started_at_ns, CAST(:now AS BIGINT) "
            "FROM usage_events WHERE cost_nano > 0"
        ).bindparams(now=time.time_ns())
    )
    for account, amount in (("'receivable:' || account_id", "-cost_nano"), ("'revenue'", "cost_nano")):
        op.execute(
            "INSERT INTO ledger_entries (source, ledger_account_id, amount_nano) "
            f"SELECT 'usage:' || id, {account}, {amount} FROM usage_events WHERE cost_nano > 0"
        )
    for grain, length_ns in (("hour", _HOUR_NS), ("day", 24 * _HOUR_NS)):
        for view, told in _VIEWS.items():
            if (grain, view) != ("hour", "all"):
                _roll_up(grain, length_ns, view, told)


def _roll_up(grain: str, length_ns: int, view: str, told: tuple[str, ...]) -> None:
    start = f"(started_at_ns / {length_ns}) * {length_ns}"
    selected = ", ".join(name if name in told else "''" for name in _DIMENSIONS)
    op.execute(
        f"INSERT INTO usage_rollups (account_id, view, grain, period_start_ns, {', '.join(_DIMENSIONS)}, {_SUMS}) "
        f"SELECT account_id, '{view}', '{grain}', {start}, {selected}, COUNT(*), SUM(prompt_tokens), "
        "SUM(cached_tokens), SUM(completion_tokens), SUM(reasoning_tokens), SUM(cost_nano), SUM(neurons_micro) "
        f"FROM usage_events GROUP BY {', '.join(('account_id', start, *told))}"
    )


def downgrade() -> None:
    for table in (
        "idempotency_records",
        "budgets",
        "credit_grants",
        "ledger_entries",
        "ledger_transactions",
        "ledger_accounts",
        "billing_accounts",
        "usage_rollups",
    ):
        op.drop_table(table)
