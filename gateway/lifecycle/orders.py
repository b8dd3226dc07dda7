"""What an operator orders of units: to wake, to sleep, to sleep until told otherwise. Each is in the audit log.

Asked by the command line and the console. A wish is heard within half a second by whoever owns the unit.
"""

from enum import StrEnum

from gateway.errors import ReplicaNotFound
from gateway.lifecycle.states import By, Depth, Record, Wish, Wished
from gateway.lifecycle.store import UnitStore
from tenancy.audit_log import Actor


class Order(StrEnum):
    """In an operator's words. sleep: until a request needs it. drain: until `wake`."""

    WAKE = "wake"
    SLEEP = "sleep"
    DRAIN = "drain"


_WISHES = {Order.WAKE: Wish.AWAKE, Order.SLEEP: Wish.ASLEEP, Order.DRAIN: Wish.HELD}


def give_order(
    store: UnitStore, order: Order, model: str, name: str | None, *, by: Actor, depth: Depth = Depth.STOPPED
) -> list[Record]:
    """To one unit of the model, or to all; at every place where there are such. How they stand then.

    Raises ReplicaNotFound.
    """
    units = [record.unit for record in store.all() if record.unit.model == model and name in {None, record.unit.name}]
    wished = Wished(_WISHES[order], By.OPERATOR, depth)
    found = [store.wish(unit, wished, ordered_by=by) for unit in units]
    known = [record for record in found if record is not None]
    if not known:
        raise ReplicaNotFound(name or model)
    return known
