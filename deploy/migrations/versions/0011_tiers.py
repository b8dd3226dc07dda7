"""Prices by the request and by the length of the prompt; the tier at which a request was served.

Revision: 0011, after 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OPEN = sa.text("effective_to_ns IS NULL")


def upgrade() -> None:
    for name in ("prompt_tokens_from", "request_nano", "request_neurons_micro"):
        op.add_column("prices", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    _index(["book", "model", "tier", "prompt_tokens_from"])
    op.add_column("usage_events", sa.Column("tier", sa.String(16), nullable=False, server_default="standard"))


def downgrade() -> None:
    op.drop_column("usage_events", "tier")
    _index(["book", "model", "tier"])
    for name in ("request_neurons_micro", "request_nano", "prompt_tokens_from"):
        op.drop_column("prices", name)


def _index(columns: list[str]) -> None:
    op.drop_index("ux_prices_open", "prices")
    op.create_index("ux_prices_open", "prices", columns, unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN)
