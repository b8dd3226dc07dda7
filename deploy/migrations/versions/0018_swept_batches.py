"""The sweep of batches asks which are due: by an index.

Revision: 0018, after 0017
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_batches_kept_until_ns", "batches", ["kept_until_ns"])


def downgrade() -> None:
    op.drop_index("ix_batches_kept_until_ns", "batches")
