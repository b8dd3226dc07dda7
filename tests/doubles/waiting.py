"""Waits for a condition with a deadline: what a test does instead of sleeping for luck."""

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.005
# For what comes at once where nothing else runs: two cores that do ten things at once take seconds for it. A promise
# about time is named where it is tested.
PATIENCE_S = 30.0


async def eventually(
    condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "the condition"
) -> None:
    """Returns as soon as the condition holds; fails the test if it does not within the time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come true within {within_s} s"
        await asyncio.sleep(POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[bool]],
    *,
    within_s: float = PATIENCE_S,
    what: str = "the condition",
) -> None:
    """As eventually, for a condition that must itself be waited for."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come true within {within_s} s"
        await asyncio.sleep(POLL_S * 4)
