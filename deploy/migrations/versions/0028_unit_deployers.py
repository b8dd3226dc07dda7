"""Which gateways deploy a unit that several share.

Revision: 0028, after 0027
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "unit_deployers",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("driver", sa.String(64), nullable=False),
        sa.Column("keeper", sa.String(64), nullable=False),
        sa.Column("until_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", "name", "driver", "keeper", name=op.f("pk_unit_deployers")),
    )


def downgrade() -> None:
    op.drop_table("unit_deployers")
