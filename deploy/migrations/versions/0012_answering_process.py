"""Which process answers a request with an Idempotency-Key: one that starts ends what it ran before, and nobody else's.

Revision: 0012, after 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("idempotency_records", sa.Column("process", sa.String(64), nullable=False, server_default="-"))


def downgrade() -> None:
    op.drop_column("idempotency_records", "process")
