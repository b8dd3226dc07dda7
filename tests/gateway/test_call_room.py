"""Accounts take turns; a place that nobody takes any more is not lost."""

import asyncio

import pytest

from gateway.call_room import CallRoom


@pytest.fixture
def room() -> CallRoom:
    return CallRoom(calls_max=1, waiting_max=6)


async def waiting(room: CallRoom, *accounts: str) -> list[asyncio.Task[None]]:
    """One that waits for each of them, in this order."""
    tasks = [asyncio.create_task(room.enter(account)) for account in accounts]
    await asyncio.sleep(0)
    assert room.waiting == len(accounts)
    return tasks


async def test_accounts_take_turns_each_in_its_own_order(room: CallRoom) -> None:
    await room.enter("a")
    names = ("a1", "a2", "a3", "b1", "c1", "b2")
    tasks = dict(zip(names, await waiting(room, *(name[0] for name in names)), strict=True))
    for name in ("a1", "b1", "c1", "a2", "b2", "a3"):
        room.leave()
        async with asyncio.timeout(5):
            await tasks.pop(name)
        assert not any(task.done() for task in tasks.values())
    assert room.waiting == 0


async def test_one_account_may_have_half_of_those_who_wait(room: CallRoom) -> None:
    await room.enter("a")
    tasks = await waiting(room, "a", "a", "a")
    assert room.is_full_for("a")
    assert not room.is_full_for("b")
    tasks += [asyncio.create_task(room.enter(account)) for account in ("b", "c", "d")]
    await asyncio.sleep(0)
    assert room.is_full_for("e")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_is_cancelled_counts_no_more_among_its_accounts(room: CallRoom) -> None:
    await room.enter("a")
    gone, *others = await waiting(room, "a", "a", "a")
    assert room.is_full_for("a")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert not room.is_full_for("a")
    for task in others:
        room.leave()
        await task
    room.leave()
    await room.enter("b")


async def test_who_is_cancelled_leaves_its_place_to_others(room: CallRoom) -> None:
    await room.enter("a")
    first, second, third = await waiting(room, "a", "b", "c")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    room.leave()  # the first one's turn is passed over
    second.cancel()  # in the moment in which it has its turn
    await asyncio.gather(second, return_exceptions=True)
    async with asyncio.timeout(5):
        await third
        room.leave()
        await room.enter("d")
