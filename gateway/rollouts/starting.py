"""Does the new revision of a rollout start at all? Pure: how its units stand in, why it is given up out.

A comparison needs requests, and a revision whose engines never start gets none: without this it would be tried for
ever. How often a start is tried, and with what pauses, are the units' own limits (gateway/lifecycle/states.py): one
that has failed too often in a row is FAILED, and rests.
"""

from collections.abc import Collection

from gateway.lifecycle.states import Record, State, Wish


def never_started(
    units: Collection[Record], names: Collection[str], *, since_ns: int, now_ns: int, served: int
) -> str | None:
    """Why the revision is given up; None as long as any of it may still start.

    names: of its replicas and pairs. units: those of them that gateways start, at every place. since_ns: when the
    rollout began; what failed before, failed for another. served: requests that have ended at the revision.

    An engine that something else starts may come at any time, so that one of them alone keeps it in trial. Units whose
    owner is silent say nothing, and those that an operator holds asleep neither.
    """
    heard = [unit for unit in units if now_ns < unit.lease_until_ns]
    tried = [unit for unit in heard if unit.wish is not Wish.HELD]
    if not tried or {unit.unit.name for unit in heard} != set(names):
        return None
    if any(unit.state is not State.FAILED or unit.since_ns < since_ns for unit in tried):
        return None
    said = "it never started" if not served else "none of its engines starts any more"
    return f"{said}: {_reasons(tried)}"


def in_trouble(units: Collection[Record], *, now_ns: int) -> str | None:
    """What an operator is told of a revision in trial whose engines fail to start; None: none has failed."""
    failing = [
        unit for unit in units if now_ns < unit.lease_until_ns and unit.failures and unit.state is not State.READY
    ]
    return f"starts that failed: {_reasons(failing)}" if failing else None


def _reasons(units: Collection[Record]) -> str:
    """By unit, in order; the same words of several are said once."""
    by_why: dict[str, list[str]] = {}
    for unit in sorted(units, key=lambda unit: unit.unit):
        by_why.setdefault(f"({unit.failures} times): {unit.why}", []).append(unit.unit.name)
    return "; ".join(f"{', '.join(dict.fromkeys(names))} {why}" for why, names in by_why.items())
