"""What a unit does: everything, or, as half of a group, one of both phases; so each side wakes, sleeps and grows apart.

Used by waking.py, resting.py and scaling.py. Pure.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from gateway.lifecycle.states import Record


class Side(StrEnum):
    """What a replica does: everything, or one phase."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


def by_side(records: Iterable[Record], sides: Mapping[str, Side]) -> dict[Side, list[Record]]:
    """sides: by unit; those that are not in it do everything."""
    found: dict[Side, list[Record]] = {}
    for record in records:
        found.setdefault(sides.get(record.unit.name, Side.UNIFIED), []).append(record)
    return found
