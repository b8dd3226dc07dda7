"""What the lines of each batch take, so that an account's batches have a bound in bytes.

Revision: 0031, after 0030
"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

# Lengths are in the rows' own heads: what lines ask and say is not read.
_COUNT = sa.text(
    "UPDATE batches SET stored_bytes = (SELECT COALESCE(SUM(COALESCE(LENGTH(body), 0) + COALESCE(LENGTH(answer), 0)), 0)"
    " FROM batch_lines WHERE batch_lines.batch_id = batches.id)"
)


def upgrade() -> None:
    op.add_column("batches", sa.Column("stored_bytes", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(_COUNT)
    op.create_index("ix_batches_account_id_lines_stored_bytes", "batches", ["account_id", "lines", "stored_bytes"])


def downgrade() -> None:
    op.drop_index("ix_batches_account_id_lines_stored_bytes", "batches")
    op.drop_column("batches", "stored_bytes")
