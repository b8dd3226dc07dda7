"""Where an account's prompts may go. Null: anywhere.

Revision: 0020, after 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("accounts", sa.Column("regions", sa.Text))


def downgrade() -> None:
    op.drop_column("accounts", "regions")
