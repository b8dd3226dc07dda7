"""What accounts and projects may use at most. Without a row: any model, as before.

Revision: 0027, after 0026
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "model_lists",
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("account_id", "project_id", name=op.f("pk_model_lists")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_model_lists_account_id")),
    )


def downgrade() -> None:
    op.drop_table("model_lists")
