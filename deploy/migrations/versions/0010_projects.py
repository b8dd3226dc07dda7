"""Projects of accounts, with limits and budgets; budgets of a key become its lineage's.

Keys that exist are in their account's default project, limits and budgets that exist are about all projects together.

Revision: 0010, after 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_QUOTA_KEY = ["account_id", "key_id", "model", "meter"]


def upgrade() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("archived_at_ns", sa.BigInteger, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.id"], name=op.f("fk_projects_account_id")),
        sa.UniqueConstraint("account_id", "name", name=op.f("uq_projects_account_id_name")),
    )
    op.add_column("api_keys", sa.Column("project_id", sa.String(32), nullable=True))
    op.add_column("budgets", sa.Column("project_id", sa.String(32), nullable=True))
    with op.batch_alter_table("quotas") as quotas:
        quotas.add_column(sa.Column("project_id", sa.String(32), nullable=False, server_default=sa.text("''")))
        quotas.drop_constraint(op.f("pk_quotas"), type_="primary")
        quotas.create_primary_key(op.f("pk_quotas"), [*_QUOTA_KEY, "project_id"])
    op.execute(
        "UPDATE budgets SET key_id = (SELECT lineage_id FROM api_keys WHERE api_keys.id = budgets.key_id) "
        "WHERE key_id IN (SELECT id FROM api_keys WHERE lineage_id IS NOT NULL)"
    )


def downgrade() -> None:
    # What is about a project can't be said any more. A limit would become one of the whole account.
    op.execute("DELETE FROM quotas WHERE project_id <> ''")
    op.execute("DELETE FROM budgets WHERE project_id IS NOT NULL")
    with op.batch_alter_table("quotas") as quotas:
        quotas.drop_constraint(op.f("pk_quotas"), type_="primary")
        quotas.create_primary_key(op.f("pk_quotas"), _QUOTA_KEY)
        quotas.drop_column("project_id")
    op.drop_column("budgets", "project_id")
    op.drop_column("api_keys", "project_id")
    op.drop_table("projects")
