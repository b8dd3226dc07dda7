"""What is tried again, in which order and with which delay; each attempt is a request of its own."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from gateway.attempts import ONCE, Attempts, Backoff, Persistence
from gateway.errors import (
    CapacityExceeded,
    Draining,
    FirstByteLate,
    GatewayError,
    GenerationCutOff,
    GenerationFailed,
    PromptTooLong,
)
from gateway.pipeline import Pipeline
from gateway.request import Completion, Endpoint, GenerationRequest
from tests.fakes import chat_completion, principal

FAULT = GenerationFailed("The engine failed.")
FULL = CapacityExceeded("No room.", retry_after_s=1)


class Told:
    """A pipeline that does as it is told, an answer or an error for each call."""

    def __init__(self, *ends: Completion | GatewayError | None) -> None:
        self._ends = list(ends)
        self.asked: list[tuple[str, str]] = []

    async def complete(self, request: GenerationRequest) -> Completion:
        self.asked.append((request.id, request.model))
        end = self._ends.pop(0)
        if end is None:
            await asyncio.Event().wait()
        if isinstance(end, GatewayError):
            raise end
        return cast("Completion", end)


def request(*fallbacks: str) -> GenerationRequest:
    return GenerationRequest(
        id="0",
        principal=principal(),
        model="a",
        endpoint=Endpoint.CHAT,
        route="chat",
        messages=({"role": "user", "content": "hi"},),
        prompt=None,
        sampling={},
        max_tokens=None,
        n=1,
        stream=False,
        reject_if_busy=False,
        received_at_ns=0,
        deadline_s=1,
        fallbacks=fallbacks,
    )


def attempts(told: Told) -> Attempts:
    ids = count(1)
    return Attempts(cast("Pipeline", told), new_id=lambda: str(next(ids)))


async def tried(
    told: Told, *fallbacks: str, begun: Callable[[str], None] = lambda _: None, **persistence: Any
) -> tuple[int, tuple[str, ...]]:
    served = await attempts(told).complete(request(*fallbacks), Persistence(**persistence), begun)
    return served.step, served.ids


async def test_an_engines_fault_is_tried_again_as_another_request() -> None:
    told = Told(FAULT, FAULT, chat_completion())
    begun: list[str] = []
    assert await tried(told, attempts=3, begun=begun.append) == (0, ("0", "1", "2"))
    assert told.asked == [("0", "a"), ("1", "a"), ("2", "a")]
    assert begun == ["1", "2"]


async def test_no_more_often_than_was_asked() -> None:
    told = Told(FAULT, FAULT, chat_completion())
    with pytest.raises(GenerationFailed):
        await tried(told, attempts=2)
    assert len(told.asked) == 2


async def test_without_room_another_model_is_asked_at_once() -> None:
    told = Told(FULL, chat_completion())
    assert await tried(told, "b", attempts=5) == (1, ("0", "1"))
    assert told.asked == [("0", "a"), ("1", "b")]


async def test_each_model_has_all_its_attempts() -> None:
    told = Told(FAULT, FAULT, FAULT, chat_completion())
    assert await tried(told, "b", attempts=2) == (1, ("0", "1", "2", "3"))
    assert [model for _, model in told.asked] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "error", [PromptTooLong(prompt_tokens=9, limit_tokens=8), Draining("Closing."), GenerationCutOff("Closed.")]
)
async def test_what_no_attempt_can_mend_is_raised_at_once(error: GatewayError) -> None:
    told = Told(error)
    with pytest.raises(type(error)):
        await tried(told, "b", attempts=3)
    assert len(told.asked) == 1


async def test_the_last_models_refusal_is_the_requests() -> None:
    with pytest.raises(CapacityExceeded):
        await tried(Told(FAULT, FULL), "b")


async def test_an_attempt_that_begins_too_late_is_given_up_for_the_next_model() -> None:
    told = Told(None, chat_completion())
    assert await tried(told, "b", attempts=3, first_byte_s=0.01) == (1, ("0", "1"))
    with pytest.raises(FirstByteLate):
        await tried(Told(None), first_byte_s=0.01)


def test_delays_are_as_the_backoff_says_and_bounded() -> None:
    def delays(backoff: Backoff) -> list[float]:
        return [Persistence(attempts=5, delay_s=1.5, backoff=backoff).delay_before(n) for n in range(1, 6)]

    assert delays(Backoff.CONSTANT) == [0, 1.5, 1.5, 1.5, 1.5]
    assert delays(Backoff.LINEAR) == [0, 1.5, 3, 4.5, 5]
    assert delays(Backoff.EXPONENTIAL) == [0, 1.5, 3, 5, 5]
    assert ONCE.delay_before(1) == 0
