"""What is known of units: how long their latest starts took, and when they were used last.

Revision: 0022, after 0021
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unit_starts",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("place", sa.String(64), nullable=False),
        sa.Column("depth", sa.String(20), nullable=False),
        sa.Column("samples", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("model", "name", "place", "depth", name=op.f("pk_unit_starts")),
    )
    op.create_table(
        "unit_uses",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("place", sa.String(64), nullable=False),
        sa.Column("used_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", "name", "place", name=op.f("pk_unit_uses")),
    )


def downgrade() -> None:
    op.drop_table("unit_uses")
    op.drop_table("unit_starts")
