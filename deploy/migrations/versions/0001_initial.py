"""Accounts, keys, prices and usage events.

Revision: 0001, the first
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "accounts",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("suspended", sa.Boolean, nullable=False),
        sa.Column("concurrency", sa.Integer, nullable=True),
        sa.Column("credit_limit_nano", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_accounts")),
        sa.UniqueConstraint("name", name=op.f("uq_accounts_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("hint", sa.String(32), nullable=False),
        sa.Column("scopes", sa.String(200), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=True),
        sa.Column("revoked_at_ns", sa.BigInteger, nullable=True),
        sa.Column("disabled", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_keys_key_hash")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_api_keys_account_id")),
    )
    op.create_index(op.f("ix_api_keys_account_id"), "api_keys", ["account_id"])
    op.create_table(
        "prices",
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("book", sa.String(50), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("tier", sa.String(50), nullable=False),
        sa.Column("input_nano_per_m", sa.BigInteger, nullable=False),
        sa.Column("cached_input_nano_per_m", sa.BigInteger, nullable=True),
        sa.Column("output_nano_per_m", sa.BigInteger, nullable=False),
        sa.Column("reasoning_nano_per_m", sa.BigInteger, nullable=True),
        sa.Column("input_neurons_per_m", sa.BigInteger, nullable=False),
        sa.Column("cached_input_neurons_per_m", sa.BigInteger, nullable=True),
        sa.Column("output_neurons_per_m", sa.BigInteger, nullable=False),
        sa.Column("effective_from_ns", sa.BigInteger, nullable=False),
        sa.Column("effective_to_ns", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_prices")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ux_prices_open",
        "prices",
        ["book", "model", "tier"],
        unique=True,
        sqlite_where=sa.text("effective_to_ns IS NULL"),
        postgresql_where=sa.text("effective_to_ns IS NULL"),
    )
    op.create_table(
        "usage_events",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("endpoint", sa.String(50), nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("code", sa.String(64), nullable=True),
        sa.Column("finish_reason", sa.String(64), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("usage_source", sa.String(32), nullable=False),
        sa.Column("charged", sa.Boolean, nullable=False),
        sa.Column("cost_nano", sa.BigInteger, nullable=False),
        sa.Column("neurons_micro", sa.BigInteger, nullable=False),
        sa.Column("price_version", sa.Integer, nullable=True),
        sa.Column("started_at_ns", sa.BigInteger, nullable=False),
        sa.Column("ended_at_ns", sa.BigInteger, nullable=False),
        sa.Column("queued_ms", sa.BigInteger, nullable=False),
        sa.Column("ttft_ms", sa.BigInteger, nullable=True),
        sa.Column("replica", sa.String(200), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_events")),
    )
    op.create_index(
        "ix_usage_events_account_id_started_at_ns_id",
        "usage_events",
        ["account_id", "started_at_ns", "id"],
    )


def downgrade() -> None:
    op.drop_table("usage_events")
    op.drop_table("prices")
    op.drop_table("api_keys")
    op.drop_table("accounts")
