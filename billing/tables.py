"""The tables of prices, usage and the ledger.

Amounts are BIGINT integers (nano-USD, micro-neurons), times Unix nanoseconds.

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
    # For prompts of at least so many tokens; of several rows, the one that asks for the most.
    sa.Column("prompt_tokens_from", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("request_nano", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("request_neurons_micro", sa.BigInteger, nullable=False, server_default="0"),
    sqlite_autoincrement=True,  # a version is never used twice, whatever happens to its row
)
# At most one row without an end: two writers at once can't both add the price that is in force from now on.
sa.Index(
    "ux_prices_open",
    prices.c.book,
    prices.c.model,
    prices.c.tier,
    prices.c.prompt_tokens_from,
    unique=True,
    sqlite_where=prices.c.effective_to_ns.is_(None),
    postgresql_where=prices.c.effective_to_ns.is_(None),
)

# A schedule of bands for a month's tokens of one class at one place of the price book: volume_prices.py.
volume_prices = sa.Table(
    "volume_prices",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("book", sa.String(50), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("tier", sa.String(50), nullable=False),
    sa.Column("prompt_tokens_from", sa.BigInteger, nullable=False),
    sa.Column("token_class", sa.String(16), nullable=False),
    sa.Column("mode", sa.String(16), nullable=False),  # graduated, volume or none
    sa.Column("bands", sa.Text, nullable=False),  # JSON: [[tokens from, nano-USD per million], ...]
    sa.Column("from_month", sa.String(7), nullable=False),
    sqlite_autoincrement=True,  # as a price's
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
    sa.Column("tier", sa.String(16), nullable=False, server_default="standard"),  # as served: its price row's
    sa.Column("end_user", sa.String(256)),
    sa.Column("tags", sa.Text),  # a JSON object of texts
    sa.Column("kv_page_ms", sa.BigInteger, nullable=False, server_default="0"),  # KV pages × the time they were in use
    sa.Column("deployment", sa.String(16)),  # the revision of its model's deployment
    sa.Column("precisions", sa.String(200)),  # as it was served: weights=bf16,kv_cache=fp8
    sa.Column("region", sa.String(64)),  # of the engine that served it
    sa.Index("ix_usage_events_account_id_started_at_ns_id", "account_id", "started_at_ns", "id"),
    # The log of one key, also of one that is seldom used.
    sa.Index("ix_usage_events_account_id_key_id_started_at_ns_id", "account_id", "key_id", "started_at_ns", "id"),
)

# Sums of usage events, kept in the transaction that posts them. A dimension that a view sums over is "".
usage_rollups = sa.Table(
    "usage_rollups",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("view", sa.String(8), primary_key=True),  # which dimensions are told apart: billing/rollups.py
    sa.Column("grain", sa.String(8), primary_key=True),  # hour or day
    sa.Column("period_start_ns", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("endpoint", sa.String(50), primary_key=True),
    sa.Column("outcome", sa.String(32), primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
    sa.Column("cost_nano", sa.BigInteger, nullable=False),
    sa.Column("neurons_micro", sa.BigInteger, nullable=False),
    sa.Column("kv_page_ms", sa.BigInteger, nullable=False, server_default="0"),
)

# How many answers began within which time: a histogram of fixed buckets (latency.py), by model.
usage_first_tokens = sa.Table(
    "usage_first_tokens",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("grain", sa.String(8), primary_key=True),  # hour or day
    sa.Column("period_start_ns", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("bucket", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
)

# Sums of usage events by day and what they are attributed to. kind: tag, tagged or end_user (attributed_usage.py).
attributed_usage = sa.Table(
    "attributed_usage",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("kind", sa.String(8), primary_key=True),
    sa.Column("name", sa.String(400), primary_key=True),
    sa.Column("period_start_ns", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("key_id", sa.String(32), primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
    sa.Column("cost_nano", sa.BigInteger, nullable=False),
    sa.Column("neurons_micro", sa.BigInteger, nullable=False),
    sa.Column("kv_page_ms", sa.BigInteger, nullable=False, server_default="0"),
    sa.Index("ix_attributed_usage_account_id_kind_period_start_ns", "account_id", "kind", "period_start_ns"),
)

# How an account pays. An account without a row is postpaid. revision: raised by every deed on the account's money, so
# that a process which remembers a balance knows when to read it again.
billing_accounts = sa.Table(
    "billing_accounts",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("mode", sa.String(16), nullable=False),  # postpaid or prepaid
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("invoice_to", sa.Text),  # the name and address on invoices, some lines
    sa.Column("hold_mode", sa.String(16), nullable=False, server_default="refuse"),  # refuse or clamp
)

ledger_accounts = sa.Table(
    "ledger_accounts",
    metadata,
    sa.Column("id", sa.String(80), primary_key=True),  # its kind, or kind:owner
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("account_id", sa.String(32)),  # null for the service's own
    sa.Column("posted_nano", sa.BigInteger, nullable=False),
)

ledger_transactions = sa.Table(
    "ledger_transactions",
    metadata,
    # The fact that it books, such as usage:REQUEST_ID: one fact is booked once.
    sa.Column("source", sa.String(200), primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("reverses", sa.String(200), unique=True),  # the source of the transaction that this one takes back
    sa.Column("memo", sa.String(200)),
    sa.Column("occurred_at_ns", sa.BigInteger, nullable=False),
    sa.Column("posted_at_ns", sa.BigInteger, nullable=False),
    # The accounting month, such as 2026-11; "-" until periods.py finds it, of a process of the version before.
    sa.Column("month", sa.String(7), nullable=False, server_default="-"),
    sa.ForeignKeyConstraint(["reverses"], ["ledger_transactions.source"], name="fk_ledger_transactions_reverses"),
    sa.Index("ix_ledger_transactions_account_id_posted_at_ns_source", "account_id", "posted_at_ns", "source"),
    sa.Index("ix_ledger_transactions_account_id_month_source", "account_id", "month", "source"),
)

# A closed month of an account: nothing more is ever booked in it. digest: of all that is, once it is sealed.
ledger_periods = sa.Table(
    "ledger_periods",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("month", sa.String(7), primary_key=True),
    sa.Column("closed_at_ns", sa.BigInteger, nullable=False),
    sa.Column("transactions", sa.BigInteger),
    sa.Column("digest", sa.String(64)),
)

ledger_entries = sa.Table(
    "ledger_entries",
    metadata,
    sa.Column("source", sa.String(200), primary_key=True),
    sa.Column("ledger_account_id", sa.String(80), primary_key=True),
    sa.Column("amount_nano", sa.BigInteger, nullable=False),
    sa.ForeignKeyConstraint(["source"], ["ledger_transactions.source"], name="fk_ledger_entries_source"),
    sa.ForeignKeyConstraint(["ledger_account_id"], ["ledger_accounts.id"], name="fk_ledger_entries_ledger_account_id"),
    sa.Index("ix_ledger_entries_ledger_account_id", "ledger_account_id"),
)

# What a month's volume made tokens cost more or less, booked when a month closed: of that month, or, as a correction,
# of an earlier one. tokens: the volume of the usage month as it was known then.
volume_adjustments = sa.Table(
    "volume_adjustments",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("month", sa.String(7), primary_key=True),
    sa.Column("usage_month", sa.String(7), primary_key=True),
    sa.Column("volume_version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("amount_nano", sa.BigInteger, nullable=False),
)

# Written once, when a month closes. seller, buyer and lines (JSON) are kept as they were then.
invoices = sa.Table(
    "invoices",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),  # without gaps
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("month", sa.String(7), nullable=False),
    sa.Column("issued_at_ns", sa.BigInteger, nullable=False),
    sa.Column("seller", sa.Text, nullable=False),
    sa.Column("buyer", sa.Text, nullable=False),
    sa.Column("lines", sa.Text, nullable=False),
    sa.Column("total_nano", sa.BigInteger, nullable=False),
    sa.Column("paid_nano", sa.BigInteger, nullable=False),
    sa.Column("rounding_nano", sa.BigInteger, nullable=False),
    sa.Column("due_cents", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("account_id", "month"),
)

# Money given under conditions. What is left of it is its ledger account's balance.
credit_grants = sa.Table(
    "credit_grants",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), nullable=False, index=True),
    sa.Column("source", sa.String(200), nullable=False, unique=True),
    sa.Column("amount_nano", sa.BigInteger, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),  # the lowest is used first
    sa.Column("expires_at_ns", sa.BigInteger),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
)

# Money set aside for one process: of an account ("account") or of a budget's period. A lease: credit/allowances.py.
allowances = sa.Table(
    "allowances",
    metadata,
    sa.Column("process", sa.String(64), primary_key=True),
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("pot", sa.String(64), primary_key=True),
    sa.Column("budget_id", sa.String(32)),
    sa.Column("from_ns", sa.BigInteger, nullable=False),
    sa.Column("amount_nano", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
    sa.Index("ix_allowances_account_id", "account_id"),
)

# A rule, with null for "any". What is spent in a period is what the rollups say: there is nothing to reset.
budgets = sa.Table(
    "budgets",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), nullable=False, index=True),
    sa.Column("key_id", sa.String(32)),  # a lineage
    sa.Column("model", sa.String(200)),
    sa.Column("period", sa.String(8), nullable=False),  # day, month or total
    sa.Column("limit_nano", sa.BigInteger, nullable=False),
    sa.Column("hard", sa.Boolean, nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("removed_at_ns", sa.BigInteger),
    sa.Column("project_id", sa.String(32)),
    sa.Column("end_user", sa.String(256)),
    sa.Column("set_by", sa.String(16), nullable=False, server_default="account"),  # operator or account
)

# What was told of a budget in a period: each threshold once.
budget_alerts = sa.Table(
    "budget_alerts",
    metadata,
    sa.Column("budget_id", sa.String(32), primary_key=True),
    sa.Column("period_start_ns", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("threshold", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("spent_nano", sa.BigInteger, nullable=False),
    sa.Column("told_at_ns", sa.BigInteger, nullable=False),
)

webhook_endpoints = sa.Table(
    "webhook_endpoints",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), nullable=False, index=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("secret", sa.String(100), nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("removed_at_ns", sa.BigInteger),
)

# Messages to endpoints, sent in order of position. id: of the fact, so that it is told once.
webhook_messages = sa.Table(
    "webhook_messages",
    metadata,
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("endpoint_id", sa.String(32), nullable=False),
    sa.Column("id", sa.String(200), nullable=False),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_attempt_at_ns", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # waiting, sent or given_up
    sa.Column("ended_at_ns", sa.BigInteger),
    sa.UniqueConstraint("endpoint_id", "id"),
    sa.ForeignKeyConstraint(["endpoint_id"], ["webhook_endpoints.id"], name="fk_webhook_messages_endpoint_id"),
    sa.Index("ix_webhook_messages_state_endpoint_id_position", "state", "endpoint_id", "position"),
    sqlite_autoincrement=True,
)

# Answers kept for a repeated Idempotency-Key; only an answered one has status, headers and body.
idempotency_records = sa.Table(
    "idempotency_records",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("key_hash", sa.String(64), primary_key=True),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("request_id", sa.String(36), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # running, answered or ended
    sa.Column("status", sa.Integer),
    sa.Column("headers", sa.Text),
    sa.Column("body", sa.LargeBinary),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("process", sa.String(64), nullable=False, server_default="-"),  # who runs it
)
