"""The table of units: one row each, with its state, its owner and what is wished of it. Times are Unix nanoseconds.

Beside it what is known of each: its latest starts, by the depth of the sleep that they ended, its last use, who deploys
it.
"""

import sqlalchemy as sa

metadata = sa.MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

units = sa.Table(
    "units",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("place", sa.String(64), primary_key=True),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("since_ns", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.String(64)),
    sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("wish", sa.String(20), nullable=False),
    sa.Column("wish_by", sa.String(20), nullable=False),
    sa.Column("wish_since_ns", sa.BigInteger, nullable=False),
    sa.Column("wish_depth", sa.String(20), nullable=False),
    sa.Column("depth", sa.String(20), nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("retry_at_ns", sa.BigInteger, nullable=False),
    sa.Column("why", sa.Text, nullable=False),
)

unit_starts = sa.Table(
    "unit_starts",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("place", sa.String(64), primary_key=True),
    sa.Column("depth", sa.String(20), primary_key=True),
    sa.Column("samples", sa.JSON, nullable=False),
)

unit_uses = sa.Table(
    "unit_uses",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("place", sa.String(64), primary_key=True),
    sa.Column("used_at_ns", sa.BigInteger, nullable=False),
)

# Which keepers have a unit in their deployment that several gateways share, and by which driver.
unit_deployers = sa.Table(
    "unit_deployers",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("driver", sa.String(64), primary_key=True),
    sa.Column("keeper", sa.String(64), primary_key=True),
    sa.Column("until_ns", sa.BigInteger, nullable=False),
)

# What each process sees of the demand for a model, written anew every few seconds.
demand = sa.Table(
    "demand",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("process", sa.String(64), primary_key=True),
    sa.Column("at_ns", sa.BigInteger, nullable=False),
    sa.Column("figures", sa.Text, nullable=False),
)
