"""The tables of files, batches and their lines. Times are Unix nanoseconds.

Account and key ids are plain values, as in billing: nothing here refers to another package's tables. Contents are here
and not in the data folder, because a batch may be made at one gateway and run by another (decision 0075).
"""

import sqlalchemy as sa

metadata = sa.MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("purpose", sa.String(20), nullable=False),
    sa.Column("filename", sa.String(255), nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),  # false while its parts arrive
    sa.Column("batch_id", sa.String(40)),  # of answers: a file is then a view of the batch's lines
    sa.Column("good", sa.Boolean),  # of answers: those that succeeded, or the others
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
    sa.Index("ix_files_account_id_created_at_ns_id", "account_id", "created_at_ns", "id"),
    sa.Index("ix_files_expires_at_ns", "expires_at_ns"),
)

file_parts = sa.Table(
    "file_parts",
    metadata,
    sa.Column("file_id", sa.String(40), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("key_id", sa.String(32), nullable=False),
    sa.Column("form", sa.String(20), nullable=False),
    sa.Column("endpoint", sa.String(50), nullable=False),
    sa.Column("model", sa.String(200), nullable=False),
    sa.Column("input_file_id", sa.String(40)),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("completion_window", sa.String(10), nullable=False),
    sa.Column("created_at_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
    sa.Column("answers_kept_s", sa.Integer, nullable=False),
    sa.Column("in_progress_at_ns", sa.BigInteger),
    sa.Column("finalizing_at_ns", sa.BigInteger),
    sa.Column("completed_at_ns", sa.BigInteger),
    sa.Column("failed_at_ns", sa.BigInteger),
    sa.Column("expired_at_ns", sa.BigInteger),
    sa.Column("cancelling_at_ns", sa.BigInteger),
    sa.Column("cancelled_at_ns", sa.BigInteger),
    sa.Column("kept_until_ns", sa.BigInteger),
    sa.Column("output_file_id", sa.String(40)),
    sa.Column("error_file_id", sa.String(40)),
    sa.Column("webhook", sa.String(32)),
    sa.Column("errors", sa.JSON, nullable=False),
    sa.Column("metadata", sa.JSON),
    sa.Column("lines", sa.Integer, nullable=False),
    sa.Column("succeeded", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.String(64)),
    sa.Column("lease_until_ns", sa.BigInteger, nullable=False),
    sa.Column("stored_bytes", sa.BigInteger, nullable=False, server_default="0"),  # of its lines, asked and said
    sa.Index("ix_batches_account_id_created_at_ns_id", "account_id", "created_at_ns", "id"),
    sa.Index("ix_batches_state", "state"),
    # Before each line begins both are summed over all batches of the account, however many background runs those are.
    sa.Index("ix_batches_account_id_lines_stored_bytes", "account_id", "lines", "stored_bytes"),
    sa.Index("ix_batches_kept_until_ns", "kept_until_ns"),
)

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    sa.Column("batch_id", sa.String(40), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("account_id", sa.String(32), nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("body", sa.LargeBinary),  # gone once the line has ended
    sa.Column("request_id", sa.String(36), nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("not_before_ns", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    sa.Column("owner", sa.String(64)),  # the process that began it last
    sa.Column("answer", sa.LargeBinary),
    sa.Index("ix_batch_lines_batch_id_state_number", "batch_id", "state", "number"),
    sa.Index(
        "ix_batch_lines_running",
        "owner",
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    ),
)
