"""Instants as text, for what leaves the service. Pure."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def instant_text(at_ns: int) -> str:
    """ISO 8601, UTC, of Unix nanoseconds; to the microsecond where there is a fraction of a second."""
    return (_EPOCH + timedelta(microseconds=at_ns // 1_000)).isoformat().replace("+00:00", "Z")
