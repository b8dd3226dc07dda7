"""Files, batches and their lines.

Revision: 0009, after 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("purpose", sa.String(20), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("batch_id", sa.String(40), nullable=True),
        sa.Column("good", sa.Boolean, nullable=True),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
    )
    op.create_index("ix_files_account_id_created_at_ns_id", "files", ["account_id", "created_at_ns", "id"])
    op.create_index("ix_files_expires_at_ns", "files", ["expires_at_ns"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_file_parts")),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("form", sa.String(20), nullable=False),
        sa.Column("endpoint", sa.String(50), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=True),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("completion_window", sa.String(10), nullable=False),
        sa.Column("created_at_ns", sa.BigInteger, nullable=False),
        sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
        sa.Column("answers_kept_s", sa.Integer, nullable=False),
        sa.Column("in_progress_at_ns", sa.BigInteger, nullable=True),
        sa.Column("finalizing_at_ns", sa.BigInteger, nullable=True),
        sa.Column("completed_at_ns", sa.BigInteger, nullable=True),
        sa.Column("failed_at_ns", sa.BigInteger, nullable=True),
        sa.Column("expired_at_ns", sa.BigInteger, nullable=True),
        sa.Column("cancelling_at_ns", sa.BigInteger, nullable=True),
        sa.Column("cancelled_at_ns", sa.BigInteger, nullable=True),
        sa.Column("kept_until_ns", sa.BigInteger, nullable=True),
        sa.Column("output_file_id", sa.String(40), nullable=True),
        sa.Column("error_file_id", sa.String(40), nullable=True),
        sa.Column("webhook", sa.String(32), nullable=True),
        sa.Column("errors", sa.JSON, nullable=False),
        sa.Column("metadata", sa.JSON, nullable=True),
        sa.Column("lines", sa.Integer, nullable=False),
        sa.Column("succeeded", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.String(64), nullable=True),
        sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index("ix_batches_account_id_created_at_ns_id", "batches", ["account_id", "created_at_ns", "id"])
    op.create_index("ix_batches_state", "batches", ["state"])
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("account_id", sa.String(32), nullable=False),
        sa.Column("custom_id", sa.Text, nullable=True),
        sa.Column("body", sa.LargeBinary, nullable=True),
        sa.Column("request_id", sa.String(36), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("not_before_ns", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("owner", sa.String(64), nullable=True),
        sa.Column("answer", sa.LargeBinary, nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_lines")),
    )
    op.create_index("ix_batch_lines_batch_id_state_number", "batch_lines", ["batch_id", "state", "number"])
    running = sa.text("state = 'running'")
    op.create_index("ix_batch_lines_running", "batch_lines", ["owner"], sqlite_where=running, postgresql_where=running)


def downgrade() -> None:
    op.drop_table("batch_lines")
    op.drop_table("batches")
    op.drop_table("file_parts")
    op.drop_table("files")
