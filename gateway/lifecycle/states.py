"""The states of a unit (a replica, or a pair as one), and what follows what. Pure.

    ASLEEP ──▶ WARMING ──▶ READY ──▶ DRAINING ──▶ ASLEEP
                  │          │
                  └──────────┴──▶ ASLEEP, to be tried again later, or FAILED, after too many failures in a row

Kept by store.py, carried out by keeper.py. What is *wished* of a unit (awake or asleep, by whom) is apart from its
state: anybody may wish, its owner alone moves it. Times are Unix nanoseconds.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, assert_never

_SECOND_NS: Final = 1_000_000_000
# What an operator reads of a failure: a few lines.
WHY_CHARS_MAX: Final = 500


class State(StrEnum):
    ASLEEP = "asleep"
    WARMING = "warming"  # started, and not ready yet
    READY = "ready"
    DRAINING = "draining"  # nothing new comes; what runs there ends
    FAILED = "failed"  # it failed to start too often: tried again seldom, or when an operator says so


class Wish(StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"  # until it is needed
    HELD = "held"  # asleep until an operator says otherwise


class By(StrEnum):
    """Who wishes."""

    DEPLOYMENT = "deployment"  # the file: a model that is always awake
    REQUEST = "request"  # one waits for it
    IDLE = "idle"  # nobody has used it for a while
    SCHEDULE = "schedule"
    SCALER = "scaler"
    PLACEMENT = "placement"  # another needs the machine
    OPERATOR = "operator"


class Depth(StrEnum):
    """How it sleeps."""

    STOPPED = "stopped"  # no process
    RELEASED = "released"  # a process without weights and KV pages in memory


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """model: its public id. name: of the replica or pair in the deployment file. place: whose processes these are: of a
    gateway that starts engines beside itself, its data folder's id; empty for engines that all gateways share.
    """

    model: str
    name: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One unit as it stands.

    since_ns: when it came into its state. version: grows with every change. owner: the process that moves it, while its
    lease lasts; fence: grows with every owner. depth: how it sleeps, if it does. wish_depth: how deep it is wished
    asleep. failures: starts in a row that failed. retry_at_ns: no start before. why: of the last failure, for an
    operator.
    """

    unit: Unit
    state: State = State.ASLEEP
    since_ns: int = 0
    version: int = 0
    owner: str | None = None
    lease_until_ns: int = 0
    fence: int = 0
    wish: Wish = Wish.ASLEEP
    wish_by: By = By.DEPLOYMENT
    wish_since_ns: int = 0
    wish_depth: Depth = Depth.STOPPED
    depth: Depth = Depth.STOPPED
    failures: int = 0
    retry_at_ns: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class StartLimits:
    """failures_max: so many in a row make it FAILED. Between two starts the pause is backoff_first_s, doubled with each
    failure up to backoff_most_s; rest_s once it is FAILED. ran_well_s: a death after so long is a first failure again.
    """

    failures_max: int = 5
    backoff_first_s: float = 0.5
    backoff_most_s: float = 30.0
    rest_s: float = 300.0
    ran_well_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Begun:
    """Its owner is about to start or resume it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """It can be used."""


@dataclass(frozen=True, slots=True)
class Failed:
    """It did not start, or died. jitter: a random number of [0, 1), so that many do not come again at once."""

    why: str
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Closed:
    """Nothing new comes to it."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """It is wanted again before it was stopped: it is asked anew whether it can be used."""


@dataclass(frozen=True, slots=True)
class Slept:
    """Nothing runs there any more, and it has been stopped, or its memory was released."""

    depth: Depth


@dataclass(frozen=True, slots=True)
class Vanished:
    """Its processes are gone with the owner that had them, or were stopped with it: no fault of its own."""


@dataclass(frozen=True, slots=True)
class Wished:
    """Somebody wishes it awake or asleep. depth: how deep, where it is to sleep."""

    wish: Wish
    by: By
    depth: Depth = Depth.STOPPED


Event = Begun | Answered | Failed | Closed | Reopened | Slept | Vanished | Wished

# In which states an event can happen. A wish is heard in all of them.
_HAPPENS_IN: Final[dict[type, frozenset[State]]] = {
    Begun: frozenset({State.ASLEEP, State.FAILED}),
    Answered: frozenset({State.WARMING}),
    Failed: frozenset({State.ASLEEP, State.WARMING, State.READY, State.DRAINING}),
    Closed: frozenset({State.WARMING, State.READY}),
    Reopened: frozenset({State.DRAINING}),
    Slept: frozenset({State.DRAINING}),
    Vanished: frozenset(State),
    Wished: frozenset(State),
}


class Deed(StrEnum):
    """What its owner has to do next."""

    NOTHING = "nothing"
    START = "start"
    RESUME = "resume"
    CLOSE = "close"
    REOPEN = "reopen"


def happens(record: Record, event: Event) -> bool:
    """Can it happen in this state?"""
    return record.state in _HAPPENS_IN[type(event)]


def advance(record: Record, event: Event, now_ns: int, limits: StartLimits) -> Record:
    """What follows. The version is the store's to raise; an event that can't happen in this state is a bug."""
    assert happens(record, event), f"{event} can't happen to a unit that is {record.state}"
    match event:
        case Begun():
            return _moved(record, State.WARMING, now_ns)
        case Answered():
            return replace(_moved(record, State.READY, now_ns), retry_at_ns=0, depth=Depth.STOPPED)
        case Failed():
            return _failed(record, event, now_ns, limits)
        case Closed():
            return _moved(record, State.DRAINING, now_ns)
        case Reopened():
            return _moved(record, State.WARMING, now_ns)
        case Slept():
            return replace(_moved(record, State.ASLEEP, now_ns), depth=event.depth, failures=0, retry_at_ns=0, why="")
        case Vanished():
            return _vanished(record, now_ns)
        case Wished():
            return _wished(record, event, now_ns)
        case _:
            assert_never(event)


def due(record: Record, now_ns: int) -> Deed:
    """What its owner has to do now, if it can: what is wished, no sooner than a failure allows."""
    awake = record.wish is Wish.AWAKE
    match record.state:
        case State.ASLEEP | State.FAILED:
            if not awake or now_ns < record.retry_at_ns:
                return Deed.NOTHING
            return Deed.RESUME if record.depth is Depth.RELEASED else Deed.START
        case State.WARMING | State.READY:
            return Deed.NOTHING if awake else Deed.CLOSE
        case State.DRAINING:
            return Deed.REOPEN if awake else Deed.NOTHING
        case _:
            assert_never(record.state)


class Found(StrEnum):
    """What a new owner finds of the last one's."""

    AS_WRITTEN = "as written"
    GONE = "gone"  # it does not run, although it is written to
    LEFT_OVER = "left over"  # it runs, although it is to sleep


