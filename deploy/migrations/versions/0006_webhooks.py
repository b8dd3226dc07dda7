"""Budget alerts, webhook endpoints and the outbox of their messages.

Revision: 0006, after 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "budget_alerts",
        sa.Column("budget_id", sa.String(32), nullable=False),
        sa.Column("period_start_ns", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("threshold", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("spent_nano", sa.BigInteger, nullable=False),
        sa.Column("told_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("budget_id", "period_start_ns", "threshold", name=op.f("pk_budget_alerts")),
    )
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.String(100), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("removed_at_ns", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index(op.f("ix_webhook_endpoints_account_id"), "webhook_endpoints", ["account_id"])
    op.create_table(
        "webhook_messages",
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("endpoint_id", sa.String(32), nullable=False),
        sa.Column("id", sa.String(200), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("next_attempt_at_ns", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("ended_at_ns", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_webhook_messages")),
        sa.UniqueConstraint("endpoint_id", "id", name=op.f("uq_webhook_messages_endpoint_id_id")),
        sa.ForeignKeyConstraint(["endpoint_id"], ["webhook_endpoints.id"], name="fk_webhook_messages_endpoint_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_webhook_messages_state_endpoint_id_position", "webhook_messages", ["state", "endpoint_id", "position"]
    )


def downgrade() -> None:
    op.drop_table("webhook_messages")
    op.drop_table("webhook_endpoints")
    op.drop_table("budget_alerts")
