"""What becomes of requests that cost more than there is: refused, as ever.

Revision: 0024, after 0023
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("billing_accounts", sa.Column("hold_mode", sa.String(16), nullable=False, server_default="refuse"))


def downgrade() -> None:
    op.drop_column("billing_accounts", "hold_mode")
