"""Prices by a month's volume, and what they adjusted. There is none.

Revision: 0023, after 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "volume_prices",
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("book", sa.String(50), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("tier", sa.String(50), nullable=False),
        sa.Column("prompt_tokens_from", sa.BigInteger, nullable=False),
        sa.Column("token_class", sa.String(16), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("bands", sa.Text, nullable=False),
        sa.Column("from_month", sa.String(7), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_volume_prices")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "volume_adjustments",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("usage_month", sa.String(7), nullable=False),
        sa.Column("volume_version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("amount_nano", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "account_id", "month", "usage_month", "volume_version", name=op.f("pk_volume_adjustments")
        ),
    )


def downgrade() -> None:
    op.drop_table("volume_adjustments")
    op.drop_table("volume_prices")
