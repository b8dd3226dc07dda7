"""Units, which wake and sleep: their states, owners and what is wished of them.

Revision: 0019, after 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "units",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("place", sa.String(64), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("since_ns", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("wish", sa.String(20), nullable=False),
        sa.Column("wish_by", sa.String(20), nullable=False),
        sa.Column("wish_since_ns", sa.BigInteger, nullable=False),
        sa.Column("wish_depth", sa.String(20), nullable=False),
        sa.Column("depth", sa.String(20), nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("retry_at_ns", sa.BigInteger, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("model", "name", "place", name=op.f("pk_units")),
    )


def downgrade() -> None:
    op.drop_table("units")
