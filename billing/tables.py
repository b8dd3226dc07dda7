"""The tables of prices and usage. Amounts are BIGINT integers (nano-USD, micro-neurons), times Unix nanoseconds.

Account and key ids are plain values: nothing here refers to another package's tables.
"""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    },
)

prices = sa.Table(
    "prices",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("book", sa.String(50), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("tier", sa.String(50), nullable=False),
    sa.Column("input_nano_per_m", sa.BigInteger, nullable=False),
    sa.Column("cached_input_nano_per_m", sa.BigInteger),
    sa.Column("output_nano_per_m", sa.BigInteger, nullable=False),
    sa.Column("reasoning_nano_per_m", sa.BigInteger),
    sa.Column("input_neurons_per_m", sa.BigInteger, nullable=False),
    sa.Column("cached_input_neurons_per_m", sa.BigInteger),
    sa.Column("output_neurons_per_m", sa.BigInteger, nullable=False),
    sa.Column("effective_from_ns", sa.BigInteger, nullable=False),
    sa.Column("effective_to_ns", sa.BigInteger),
    sqlite_autoincrement=True,  # a version is never used twice, whatever happens to its row
)
# At most one row without an end: two writers at once can't both add the price that is in force from now on.
sa.Index(
    "ux_prices_open",
    prices.c.book,
    prices.c.model,
    prices.c.tier,
    unique=True,
    sqlite_where=prices.c.effective_to_ns.is_(None),
    postgresql_where=prices.c.effective_to_ns.is_(None),
)

usage_events = sa.Table(
    "usage_events",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),  # the request id
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("key_id", sa.String(32), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("endpoint", sa.String(50), nullable=False),
    sa.Column("stream", sa.Boolean, nullable=False),
    sa.Column("outcome", sa.String(32), nullable=False),
    sa.Column("code", sa.String(64)),
    sa.Column("finish_reason", sa.String(64)),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
    sa.Column("usage_source", sa.String(32), nullable=False),
    sa.Column("charged", sa.Boolean, nullable=False),
    sa.Column("cost_nano", sa.BigInteger, nullable=False),
    sa.Column("neurons_micro", sa.BigInteger, nullable=False),
    sa.Column("price_version", sa.Integer),  # null where the request was refused before a price was known
    sa.Column("started_at_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_at_ns", sa.BigInteger, nullable=False),
    sa.Column("queued_ms", sa.BigInteger, nullable=False),
    sa.Column("ttft_ms", sa.BigInteger),
    sa.Column("replica", sa.String(200)),
    sa.Index("ix_usage_events_account_id_started_at_ns_id", "account_id", "started_at_ns", "id"),
)
