"""Allowances: money that is set aside for each of several processes.

Revision: 0007, after 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "allowances",
        sa.Column("process", sa.String(64), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("pot", sa.String(64), nullable=False),
        sa.Column("budget_id", sa.String(32), nullable=True),
        sa.Column("from_ns", sa.BigInteger, nullable=False),
        sa.Column("amount_nano", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("process", "account_id", "pot", name=op.f("pk_allowances")),
    )
    op.create_index("ix_allowances_account_id", "allowances", ["account_id"])


def downgrade() -> None:
    op.drop_table("allowances")
