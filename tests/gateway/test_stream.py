"""A stream says how it ended to whoever asks, also if the first who asked went away before the end was settled."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from backends.errors import EngineBroke
from backends.wire import EngineUsage
from gateway.errors import GenerationCutOff, GenerationFailed
from gateway.request import Endpoint, Outcome
from gateway.stream import Stream
from tenancy.quotas import Amounts
from tests.billing.builders import price as made_price


class SlowRun:
    """A run of one call that ends at once, and is settled only when `on_disk` is set."""

    def __init__(self, end: Exception) -> None:
        self.request = SimpleNamespace(id="r", n=1, received_at_ns=0, endpoint=Endpoint.CHAT)
        self.cap, self.hold = None, SimpleNamespace(standings=())
        self.calls = [SimpleNamespace(next_body=self._ended)]
        self.on_disk = asyncio.Event()
        self.outcomes: list[Outcome] = []
        self._end: Exception | None = end
        self.ended_as: Outcome | None = None  # None: as it is told
        self.cost_nano = 0

    async def settle(self, outcome: Outcome, *, code: str | None = None) -> object:
        self.outcomes.append(outcome)
        await self.on_disk.wait()
        return SimpleNamespace(code=code, outcome=self.ended_as or outcome, cost_nano=self.cost_nano)

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


@pytest.mark.parametrize(
    ("cost_nano", "said", "charged"),
    [(5, GenerationCutOff, "until then is charged"), (0, GenerationFailed, "not charged")],
)
async def test_who_is_cut_off_by_a_shutdown_is_told_what_is_charged(
    cost_nano: int, said: type[GenerationFailed], charged: str
) -> None:
    run = SlowRun(EngineBroke("the engine aborted the request"))
    run.ended_as, run.cost_nano = Outcome.CANCELLED, cost_nano
    run.on_disk.set()
    with pytest.raises(said, match=charged) as told:
        await anext(Stream(cast("Any", run), outputs_ahead=1_024))
    assert type(told.value) is said


class HoldingRun:
    """A run of one call with two chunks, the first of many outputs.

    answered: set once money is answered for; stopped: once the engine has stopped. held: outputs, as they were taken.
    """

    def __init__(self, *, funded: bool) -> None:
        self.request = SimpleNamespace(id="r", n=1, received_at_ns=0, endpoint=Endpoint.CHAT, model="m")
        self.cap, self.price = None, made_price()
        self.hold = SimpleNamespace(standings=(), extend_meters=self._extend_meters, extend_money=self._extend_money)
        self.call = SimpleNamespace(
            next_body=self._next, stop=self._stop, usage=None, finish_reason=None, index=0, rid="r"
        )
        self.calls = [self.call]
        self.answered, self.stopped = asyncio.Event(), asyncio.Event()
        self.held: Counter[str] = Counter()
        self.ends: list[tuple[Outcome, str | None, int]] = []
        self._funded = funded
        self._closed = False
        self._chunks = [(b"many", 2_500), (b"more", 2_501)]

    async def settle(self, outcome: Outcome, *, code: str | None = None) -> object:
        self.ends.append((outcome, code, self.call.usage.completion))
        return SimpleNamespace(outcome=outcome)

    async def stop_readers(self) -> None: ...

    def note_progress(self) -> None: ...

    async def _next(self) -> bytes:
        assert not self._closed, "a call that is stopped is not read"
        if not self._chunks:
            raise StopAsyncIteration
        body, outputs = self._chunks.pop(0)
        self.call.usage = EngineUsage(prompt=3, cached=0, completion=outputs, reasoning=0)
        return body

    async def _stop(self, *, wait_s: float) -> None:
        del wait_s
        try:
            await self.stopped.wait()
        finally:
            self._closed = True

    async def _extend_meters(self, amounts: Amounts) -> None:
        self.held["meters"] += amounts.tokens_out

    async def _extend_money(self, _amount_nano: int) -> bool:
        await self.answered.wait()
        self.held["money"] += self._funded
        return self._funded


async def test_a_first_chunk_that_waits_long_for_its_hold_comes_late() -> None:
    run = HoldingRun(funded=True)
    stream = Stream(cast("Any", run), outputs_ahead=1_024)
    await stream.wait_for_first(0.01)  # the head has gone out
    run.answered.set()
    assert [chunk async for chunk in stream] == [b"many", b"more"]
    assert run.held == {"meters": 2 * 1_024, "money": 2}
    assert run.ends == [(Outcome.FINISHED, None, 2_501)]


async def test_a_first_chunk_whose_hold_is_refused_late_ends_the_stream_as_too_long() -> None:
    run = HoldingRun(funded=False)
    stream = Stream(cast("Any", run), outputs_ahead=1_024)
    run.answered.set()
    await stream.wait_for_first(0.01)  # the head has gone out while the engine stops
    run.stopped.set()
    (finish,) = [orjson.loads(chunk) async for chunk in stream]
    assert finish["choices"][0]["finish_reason"] == "length"
    assert run.ends == [(Outcome.FINISHED, "budget_reached", 0)]
