"""The tables of accounts, keys and quotas. Read by store.py and by the migrations' comparison.

Times are Unix nanoseconds.
"""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    },
)

accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(100), nullable=False, unique=True),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("suspended", sa.Boolean, nullable=False),
    sa.Column("concurrency", sa.Integer),
    sa.Column("credit_limit_nano", sa.BigInteger),
    sa.Column("plan", sa.String(16), nullable=False, server_default="paid"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), nullable=False, index=True),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("key_hash", sa.String(64), nullable=False, unique=True),
    sa.Column("hint", sa.String(32), nullable=False),
    sa.Column("scopes", sa.String(200), nullable=False),  # words, one space between
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ns", sa.BigInteger),
    sa.Column("revoked_at_ns", sa.BigInteger),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("lineage_id", sa.String(32)),
    sa.Column("models", sa.Text),  # ids, one space between; null: all
    sa.Column("networks", sa.Text),  # CIDR blocks, one space between; null: all
    sa.Column("last_used_at_ns", sa.BigInteger),
)

quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), primary_key=True),
    sa.Column("key_id", sa.String(32), primary_key=True),  # a lineage; empty: all keys together
    sa.Column("model", sa.String(200), primary_key=True),  # empty: all models together
    sa.Column("meter", sa.String(32), primary_key=True),
    sa.Column("limit_amount", sa.BigInteger, nullable=False),
)
