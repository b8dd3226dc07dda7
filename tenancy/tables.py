"""The tables of accounts, projects, keys, quotas, users and the audit log. Read by the stores and the migrations' test.

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
    sa.Column("tier", sa.Integer, nullable=False, server_default="0"),
    sa.Column("weight_percent", sa.Integer, nullable=False, server_default="100"),
    sa.Column("regions", sa.Text),  # names, one space between; null: anywhere
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
    sa.Column("project_id", sa.String(32)),  # null: the account's default project
    sa.Column("service_account_id", sa.String(32)),
)

# An account's default project has no row: it is always there, and its id is the account's.
projects = sa.Table(
    "projects",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("archived_at_ns", sa.BigInteger),
    sa.UniqueConstraint("account_id", "name"),
)

# What may be used at most: by an account (its project is empty then), and by each of its projects. No row: any model.
model_lists = sa.Table(
    "model_lists",
    metadata,
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), primary_key=True),
    sa.Column("project_id", sa.String(32), primary_key=True),
    sa.Column("models", sa.Text, nullable=False),  # ids, one space between
)

service_accounts = sa.Table(
    "service_accounts",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), nullable=False),
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.UniqueConstraint("account_id", "name"),
)

# Switched off for everybody by an operator.
disabled_models = sa.Table(
    "disabled_models",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("disabled_at_ns", sa.BigInteger, nullable=False),
)

quotas = sa.Table(
    "quotas",
    metadata,
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), primary_key=True),
    sa.Column("key_id", sa.String(32), primary_key=True),  # a lineage; empty: all keys together
    sa.Column("model", sa.String(200), primary_key=True),  # empty: all models together
    sa.Column("meter", sa.String(32), primary_key=True),
    sa.Column("project_id", sa.String(32), primary_key=True, server_default=sa.text("''")),  # empty: all together
    sa.Column("limit_amount", sa.BigInteger, nullable=False),
    sa.Column("set_by", sa.String(16), primary_key=True, server_default="account"),  # operator or account
)

users = sa.Table(
    "users",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("email", sa.String(254), nullable=False, unique=True),  # lower case
    sa.Column("name", sa.String(100), nullable=False),
    sa.Column("operator", sa.Boolean, nullable=False),
    sa.Column("disabled", sa.Boolean, nullable=False),
    sa.Column("password_hash", sa.String(200)),  # argon2id; null: only a one-time link lets in
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
)

memberships = sa.Table(
    "memberships",
    metadata,
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), primary_key=True),
    sa.Column("user_id", sa.String(32), sa.ForeignKey("users.id"), primary_key=True, index=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
)

# The token is 256 random bits and only its SHA-256 is kept: a copy of the table lets nobody in.
user_sessions = sa.Table(
    "user_sessions",
    metadata,
    sa.Column("token_hash", sa.String(64), primary_key=True),
    sa.Column("user_id", sa.String(32), sa.ForeignKey("users.id"), nullable=False, index=True),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("seen_at_ns", sa.BigInteger, nullable=False),
)

# A link that works once: it signs a user in, or makes whoever follows it a member of an account.
one_time_links = sa.Table(
    "one_time_links",
    metadata,
    sa.Column("token_hash", sa.String(64), primary_key=True),
    sa.Column("user_id", sa.String(32), sa.ForeignKey("users.id")),
    sa.Column("account_id", sa.String(32), sa.ForeignKey("accounts.id"), index=True),
    sa.Column("email", sa.String(254)),
    sa.Column("role", sa.String(16)),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False, index=True),
)

sign_in_failures = sa.Table(
    "sign_in_failures",
    metadata,
    sa.Column("subject_hash", sa.String(64), primary_key=True),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("since_ns", sa.BigInteger, nullable=False, index=True),
)

audit_log = sa.Table(
    "audit_log",
    metadata,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("account_id", sa.String(32)),  # null: about the service as a whole
    sa.Column("actor_kind", sa.String(16), nullable=False),
    sa.Column("actor_id", sa.String(32), nullable=False),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("subject", sa.String(254), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),  # JSON
    sa.Column("previous_hash", sa.String(64), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Index("ix_audit_log_account_id_number", "account_id", "number"),
)
