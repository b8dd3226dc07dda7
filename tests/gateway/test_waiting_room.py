"""The bounded queue: order, bounds, deadlines, and that whoever leaves takes nothing along."""

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from gateway.door import Door, Let
from gateway.errors import CapacityExceeded, Draining, Evicted, QueueFull
from gateway.fairness import QueueBounds
from gateway.waiting_room import WaitingRoom
from gateway.want import Want
from tests.gateway.places import PagePlacing


class Pool(PagePlacing):
    """A place with a number of pages, at which a request of so many prompt tokens takes so many."""

    def room(self, *, entries_max: int = 10, tenant_entries_max: int | None = None) -> WaitingRoom:
        bounds = QueueBounds(entries_max, 1 << 30, tenant_entries_max or entries_max, 1 << 30)
        door = Door(self, bounds, retry_after_s_max=60)
        return WaitingRoom(door, clock=time.monotonic, give_back=lambda placed: self.give_back(placed.want.request_id))


def want(name: str, need: int, *, tenant: str = "", tier: int = 0) -> Want:
    return Want(name, tenant, "chat", need, 1, 1, tier=tier)


def room(pool: Pool, *, entries_max: int = 10) -> WaitingRoom:
    return pool.room(entries_max=entries_max)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the room offers no event for a test to wait on
            await asyncio.sleep(0)


def enter(
    waiting: WaitingRoom, name: str, need: int, wait_s: float = 5, *, tenant: str = "", tier: int = 0
) -> "asyncio.Task[Let]":
    asked = want(name, need, tenant=tenant, tier=tier)
    return asyncio.create_task(waiting.place(asked, wait_s=wait_s, reject_if_busy=False))


async def take(waiting: WaitingRoom, name: str, need: int, *, wait_s: float = 5, reject_if_busy: bool = False) -> Let:
    return await waiting.place(want(name, need), wait_s=wait_s, reject_if_busy=reject_if_busy)


async def test_whoever_fits_enters_without_waiting() -> None:
    pool = Pool(10)
    assert (await take(room(pool), "a", 10, reject_if_busy=True)).waiting.id == "a"
    assert pool.free == 0


async def test_those_who_wait_enter_in_order_and_a_large_head_is_not_overtaken() -> None:
    pool = Pool(10)
    waiting = room(pool)
    await take(waiting, "first", 10, wait_s=5, reject_if_busy=False)
    large, small = enter(waiting, "large", 8), enter(waiting, "small", 1)
    await until(lambda: len(waiting) == 2)
    pool.taken["first"] = 5
    pool.free = 5  # room for the small one only
    waiting.wake()
    assert len(waiting) == 2
    pool.give_back("first")
    waiting.wake()
    await large
    await small
    assert pool.order == ["first", "large", "small"]


async def test_the_bound_counts_those_who_wait_and_the_rest_are_refused_at_once() -> None:
    pool = Pool(1)
    waiting = room(pool, entries_max=5)
    await take(waiting, "running", 1, wait_s=5, reject_if_busy=False)
    arrivals = [enter(waiting, f"r{number}", 1) for number in range(49)]
    await until(lambda: sum(task.done() for task in arrivals) == 44)
    assert len(waiting) == 5
    refused = [task for task in arrivals if task.done()]
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    hints = {task.exception().retry_after_s for task in refused}  # type: ignore[union-attr]  # all failed
    assert all(1 <= hint <= 60 for hint in hints)
    for task in arrivals:
        task.cancel()
    await asyncio.gather(*arrivals, return_exceptions=True)
    assert len(waiting) == 0


async def test_a_request_leaves_at_its_deadline_with_a_hint_when_to_come_again() -> None:
    waiting = room(Pool(0))
    with pytest.raises(Evicted) as evicted:
        await take(waiting, "late", 1, wait_s=0.01, reject_if_busy=False)
    assert evicted.value.retry_after_s is not None
    assert len(waiting) == 0


async def test_reject_if_busy_never_waits() -> None:
    waiting = room(Pool(0))
    with pytest.raises(CapacityExceeded) as refused:
        await take(waiting, "impatient", 1, wait_s=60, reject_if_busy=True)
    assert refused.value.retry_after_s is not None


async def test_reject_if_busy_does_not_overtake_those_who_wait() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await take(waiting, "running", 2, wait_s=5, reject_if_busy=False)
    head = enter(waiting, "head", 4)
    await until(lambda: len(waiting) == 1)
    with pytest.raises(CapacityExceeded):
        await take(waiting, "impatient", 1, wait_s=60, reject_if_busy=True)
    head.cancel()
    await asyncio.gather(head, return_exceptions=True)


async def test_a_departed_head_lets_the_next_one_in() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await take(waiting, "running", 2, wait_s=5, reject_if_busy=False)
    head, next_one = enter(waiting, "head", 4), enter(waiting, "next", 2)
    await until(lambda: len(waiting) == 2)
    head.cancel()
    assert (await next_one).waiting.id == "next"


async def test_a_client_that_leaves_in_the_moment_of_admission_takes_no_pages_along() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await take(waiting, "running", 4, wait_s=5, reject_if_busy=False)
    leaving = enter(waiting, "leaving", 4)
    await until(lambda: len(waiting) == 1)
    pool.give_back("running")
    waiting.wake()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert pool.free == pool.total


