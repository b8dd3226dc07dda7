"""The bounded queue: order, bounds, deadlines, and that whoever leaves takes nothing along."""

import asyncio
import random
from collections.abc import Callable

import pytest

from gateway.errors import CapacityExceeded, Draining, Evicted, QueueFull
from gateway.fairness import QueueBounds
from gateway.waiting_room import Turn, WaitingRoom


class Pool:
    """A place with a number of pages; stands for the fleet."""

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.total = pages
        self.taken: dict[str, int] = {}
        self.order: list[str] = []

    def try_place(self, request_id: str, need: int) -> "Pool | None":
        if need > self.free:
            return None
        self.free -= need
        self.taken[request_id] = need
        self.order.append(request_id)
        return self

    def give_back(self, place: "Pool", request_id: str) -> None:
        self.free += self.taken.pop(request_id, 0)
        assert self.free <= self.total


def room(pool: Pool, *, entries_max: int = 10) -> WaitingRoom[int, Pool]:
    return WaitingRoom(
        bounds=QueueBounds(entries_max, 1 << 30, entries_max, 1 << 30),
        try_place=pool.try_place,
        give_back=pool.give_back,
        retry_after_s=lambda _want, ahead: ahead.entries + 1,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the room offers no event for a test to wait on
            await asyncio.sleep(0)


def enter(
    waiting: WaitingRoom[int, Pool], name: str, need: int, wait_s: float = 5, turn: Turn | None = None
) -> "asyncio.Task[Pool]":
    return asyncio.create_task(waiting.place(name, need, wait_s=wait_s, reject_if_busy=False, turn=turn))


async def test_whoever_fits_enters_without_waiting() -> None:
    pool = Pool(10)
    assert await room(pool).place("a", 10, wait_s=5, reject_if_busy=True) is pool


async def test_those_who_wait_enter_in_order_and_a_large_head_is_not_overtaken() -> None:
    pool = Pool(10)
    waiting = room(pool)
    await waiting.place("first", 10, wait_s=5, reject_if_busy=False)
    large, small = enter(waiting, "large", 8), enter(waiting, "small", 1)
    await until(lambda: len(waiting) == 2)
    pool.taken["first"] = 5
    pool.free = 5  # room for the small one only
    waiting.wake()
    assert len(waiting) == 2
    pool.give_back(pool, "first")
    waiting.wake()
    await large
    await small
    assert pool.order == ["first", "large", "small"]


async def test_the_bound_counts_those_who_wait_and_the_rest_are_refused_at_once() -> None:
    pool = Pool(1)
    waiting = room(pool, entries_max=5)
    await waiting.place("running", 1, wait_s=5, reject_if_busy=False)
    arrivals = [enter(waiting, f"r{number}", 1) for number in range(49)]
    await until(lambda: sum(task.done() for task in arrivals) == 44)
    assert len(waiting) == 5
    refused = [task for task in arrivals if task.done()]
    assert all(isinstance(task.exception(), QueueFull) for task in refused)
    assert {task.exception().retry_after_s for task in refused} == {6}  # type: ignore[union-attr]  # all failed
    for task in arrivals:
        task.cancel()
    await asyncio.gather(*arrivals, return_exceptions=True)
    assert len(waiting) == 0


async def test_a_request_leaves_at_its_deadline_with_a_hint_when_to_come_again() -> None:
    waiting = room(Pool(0))
    with pytest.raises(Evicted) as evicted:
        await waiting.place("late", 1, wait_s=0.01, reject_if_busy=False)
    assert evicted.value.retry_after_s == 2
    assert len(waiting) == 0


async def test_reject_if_busy_never_waits() -> None:
    waiting = room(Pool(0))
    with pytest.raises(CapacityExceeded) as refused:
        await waiting.place("impatient", 1, wait_s=60, reject_if_busy=True)
    assert refused.value.retry_after_s == 1


async def test_reject_if_busy_does_not_overtake_those_who_wait() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await waiting.place("running", 2, wait_s=5, reject_if_busy=False)
    head = enter(waiting, "head", 4)
    await until(lambda: len(waiting) == 1)
    with pytest.raises(CapacityExceeded):
        await waiting.place("impatient", 1, wait_s=60, reject_if_busy=True)
    head.cancel()
    await asyncio.gather(head, return_exceptions=True)


async def test_a_departed_head_lets_the_next_one_in() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await waiting.place("running", 2, wait_s=5, reject_if_busy=False)
    head, next_one = enter(waiting, "head", 4), enter(waiting, "next", 2)
    await until(lambda: len(waiting) == 2)
    head.cancel()
    assert await next_one is pool


async def test_a_client_that_leaves_in_the_moment_of_admission_takes_no_pages_along() -> None:
    pool = Pool(4)
    waiting = room(pool)
    await waiting.place("running", 4, wait_s=5, reject_if_busy=False)
    leaving = enter(waiting, "leaving", 4)
    await until(lambda: len(waiting) == 1)
    pool.give_back(pool, "running")
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


@pytest.mark.parametrize("seed", range(20))
async def test_random_histories_never_over_admit_and_end_with_every_page_back(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool(16)
    waiting = room(pool, entries_max=8)
    ended = {"admitted": 0, "refused": 0, "cancelled": 0}

    async def client(name: str) -> None:
        try:
            await waiting.place(
                name, rng.randint(1, 16), wait_s=rng.choice([0.001, 1]), reject_if_busy=rng.random() < 0.2
            )
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
            pool.give_back(pool, name)
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
    await waiting.place("running", 1, wait_s=5, reject_if_busy=False)
    greedy = [enter(waiting, f"greedy{number}", 1, turn=Turn("greedy")) for number in range(6)]
    await until(lambda: len(waiting) == 6)
    light = [enter(waiting, f"light{number}", 1, turn=Turn("light")) for number in range(2)]
    await until(lambda: len(waiting) == 8)
    while not all(task.done() for task in (*greedy, *light)):
        pool.give_back(pool, pool.order[-1])
        waiting.wake()
        await asyncio.sleep(0)
    await asyncio.gather(*greedy, *light)
    assert [name[:5] for name in pool.order[1:5]].count("light") == 2


async def test_a_more_urgent_tier_goes_first() -> None:
    pool = Pool(1)
    waiting = room(pool)
    await waiting.place("running", 1, wait_s=5, reject_if_busy=False)
    late, urgent = (
        enter(waiting, "late", 1, turn=Turn("a", tier=1)),
        enter(waiting, "urgent", 1, turn=Turn("b", tier=0)),
    )
    await until(lambda: len(waiting) == 2)
    pool.give_back(pool, "running")
    waiting.wake()
    await urgent
    assert not late.done()
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_one_tenant_cannot_fill_the_queue_alone() -> None:
    pool = Pool(0)
    waiting: WaitingRoom[int, Pool] = WaitingRoom(
        bounds=QueueBounds(entries_max=10, tokens_max=1 << 30, tenant_entries_max=5, tenant_tokens_max=1 << 30),
        try_place=pool.try_place,
        give_back=pool.give_back,
        retry_after_s=lambda _want, ahead: ahead.entries + 1,
    )
    tasks = [enter(waiting, f"greedy{number}", 1, turn=Turn("greedy")) for number in range(8)]
    await until(lambda: sum(task.done() for task in tasks) == 3)
    tasks.append(enter(waiting, "light", 1, turn=Turn("light")))
    await until(lambda: len(waiting) == 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_can_not_start_in_time_is_refused_at_once_when_waits_are_known() -> None:
    pool = Pool(0)
    waiting = room(pool)
    first = enter(waiting, "first", 1, wait_s=5, turn=Turn("a", cost_s=10))
    await until(lambda: len(waiting) == 1)
    patient = enter(waiting, "patient", 1, wait_s=5, turn=Turn("a"))
    await until(lambda: len(waiting) == 2)  # a forecast without experience refuses nobody
    for _ in range(100):
        waiting.forecast.observe(10.0, 10.0)
    with pytest.raises(CapacityExceeded) as refused:
        await waiting.place("late", 1, wait_s=5, reject_if_busy=False, turn=Turn("a"))
    assert refused.value.retry_after_s == 3
    long_enough = enter(waiting, "long enough", 1, wait_s=60, turn=Turn("a"))
    await until(lambda: len(waiting) == 3)
    for task in (first, patient, long_enough):
        task.cancel()
    await asyncio.gather(first, patient, long_enough, return_exceptions=True)
