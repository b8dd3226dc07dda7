"""How a unit stands, in words for an operator: what it does, for whom, what comes next and what an order would change.

Pure. Used by the command line and the console.
"""

from typing import Final

from gateway.lifecycle.states import By, Depth, Record, State, Wish

_SPANS: Final = ((90.0, 1.0, "s"), (90.0 * 60, 60.0, "min"), (48.0 * 3600, 3600.0, "h"))


def is_kept(record: Record, now_ns: int) -> bool:
    """Does a gateway that lives look after it? Else it stands as it was left, which may long be untrue."""
    return record.owner is not None and now_ns < record.lease_until_ns


def retry_in_s(record: Record, now_ns: int) -> int | None:
    """Whole seconds until it is started again after a failure; None if that is not what it waits for."""
    waits = record.state in {State.ASLEEP, State.FAILED} and record.wish is Wish.AWAKE
    return max(1, (record.retry_at_ns - now_ns) // 1_000_000_000) if waits and record.retry_at_ns > now_ns else None


def told(record: Record, now_ns: int) -> str:
    """One line."""
    state = record.state.value
    if record.state is State.ASLEEP and record.depth is Depth.RELEASED:
        state = "asleep without its memory"
    said = f"{state} for {_span((now_ns - record.since_ns) / 1e9)}: {_doing(record, now_ns)}"
    if record.why:
        said += f"; last failure: {record.why}"
    return said if is_kept(record, now_ns) else f"no gateway looks after it; when it was left: {said}"


def _doing(record: Record, now_ns: int) -> str:
    awake, by, retry_s = record.wish is Wish.AWAKE, record.wish_by.value, retry_in_s(record, now_ns)
    match record.state:
        case State.ASLEEP if retry_s is not None:
            return f"{_starts(record.failures)} failed, the next one is in {_span(retry_s)}"
        case State.FAILED if retry_s is not None:
            return f"it rests after {_starts(record.failures)} that failed, for {_span(retry_s)} or until `engine wake`"
        case State.ASLEEP | State.FAILED if awake:
            return f"about to start, by {by}"
        case State.DRAINING if awake:
            return f"about to be opened again, by {by}"
        case State.DRAINING:
            return f"what runs there ends; then it sleeps, by {by}, {_until(record)}"
        case State.WARMING | State.READY if awake:
            return f"wished awake by {by}"
        case _:
            return f"wished asleep by {by}, {_until(record)}"


def _until(record: Record) -> str:
    """When it will wake."""
    if record.wish is Wish.HELD:
        return "until `engine wake`"
    return "until a request needs it" if record.wish_by is By.OPERATOR else "until it is needed"


def _starts(number: int) -> str:
    return "1 start" if number == 1 else f"{number} starts"


def _span(seconds: float) -> str:
    for below, unit, name in _SPANS:
        if seconds < below:
            return f"{max(0.0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"
