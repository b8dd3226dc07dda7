"""What each process sees of the demand for a model, so that one of them decides how many units are awake.

Revision: 0025, after 0024
"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "demand",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("process", sa.String(64), nullable=False),
        sa.Column("at_ns", sa.BigInteger, nullable=False),
        sa.Column("figures", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("model", "process", name=op.f("pk_demand")),
    )


def downgrade() -> None:
    op.drop_table("demand")
