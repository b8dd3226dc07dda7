"""The tables of rollouts: one row a model that has or had one, what was counted of its two revisions, and by whom."""

import sqlalchemy as sa

metadata = sa.MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("round", sa.Integer, nullable=False),  # each start is a new one, with counts of its own
    sa.Column("version", sa.Integer, nullable=False),  # goes up with each change
    sa.Column("new_revision", sa.String(64), nullable=False),
    sa.Column("old_revision", sa.String(64), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # running, promoted, rolled_back
    sa.Column("share_bp", sa.Integer, nullable=False),  # hundredths of a percent
    sa.Column("started_at_ns", sa.BigInteger, nullable=False),
    sa.Column("changed_at_ns", sa.BigInteger, nullable=False),
    sa.Column("why", sa.String(500), nullable=False),
    sa.Column("evaluation", sa.Float),  # a score that was measured elsewhere
    sa.Column("cause", sa.String(16)),  # of its end: operator, comparison, never_started; nothing of one that runs
)

rollout_counts = sa.Table(
    "rollout_counts",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("revision", sa.String(64), primary_key=True),
    sa.Column("measure", sa.String(16), primary_key=True),
    sa.Column("bucket", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
)

# The number of the latest counts that each process has added in this round, so that none are added twice.
rollout_tellings = sa.Table(
    "rollout_tellings",
    metadata,
    sa.Column("model", sa.String(200), primary_key=True),
    sa.Column("process", sa.String(64), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)
