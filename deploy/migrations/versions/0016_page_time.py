"""KV page time, deployment and precisions of requests, times to the first token in buckets, and the log of one key.

Requests that exist keep no page time; their times to the first token are put into the buckets.

Revision: 0016, after 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_HOUR_NS = 3_600 * 1_000_000_000
_GRAINS_NS = {"hour": _HOUR_NS, "day": 24 * _HOUR_NS}
# The buckets of billing/latency.py as they are now: milliseconds that a bucket ends at, itself included.
_BOUNDS_MS = (
    *(5, 10, 20, 30, 40, 50, 65, 80, 100, 125, 150, 200, 250, 300, 400, 500, 650, 800, 1_000, 1_250, 1_500, 2_000),
    *(2_500, 3_000, 4_000, 5_000, 6_500, 8_000, 10_000, 12_500, 15_000, 20_000, 30_000, 60_000, 120_000),
)
_KEY_INDEX = "ix_usage_events_account_id_key_id_started_at_ns_id"


def upgrade() -> None:
    for table in ("usage_events", "usage_rollups", "attributed_usage"):
        op.add_column(table, sa.Column("kv_page_ms", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("usage_events", sa.Column("deployment", sa.String(16), nullable=True))
    op.add_column("usage_events", sa.Column("precisions", sa.String(200), nullable=True))
    op.create_index(_KEY_INDEX, "usage_events", ["account_id", "key_id", "started_at_ns", "id"])
    op.create_table(
        "usage_first_tokens",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("grain", sa.String(8), nullable=False),
        sa.Column("period_start_ns", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("bucket", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            *("account_id", "grain", "period_start_ns", "model", "bucket"), name=op.f("pk_usage_first_tokens")
        ),
    )
    bounds = " ".join(f"WHEN ttft_ms <= {bound} THEN {number}" for number, bound in enumerate(_BOUNDS_MS))
    for grain, length_ns in _GRAINS_NS.items():
        op.execute(
            "INSERT INTO usage_first_tokens (account_id, grain, period_start_ns, model, bucket, requests) "
            f"SELECT account_id, '{grain}', started_at_ns / {length_ns} * {length_ns}, model, "  # noqa: S608 - constants
            f"CASE {bounds} ELSE {len(_BOUNDS_MS)} END, COUNT(*) FROM usage_events WHERE ttft_ms IS NOT NULL "
            "GROUP BY 1, 2, 3, 4, 5"
        )


def downgrade() -> None:
    op.drop_table("usage_first_tokens")
    op.drop_index(_KEY_INDEX, "usage_events")
    for name in ("precisions", "deployment"):
        op.drop_column("usage_events", name)
    for table in ("attributed_usage", "usage_rollups", "usage_events"):
        op.drop_column(table, "kv_page_ms")
