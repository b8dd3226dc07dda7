"""`Deprecation` (RFC 9745) and `Sunset` (RFC 8594) on answers of models whose end is planned. persistence.py adds them.

Both say the same instant: a deployment file has one date, from which on the model is refused.
"""

from datetime import UTC, datetime
from email.utils import format_datetime

from gateway.catalogue import Catalogue


def retirement_headers(catalogue: Catalogue, model: str) -> dict[str, str]:
    card = catalogue.find(model)
    if card is None or card.retires_at_ns is None:
        return {}
    ends_at_s = card.retires_at_ns // 1_000_000_000
    ends = datetime.fromtimestamp(ends_at_s, UTC)
    return {"deprecation": f"@{ends_at_s}", "sunset": format_datetime(ends, usegmt=True)}