async def test_shutdown_sends_everybody_away() -> None:
    waiting = room(Pool(0))
    tasks = [enter(waiting, f"r{number}", 1) for number in range(3)]
    await until(lambda: len(waiting) == 3)
    waiting.refuse_all(Draining("closing"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, Draining) for outcome in outcomes)


async def test_who_is_told_something_leaves_with_it_and_the_others_wait_on() -> None:
    pool = Pool(0)
    waiting = room(pool)
    told, kept = enter(waiting, "told", 1), enter(waiting, "kept", 1)
    await until(lambda: len(waiting) == 2)
    waiting.refuse(lambda want: Draining("closing") if want.request_id == "told" else None)
    with pytest.raises(Draining):
        await told
    assert len(waiting) == 1
    assert not kept.done()
    waiting.refuse_all(Draining("closing"))
    with pytest.raises(Draining):
        await kept


@pytest.mark.parametrize("seed", range(20))
async def test_random_histories_never_over_admit_and_end_with_every_page_back(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(16)
    waiting = room(pool, entries_max=8)
    ended = {"admitted": 0, "refused": 0, "cancelled": 0}

    async def client(name: str) -> None:
        try:
            asked = want(name, rng.randint(1, 16))
            await waiting.place(asked, wait_s=rng.choice([0.001, 1]), reject_if_busy=rng.random() < 0.2)
        except (QueueFull, Evicted, CapacityExceeded):
            ended["refused"] += 1
            return
        except asyncio.CancelledError:
            ended["cancelled"] += 1
            raise
        ended["admitted"] += 1
        assert pool.free >= 0
        try:
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
        finally:
            pool.give_back(name)
            waiting.wake()

    tasks = [asyncio.create_task(client(f"c{number}")) for number in range(60)]
    for task in tasks:
        await asyncio.sleep(0)
        if rng.random() < 0.1:
            task.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.free == pool.total
    assert len(waiting) == 0
    assert ended["admitted"] > 0


async def test_tenants_take_turns_however_many_requests_one_has() -> None:
    pool = Pool(1)
    waiting = room(pool, entries_max=20)
    await take(waiting, "running", 1, wait_s=5, reject_if_busy=False)
    greedy = [enter(waiting, f"greedy{number}", 1, tenant="greedy") for number in range(6)]
    await until(lambda: len(waiting) == 6)
    light = [enter(waiting, f"light{number}", 1, tenant="light") for number in range(2)]
    await until(lambda: len(waiting) == 8)
    while not all(task.done() for task in (*greedy, *light)):
        pool.give_back(pool.order[-1])
        waiting.wake()
        await asyncio.sleep(0)
    await asyncio.gather(*greedy, *light)
    assert [name[:5] for name in pool.order[1:5]].count("light") == 2


async def test_a_more_urgent_tier_goes_first() -> None:
    pool = Pool(1)
    waiting = room(pool)
    await take(waiting, "running", 1, wait_s=5, reject_if_busy=False)
    late, urgent = (
        enter(waiting, "late", 1, tenant="a", tier=1),
        enter(waiting, "urgent", 1, tenant="b"),
    )
    await until(lambda: len(waiting) == 2)
    pool.give_back("running")
    waiting.wake()
    await urgent
    assert not late.done()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_one_tenant_cannot_fill_the_queue_alone() -> None:
    pool = Pool(0)
    waiting = pool.room(tenant_entries_max=5)
    tasks = [enter(waiting, f"greedy{number}", 1, tenant="greedy") for number in range(8)]
    await until(lambda: sum(task.done() for task in tasks) == 3)
    tasks.append(enter(waiting, "light", 1, tenant="light"))
    await until(lambda: len(waiting) == 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_can_not_start_in_time_is_refused_at_once_when_waits_are_known() -> None:
    pool = Pool(0)
    pool.costs["first"] = 10.0
    waiting = room(pool)
    first = enter(waiting, "first", 1, tenant="a")
    await until(lambda: len(waiting) == 1)
    patient = enter(waiting, "patient", 1, tenant="a")
    await until(lambda: len(waiting) == 2)  # a forecast without experience refuses nobody
    for _ in range(100):
        waiting.door.waits.observe(10.0, 10.0)
    with pytest.raises(CapacityExceeded) as refused:
        await waiting.place(want("late", 1, tenant="a"), wait_s=5, reject_if_busy=False)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 6  # eleven seconds of work are ahead of it
    long_enough = enter(waiting, "long enough", 1, wait_s=60, tenant="a")
    await until(lambda: len(waiting) == 3)
    for task in (first, patient, long_enough):
        task.cancel()
    await asyncio.gather(first, patient, long_enough, return_exceptions=True)


async def test_the_room_wakes_itself_when_only_time_has_passed() -> None:
    pool = Pool(0)
    pool.again_in_s = 0.01
    waiting = room(pool)
    patient = enter(waiting, "patient", 1)
    await until(lambda: len(waiting) == 1)
    pool.free = pool.total = 1  # and nobody calls wake
    async with asyncio.timeout(20):
        await patient