def found(record: Record, *, runs: bool) -> Found:
    """record: as its new owner has read it."""
    asleep = record.state in {State.ASLEEP, State.FAILED}
    if not runs and (not asleep or record.depth is Depth.RELEASED):
        return Found.GONE
    if runs and asleep and record.depth is Depth.STOPPED and record.wish is not Wish.AWAKE:
        return Found.LEFT_OVER
    return Found.AS_WRITTEN


def heeded(record: Record, event: Wished) -> bool:
    """Does the wish count? An operator alone wakes what one holds asleep; a request, too, what one sent to sleep."""
    if event.by is By.OPERATOR:
        return True
    if record.wish is Wish.HELD:
        return False
    if record.wish is Wish.ASLEEP and record.wish_by is By.OPERATOR:
        return event.wish is Wish.AWAKE and event.by is By.REQUEST
    return True


def _wished(record: Record, event: Wished, now_ns: int) -> Record:
    said = record.wish is event.wish and (event.wish is Wish.AWAKE or record.wish_depth is event.depth)
    if not heeded(record, event) or (said and event.by is not By.OPERATOR):
        return record
    changed = replace(record, wish=event.wish, wish_by=event.by, wish_since_ns=now_ns, wish_depth=event.depth)
    if event.by is By.OPERATOR and event.wish is Wish.AWAKE:
        # It was looked after: what failed before counts no more.
        return replace(changed, failures=0, retry_at_ns=0)
    return changed


def _failed(record: Record, event: Failed, now_ns: int, limits: StartLimits) -> Record:
    well = record.state in {State.READY, State.DRAINING} and _age_s(record, now_ns) >= limits.ran_well_s
    failures = 1 if well else record.failures + 1
    if failures >= limits.failures_max:
        state, pause_s = State.FAILED, limits.rest_s
    else:
        state, pause_s = State.ASLEEP, backoff_s(failures, limits)
    pause_s *= 1 + event.jitter / 4
    return replace(
        _moved(record, state, now_ns),
        depth=Depth.STOPPED,
        failures=failures,
        retry_at_ns=now_ns + round(pause_s * _SECOND_NS),
        why=event.why[:WHY_CHARS_MAX],
    )


def backoff_s(failures: int, limits: StartLimits) -> float:
    """Seconds from the failure of this number to the next start: doubled each time, up to a bound."""
    return min(limits.backoff_most_s, limits.backoff_first_s * 2.0 ** min(failures - 1, 30))


def _vanished(record: Record, now_ns: int) -> Record:
    """A failed one stays what it is: its rest is not shortened by a new owner."""
    if record.state is State.FAILED:
        return record
    return replace(_moved(record, State.ASLEEP, now_ns), depth=Depth.STOPPED)


def _moved(record: Record, state: State, now_ns: int) -> Record:
    return replace(record, state=state, since_ns=now_ns)


def _age_s(record: Record, now_ns: int) -> float:
    return (now_ns - record.since_ns) / _SECOND_NS
