"""Waits for a condition with a deadline: what a test does instead of sleeping for luck.

A condition that is dear to look at, such as a question to another process or a list of all processes, is looked at more
rarely: what is waited for needs the core.
"""

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.005
POLL_S_MAX = 0.05
# For what comes at once where nothing else runs: two cores that do ten things at once take seconds for it. A promise
# about time is named where it is tested.
PATIENCE_S = 30.0
# Looks take a tenth of the time that is waited, until POLL_S_MAX: what lasts that long is seen.
_PAUSES_PER_LOOK = 9


async def eventually(
    condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "the condition"
) -> None:
    """Returns as soon as the condition holds; fails the test if it does not within the time."""

    async def holds() -> bool:
        return condition()

    await _wait_for(holds, within_s, what, POLL_S)


async def eventually_async(
    condition: Callable[[], Awaitable[bool]],
    *,
    within_s: float = PATIENCE_S,
    what: str = "the condition",
) -> None:
    """As eventually, for a condition that must itself be waited for."""
    await _wait_for(condition, within_s, what, POLL_S * 4)


async def _wait_for(condition: Callable[[], Awaitable[bool]], within_s: float, what: str, poll_s: float) -> None:
    time = asyncio.get_running_loop().time
    began_s = looked_s = time()
    while not await condition():
        now_s = time()
        assert now_s - began_s < within_s, f"{what} did not come true within {within_s} s"
        await asyncio.sleep(pause_s(now_s - looked_s, poll_s))
        looked_s = time()


def pause_s(look_s: float, poll_s: float) -> float:
    """How long to leave a condition alone that took so long to look at; poll_s: at the least."""
    return max(poll_s, min(_PAUSES_PER_LOOK * look_s, POLL_S_MAX))
