"""Who or what ended a rollout, and what each process has told of its counts: one that tells twice is heard once.

Revision: 0030, after 0029
"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("cause", sa.String(16)))
    op.create_table(
        "rollout_tellings",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("process", sa.String(64), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", "process", name=op.f("pk_rollout_tellings")),
    )


def downgrade() -> None:
    op.drop_table("rollout_tellings")
    op.drop_column("rollouts", "cause")
