"""Rollouts: what is decided of each, and what was counted of both revisions. There is none.

Revision: 0021, after 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("round", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("new_revision", sa.String(64), nullable=False),
        sa.Column("old_revision", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("share_bp", sa.Integer, nullable=False),
        sa.Column("started_at_ns", sa.BigInteger, nullable=False),
        sa.Column("changed_at_ns", sa.BigInteger, nullable=False),
        sa.Column("why", sa.String(500), nullable=False),
        sa.Column("evaluation", sa.Float),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_rollouts")),
    )
    op.create_table(
        "rollout_counts",
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("round", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("revision", sa.String(64), nullable=False),
        sa.Column("measure", sa.String(16), nullable=False),
        sa.Column("bucket", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("model", "round", "revision", "measure", "bucket", name=op.f("pk_rollout_counts")),
    )


def downgrade() -> None:
    op.drop_table("rollout_counts")
    op.drop_table("rollouts")
