"""Models that an operator switched off. None is.

Revision: 0017, after 0016
"""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "disabled_models",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("disabled_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_disabled_models")),
    )


def downgrade() -> None:
    op.drop_table("disabled_models")
