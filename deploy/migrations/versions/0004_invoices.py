"""Accounting months and invoices; what is booked already belongs to the month of its date.

Revision: 0004, after 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("billing_accounts", sa.Column("invoice_to", sa.Text, nullable=True))
    op.add_column("ledger_transactions", sa.Column("month", sa.String(7), nullable=False, server_default="-"))
    month = "strftime('%Y-%m', occurred_at_ns / 1000000000, 'unixepoch')"
    if op.get_context().dialect.name == "postgresql":
        month = "to_char(to_timestamp(occurred_at_ns / 1000000000) AT TIME ZONE 'UTC', 'YYYY-MM')"
    op.execute(f"UPDATE ledger_transactions SET month = {month}")  # noqa: S608 - one of two constants
    op.create_index(
        "ix_ledger_transactions_account_id_month_source", "ledger_transactions", ["account_id", "month", "source"]
    )
    op.create_table(
        "ledger_periods",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("closed_at_ns", sa.BigInteger, nullable=False),
        sa.Column("transactions", sa.BigInteger, nullable=True),
        sa.Column("digest", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("account_id", "month", name=op.f("pk_ledger_periods")),
    )
    op.create_table(
        "invoices",
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("issued_at_ns", sa.BigInteger, nullable=False),
        sa.Column("seller", sa.Text, nullable=False),
        sa.Column("buyer", sa.Text, nullable=False),
        sa.Column("lines", sa.Text, nullable=False),
        sa.Column("total_nano", sa.BigInteger, nullable=False),
        sa.Column("paid_nano", sa.BigInteger, nullable=False),
        sa.Column("rounding_nano", sa.BigInteger, nullable=False),
        sa.Column("due_cents", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_invoices")),
        sa.UniqueConstraint("account_id", "month", name=op.f("uq_invoices_account_id_month")),
    )


def downgrade() -> None:
    op.drop_table("invoices")
    op.drop_table("ledger_periods")
    op.drop_index("ix_ledger_transactions_account_id_month_source", "ledger_transactions")
    op.drop_column("ledger_transactions", "month")
    op.drop_column("billing_accounts", "invoice_to")
