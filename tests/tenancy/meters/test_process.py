"""Concurrent slots: never above the limit, given back once, zero at the end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.errors import ConcurrencyExceeded
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Meters
from tenancy.principal import Principal

_ACCOUNTS = ("a" * 32, "b" * 32)


def _principal(account_id: str, concurrency: int | None) -> Principal:
    return Principal(account_id, "k", frozenset(), concurrency, None)


async def test_a_full_account_is_refused_until_a_slot_is_free() -> None:
    meters: Meters = ProcessMeters()
    principal = _principal(_ACCOUNTS[0], 2)
    await meters.reserve(principal, "1")
    await meters.reserve(principal, "2")
    with pytest.raises(ConcurrencyExceeded) as refusal:
        await meters.reserve(principal, "3")
    assert refusal.value.retry_after_s == 1
    await meters.settle(principal.account_id, "1")
    await meters.reserve(principal, "3")
    assert meters.live_slots() == 2


async def test_a_refusal_consumes_nothing() -> None:
    meters = ProcessMeters()
    principal = _principal(_ACCOUNTS[0], 1)
    await meters.reserve(principal, "1")
    for number in range(2, 50):
        with pytest.raises(ConcurrencyExceeded):
            await meters.reserve(principal, str(number))
    assert meters.live_slots() == 1


async def test_accounts_do_not_take_each_others_slots() -> None:
    meters = ProcessMeters()
    await meters.reserve(_principal(_ACCOUNTS[0], 1), "1")
    await meters.reserve(_principal(_ACCOUNTS[1], 1), "2")
    await meters.settle(_ACCOUNTS[0], "2")
    assert meters.live_slots() == 2


async def test_without_a_limit_slots_are_still_counted() -> None:
    meters = ProcessMeters()
    for number in range(1_000):
        await meters.reserve(_principal(_ACCOUNTS[0], None), str(number))
    assert meters.live_slots() == 1_000


async def test_a_lowered_limit_holds_for_the_next_request() -> None:
    meters = ProcessMeters()
    for number in range(3):
        await meters.reserve(_principal(_ACCOUNTS[0], 3), str(number))
    with pytest.raises(ConcurrencyExceeded):
        await meters.reserve(_principal(_ACCOUNTS[0], 1), "4")


async def test_reserving_one_request_twice_is_a_bug() -> None:
    meters = ProcessMeters()
    await meters.reserve(_principal(_ACCOUNTS[0], None), "1")
    with pytest.raises(AssertionError):
        await meters.reserve(_principal(_ACCOUNTS[0], None), "1")


steps = st.lists(st.tuples(st.sampled_from(["reserve", "settle"]), st.sampled_from(_ACCOUNTS), st.integers(0, 9)))


@given(steps, st.integers(1, 4))
async def test_any_history_stays_under_the_limit_and_ends_at_zero(
    history: list[tuple[str, str, int]], limit: int
) -> None:
    meters = ProcessMeters()
    held: dict[str, set[int]] = {account_id: set() for account_id in _ACCOUNTS}
    for step, account_id, number in history:
        request_id = f"{account_id[0]}{number}"
        if step == "settle":
            await meters.settle(account_id, request_id)
            held[account_id].discard(number)
        elif number not in held[account_id]:
            if len(held[account_id]) < limit:
                await meters.reserve(_principal(account_id, limit), request_id)
                held[account_id].add(number)
            else:
                with pytest.raises(ConcurrencyExceeded):
                    await meters.reserve(_principal(account_id, limit), request_id)
        assert meters.live_slots() == sum(map(len, held.values()))
    for account_id in _ACCOUNTS:
        for number in range(10):
            for _ in range(2):
                await meters.settle(account_id, f"{account_id[0]}{number}")
    assert meters.live_slots() == 0
