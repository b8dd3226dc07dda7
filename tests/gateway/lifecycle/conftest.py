"""The databases of the store's tests."""

from tests.tenancy.conftest import clock, database, database_url, migrated_file

__all__ = ["clock", "database", "database_url", "migrated_file"]
