"""Users, memberships, sessions, one-time links, and the hash-chained audit log.

Revision: 0005, after 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("operator", sa.Boolean, nullable=False),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.Column("password_hash", sa.String(200), nullable=True),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("email", name=op.f("uq_users_email")),
    )
    op.create_table(
        "memberships",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "user_id", name=op.f("pk_memberships")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_memberships_account_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_memberships_user_id")),
    )
    op.create_index(op.f("ix_memberships_user_id"), "memberships", ["user_id"])
    op.create_table(
        "user_sessions",
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("seen_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_user_sessions")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_user_sessions_user_id")),
    )
    op.create_index(op.f("ix_user_sessions_user_id"), "user_sessions", ["user_id"])
    op.create_table(
        "one_time_links",
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(32), nullable=True),
        sa.Column("account_id", sa.String(32), nullable=True),
        sa.Column("email", sa.String(254), nullable=True),
        sa.Column("role", sa.String(16), nullable=True),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name=op.f("pk_one_time_links")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_one_time_links_user_id")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_one_time_links_account_id")),
    )
    op.create_index(op.f("ix_one_time_links_account_id"), "one_time_links", ["account_id"])
    op.create_index(op.f("ix_one_time_links_expires_at_ns"), "one_time_links", ["expires_at_ns"])
    op.create_table(
        "sign_in_failures",
        sa.Column("subject_hash", sa.String(64), nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("since_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("subject_hash", name=op.f("pk_sign_in_failures")),
    )
    op.create_index(op.f("ix_sign_in_failures_since_ns"), "sign_in_failures", ["since_ns"])
    op.create_table(
        "audit_log",
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at_ns", sa.BigInteger, nullable=False),
        sa.Column("account_id", sa.String(32), nullable=True),
        sa.Column("actor_kind", sa.String(16), nullable=False),
        sa.Column("actor_id", sa.String(32), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(254), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("previous_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_account_id_number", "audit_log", ["account_id", "number"])


def downgrade() -> None:
    for table in ("audit_log", "sign_in_failures", "one_time_links", "user_sessions", "memberships", "users"):
        op.drop_table(table)
