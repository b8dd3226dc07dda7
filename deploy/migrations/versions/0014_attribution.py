"""End users and tags of requests, sums by them, and budgets for an end user.

Revision: 0014, after 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_KEYS = {"account_id": 32, "kind": 8, "name": 400}
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano")


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("end_user", sa.String(256), nullable=True))
    op.add_column("usage_events", sa.Column("tags", sa.Text, nullable=True))
    op.add_column("budgets", sa.Column("end_user", sa.String(256), nullable=True))
    op.create_table(
        "attributed_usage",
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in _KEYS.items()),
        sa.Column("period_start_ns", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*_SUMS, "neurons_micro")),
        sa.PrimaryKeyConstraint(*_KEYS, "period_start_ns", "model", "key_id", name=op.f("pk_attributed_usage")),
    )
    op.create_index(
        "ix_attributed_usage_account_id_kind_period_start_ns",
        "attributed_usage",
        ["account_id", "kind", "period_start_ns"],
    )


def downgrade() -> None:
    op.drop_table("attributed_usage")
    op.execute("DELETE FROM budgets WHERE end_user IS NOT NULL")  # it would become one of everybody
    op.drop_column("budgets", "end_user")
    op.drop_column("usage_events", "tags")
    op.drop_column("usage_events", "end_user")
