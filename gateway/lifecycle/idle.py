"""Which units of a model may go to sleep now, and which have to wake by the deployment file's own word. Pure.

resting.py asks at every turn. A unit sleeps when nothing has run there for the model's idle time; as many stay awake as
the file asks for at this time of the week. While a request waits, or another unit is on its way up, all stay as they
are: whoever is idle now may be needed before that one serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from backends.serverless import Serverless
from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish, Wished

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Use:
    """One unit. busy: a request runs or waits there. used_at_ns: when one last did, as far as is known; 0: never."""

    record: Record
    busy: bool = False
    used_at_ns: int = 0

    @property
    def unit(self) -> Unit:
        return self.record.unit

    @property
    def idle_since_ns(self) -> int:
        """It is not idle for longer than it could have been used, nor than it has been wished awake."""
        return max(self.used_at_ns, self.record.since_ns, self.record.wish_since_ns)


def wishes(serverless: Serverless, uses: Sequence[Use], now_ns: int, *, waiting: bool) -> list[tuple[Unit, Wished]]:
    """What to wish of a model's units now; mostly nothing.

    waiting: does any request wait for the model, wherever it may run?
    """
    now = datetime.fromtimestamp(now_ns / _SECOND_NS, UTC)
    least = serverless.replicas_min_at(now)
    awake = [use for use in uses if _is_awake(use.record)]
    if len(awake) < least:
        by = By.SCHEDULE if least > serverless.replicas_min else By.DEPLOYMENT
        woken = sorted(filter(_may_wake, uses), key=_soonest_first)[: least - len(awake)]
        return [(use.unit, Wished(Wish.AWAKE, by)) for use in woken]
    if waiting or any(use.record.state is not State.READY for use in awake):
        return []
    slept = _who_sleeps(serverless, awake, now_ns)[: len(awake) - least]
    return [(use.unit, Wished(Wish.ASLEEP, By.IDLE, Depth(serverless.depth))) for use in slept]


def wishes_of_sides(
    serverless: Serverless, sides: Sequence[Sequence[Use]], now_ns: int, *, waiting: bool
) -> list[tuple[Unit, Wished]]:
    """As `wishes` of each side. The last unit of one sleeps only when those of the others do: half a model serves
    nobody, and while one side works the other is needed again soon.
    """
    apart = [wishes(serverless, uses, now_ns, waiting=waiting) for uses in sides]
    left = [
        sum(_is_awake(use.record) for use in uses) - sum(wished.wish is Wish.ASLEEP for _, wished in found)
        for uses, found in zip(sides, apart, strict=True)
    ]
    if any(left):
        for found, stay in zip(apart, left, strict=True):
            if not stay and found and found[-1][1].wish is Wish.ASLEEP:
                found.pop()
    return [one for found in apart for one in found]


def _who_sleeps(serverless: Serverless, awake: Sequence[Use], now_ns: int) -> list[Use]:
    """Who was idle for longest goes first. More than the file allows are not waited for, once they are idle at all."""
    idle_ns = round(serverless.idle_seconds * _SECOND_NS)
    free = sorted((use for use in awake if not use.busy), key=lambda use: (use.idle_since_ns, use.unit))
    over = max(0, len(awake) - (serverless.replicas_max or len(awake)))
    idle = [use for use in free if now_ns - use.idle_since_ns >= idle_ns]
    if len(idle) < len(awake):
        # How many a model in use needs is the scaler's to say.
        idle = [use for use in idle if use.record.wish_by is not By.SCALER]
    return [use for position, use in enumerate(free) if position < over or use in idle]


def _is_awake(record: Record) -> bool:
    """It serves, or will. One that rests after too many failures does neither."""
    return record.wish is Wish.AWAKE and record.state is not State.FAILED


def _may_wake(use: Use) -> bool:
    record = use.record
    ordered = record.wish is Wish.HELD or record.wish_by is By.OPERATOR
    return record.wish is not Wish.AWAKE and not ordered and record.state is not State.FAILED


def _soonest_first(use: Use) -> tuple[bool, int, int, Unit]:
    """Whoever only has to take its memory back; then whoever may start first; then whoever was used last."""
    record = use.record
    return record.depth is not Depth.RELEASED, record.retry_at_ns, -use.used_at_ns, record.unit
