"""Service accounts: programs that own keys. Keys that exist are nobody's but their account's.

Revision: 0013, after 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "service_accounts",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_service_accounts")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_service_accounts_account_id")),
        sa.UniqueConstraint("account_id", "name", name=op.f("uq_service_accounts_account_id_name")),
    )
    op.add_column("api_keys", sa.Column("service_account_id", sa.String(32), nullable=True))


def downgrade() -> None:
    # A key without its service account would be bounded and disabled by nobody.
    op.execute("DELETE FROM api_keys WHERE service_account_id IS NOT NULL")
    op.drop_column("api_keys", "service_account_id")
    op.drop_table("service_accounts")
