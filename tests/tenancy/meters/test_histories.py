"""Random histories over both meters: they agree with each other, and no minute, day or moment exceeds its limit."""

from collections.abc import Awaitable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenancy.claims import DAY_MS, Meter
from tenancy.errors import QuotaExceeded
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Ticket
from tenancy.meters.redis import RedisMeters
from tenancy.quotas import NOTHING, Amounts, Quota
from tests.examples import examples
from tests.stores import ValkeyServer
from tests.tenancy.meters.conftest import Clock, principal, wants

_LIMITS = {Meter.REQUESTS_PER_MINUTE: 4, Meter.TOKENS_PER_MINUTE: 100, Meter.TOKENS_PER_DAY: 300}
_QUOTAS = (*(Quota(meter, limit) for meter, limit in _LIMITS.items()), Quota(Meter.CONCURRENCY, 2, model="b"))
_CONCURRENCY = 3

_steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from("ab"), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 5), st.integers(0, 60)),
        st.tuples(st.just("extend"), st.integers(0, 5), st.integers(1, 60)),
        st.tuples(st.just("undo"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 4_999, 5_000, 20_000, 60_000, DAY_MS]), st.just(0)),
    ),
    max_size=40,
)


async def _outcome(granting: Awaitable[Ticket]) -> Ticket | tuple[str, int | None, tuple[int, ...]]:
    try:
        return await granting
    except QuotaExceeded as refusal:
        return refusal.code, refusal.retry_after_s, tuple(standing.wait_ms for standing in refusal.standings)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(_steps)
async def test_both_meters_tell_the_same_and_no_window_exceeds_its_limit(
    valkey: ValkeyServer, history: list[tuple[str, object, int]]
) -> None:
    clock, who = Clock(), principal(*_QUOTAS, concurrency=_CONCURRENCY)
    process, shared = ProcessMeters(clock_ms=clock), RedisMeters(valkey.url, clock_ms=clock, timeout_s=5, lease_s=1e6)
    await shared.open()
    open_tickets: list[tuple[Ticket, Ticket]] = []
    booked: list[tuple[int, int, int]] = []  # when, requests, tokens
    places: dict[str, list[int]] = {}  # where in `booked` a request's bookings are
    try:
        for number, (deed, what, tokens) in enumerate(history):
            if deed == "wait":
                assert isinstance(what, int)
                clock.now_ms += what
            elif deed == "reserve":
                wanted = wants(f"r{number}", model=str(what), tokens_in=tokens)
                mine = await _outcome(process.reserve(who, wanted))
                theirs = await _outcome(shared.reserve(who, wanted))
                assert mine == theirs
                if isinstance(mine, Ticket) and isinstance(theirs, Ticket):
                    places[mine.request_id] = [len(booked)]
                    booked.append((clock.now_ms, 1, tokens))
                    open_tickets.append((mine, theirs))
            elif open_tickets:
                assert isinstance(what, int)
                place = what % len(open_tickets)
                mine, theirs = open_tickets[place]
                if deed == "extend":
                    more = Amounts(requests=0, tokens_out=tokens)
                    mine, theirs = (
                        await _outcome(process.extend(mine, more)),
                        await _outcome(shared.extend(theirs, more)),
                    )
                    assert mine == theirs
                    if isinstance(mine, Ticket) and isinstance(theirs, Ticket):
                        places[mine.request_id].append(len(booked))
                        booked.append((clock.now_ms, 0, tokens))
                        open_tickets[place] = mine, theirs
                else:
                    del open_tickets[place]
                    reserved = sum(booked[index][2] for index in places[mine.request_id])
                    actual = NOTHING if deed == "undo" else Amounts(tokens_in=min(tokens, reserved))
                    for _ in range(2):
                        await process.settle(mine, actual)
                        await shared.settle(theirs, actual)
                    _correct(booked, places[mine.request_id], actual)
            assert await process.standings(who, "b") == await shared.standings(who, "b")
            assert process.live_slots() == shared.live_slots() == len(open_tickets) <= _CONCURRENCY
            _check_windows(booked)
    finally:
        await shared.close()


def _correct(booked: list[tuple[int, int, int]], places: list[int], actual: Amounts) -> None:
    """What was used is filled in from the first booking on."""
    left = actual.tokens_in
    for number, index in enumerate(places):
        moment, _, tokens = booked[index]
        booked[index] = (moment, actual.requests if number == 0 else 0, min(tokens, left))
        left -= min(tokens, left)


def _check_windows(booked: list[tuple[int, int, int]]) -> None:
    for start, _, _ in booked:
        minute = [entry for entry in booked if start <= entry[0] < start + 60_000]
        assert sum(requests for _, requests, _ in minute) <= _LIMITS[Meter.REQUESTS_PER_MINUTE]
        assert sum(tokens for _, _, tokens in minute) <= _LIMITS[Meter.TOKENS_PER_MINUTE]
        day = [tokens for moment, _, tokens in booked if moment // DAY_MS == start // DAY_MS]
        assert sum(day) <= _LIMITS[Meter.TOKENS_PER_DAY]


@pytest.mark.parametrize("gap_ms", [55_001, 59_999])
async def test_two_bursts_less_than_a_minute_apart_share_one_limit(gap_ms: int) -> None:
    """Twelve buckets would forget the first burst up to five seconds early."""
    clock, who = Clock(), principal(Quota(Meter.REQUESTS_PER_MINUTE, 1))
    clock.now_ms = 1_800_000_004_999  # the last millisecond of a bucket
    meters = ProcessMeters(clock_ms=clock)
    await meters.reserve(who, wants("1"))
    clock.now_ms += gap_ms
    with pytest.raises(QuotaExceeded):
        await meters.reserve(who, wants("2"))
