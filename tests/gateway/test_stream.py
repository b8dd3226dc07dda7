"""A stream says how it ended to whoever asks, also if the first who asked went away before the end was settled."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backends.errors import EngineBroke
from gateway.errors import GenerationFailed
from gateway.request import Endpoint, Outcome
from gateway.stream import Stream


class SlowRun:
    """A run of one call that ends at once, and is settled only when `on_disk` is set."""

    def __init__(self, end: Exception) -> None:
        self.request = SimpleNamespace(id="r", n=1, received_at_ns=0, endpoint=Endpoint.CHAT)
        self.cap, self.hold = None, SimpleNamespace(standings=())
        self.calls = [SimpleNamespace(next_body=self._ended)]
        self.on_disk = asyncio.Event()
        self.outcomes: list[Outcome] = []
        self._end: Exception | None = end

    async def settle(self, outcome: Outcome, *, code: str | None = None) -> object:
        self.outcomes.append(outcome)
        await self.on_disk.wait()
        return SimpleNamespace(code=code)

    async def _ended(self) -> bytes:
        assert self._end is not None, "a call is not read after its end"
        end, self._end = self._end, None
        raise end


@pytest.mark.parametrize(
    ("end", "outcome", "said"),
    [
        (StopAsyncIteration(), Outcome.FINISHED, StopAsyncIteration),
        (EngineBroke("cut"), Outcome.UPSTREAM_FAILED, GenerationFailed),
        (ValueError("a bug"), Outcome.UPSTREAM_FAILED, ValueError),
    ],
)
async def test_an_end_that_is_slow_to_settle_is_told_to_who_asks_again(
    end: Exception, outcome: Outcome, said: type[Exception]
) -> None:
    run = SlowRun(end)
    stream = Stream(cast("Any", run), outputs_ahead=1_024)
    await stream.wait_for_first(0.01)  # the answer's head has gone out: what comes now is told in the stream
    run.on_disk.set()
    with pytest.raises(said):
        await anext(stream)
    assert run.outcomes == [outcome, outcome]
    assert (stream.settlement is not None) == (outcome is Outcome.FINISHED)
