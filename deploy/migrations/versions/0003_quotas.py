"""Quotas, plans, and what a key may reach: rotation, models, networks, last use. Accounts that exist stay unlimited.

Revision: 0003, after 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("accounts", sa.Column("plan", sa.String(16), nullable=False, server_default="paid"))
    op.add_column("api_keys", sa.Column("lineage_id", sa.String(32), nullable=True))
    op.add_column("api_keys", sa.Column("models", sa.Text, nullable=True))
    op.add_column("api_keys", sa.Column("networks", sa.Text, nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at_ns", sa.BigInteger, nullable=True))
    op.create_table(
        "quotas",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("meter", sa.String(32), nullable=False),
        sa.Column("limit_amount", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "key_id", "model", "meter", name=op.f("pk_quotas")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_quotas_account_id")),
    )


def downgrade() -> None:
    op.drop_table("quotas")
    for column in ("last_used_at_ns", "networks", "models", "lineage_id"):
        op.drop_column("api_keys", column)
    op.drop_column("accounts", "plan")
