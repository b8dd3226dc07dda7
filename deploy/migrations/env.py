"""Alembic's environment: one history over the tables of tenancy, billing and the gateway.

Run by tenancy/migrations.py, which passes the connection, and by the `alembic` command for new revisions.
"""

from alembic import context

from billing.tables import metadata as billing_metadata
from gateway.batches.tables import metadata as batches_metadata
from gateway.conversations import metadata as conversations_metadata
from gateway.lifecycle.tables import metadata as lifecycle_metadata
from gateway.rollouts.tables import metadata as rollouts_metadata
from tenancy.tables import metadata as tenancy_metadata

# The transaction is the caller's: it locks out other processes, and a failed step leaves nothing behind.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=[
        tenancy_metadata,
        billing_metadata,
        batches_metadata,
        conversations_metadata,
        lifecycle_metadata,
        rollouts_metadata,
    ],
    render_as_batch=True,  # SQLite changes a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
