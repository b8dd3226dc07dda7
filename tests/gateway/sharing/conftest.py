"""A real Valkey for the boards."""

from tests.stores import valkey

__all__ = ["valkey"]
