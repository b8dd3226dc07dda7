"""Answers that are kept so that a conversation can go on from them.

Revision: 0015, after 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kept_conversations",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("response_id", sa.String(36), nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.Column("turns", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "response_id", name=op.f("pk_kept_conversations")),
    )
    op.create_index("ix_kept_conversations_expires_at_ns", "kept_conversations", ["expires_at_ns"])


def downgrade() -> None:
    op.drop_table("kept_conversations")
