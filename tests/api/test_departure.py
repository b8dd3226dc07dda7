"""A departed client cancels the work and nothing else; other cancellations pass through."""

import asyncio

import pytest
from starlette.types import Message

from api.departure import ClientGone, ClientWatch


class Line:
    """A `receive` whose client leaves when told."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_work_that_ends_first_is_undisturbed() -> None:
    line = Line()
    async with ClientWatch(line.receive):
        await asyncio.sleep(0)
    line.left.set()
    await asyncio.sleep(0)


async def test_a_departure_cancels_the_work_and_says_why() -> None:
    line = Line()
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    asyncio.get_running_loop().call_soon(line.left.set)
    with pytest.raises(ClientGone):
        async with ClientWatch(line.receive):
            await work()
    assert ended == ["work"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # the task goes on as if it had never been cancelled


async def test_a_cancellation_from_elsewhere_passes_through() -> None:
    async def work() -> None:
        async with ClientWatch(Line().receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_passes_through() -> None:
    with pytest.raises(ValueError, match="boom"):
        async with ClientWatch(Line().receive):
            raise ValueError("boom")


async def test_its_listener_ends_with_it() -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        async with ClientWatch(Line().receive):
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_it_ticks_until_a_tick_gives_the_client_up() -> None:
    class Impatient(ClientWatch):
        ticks = 0

        async def tick(self) -> bool:
            self.ticks += 1
            return self.ticks < 3

    watch = Impatient(Line().receive, every_s=0.001)
    with pytest.raises(ClientGone):
        async with watch:
            await asyncio.Event().wait()
    assert watch.ticks == 3


async def test_only_a_disconnect_is_a_departure() -> None:
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    seen: list[str] = []

    async def receive() -> Message:
        message = messages.pop(0)
        seen.append(message["type"])
        return message

    with pytest.raises(ClientGone):
        async with ClientWatch(receive):
            await asyncio.Event().wait()
    assert seen == ["http.request", "http.disconnect"]
