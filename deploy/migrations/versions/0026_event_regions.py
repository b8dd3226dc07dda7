"""The region of the engine that served a request. Null: of before, or of no engine.

Revision: 0026, after 0025
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("region", sa.String(64)))


def downgrade() -> None:
    op.drop_column("usage_events", "region")
