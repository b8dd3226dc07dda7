"""Tiers and weights of accounts among those who wait. Accounts that exist share one tier, all alike.

Revision: 0008, after 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("accounts", sa.Column("tier", sa.Integer, nullable=False, server_default="0"))
    op.add_column("accounts", sa.Column("weight_percent", sa.Integer, nullable=False, server_default="100"))


def downgrade() -> None:
    op.drop_column("accounts", "weight_percent")
    op.drop_column("accounts", "tier")
