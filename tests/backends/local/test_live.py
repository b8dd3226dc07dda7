import asyncio

import pytest

from backends.local.engine import TokenEvent
from backends.local.errors import InvalidRequestError
from backends.local.live import LiveRequests
from backends.local.sequence import Finish, FinishReason, TokenLogprob


def event(rid: str, text: str, produced: int, finish: Finish | None = None) -> TokenEvent:
    return TokenEvent(rid, text, 5, produced, TokenLogprob(produced, -1.0, ()), finish)


async def test_a_slow_client_gets_what_happened_since_as_one_delivery() -> None:
    live = LiveRequests()
    mailbox = live.open("r")
    live.dispatch([event("r", "a", 1), event("r", "b", 2)])
    live.dispatch([event("r", "c", 3)])
    delivery = await mailbox.take()
    assert (delivery.text, delivery.prompt_tokens, delivery.completion_tokens) == ("abc", 5, 3)
    assert [one.token_id for one in delivery.logprobs] == [1, 2, 3]
    assert delivery.finish is None


async def test_a_client_waits_until_something_happens() -> None:
    live = LiveRequests()
    mailbox = live.open("r")
    taking = asyncio.create_task(mailbox.take(), name="taking")
    await asyncio.sleep(0)
    assert not taking.done()
    live.dispatch([event("r", "a", 1)])
    assert (await taking).text == "a"


async def test_the_last_event_closes_the_mailbox_and_frees_the_id() -> None:
    live = LiveRequests()
    mailbox = live.open("r")
    with pytest.raises(InvalidRequestError, match="running already"):
        live.open("r")
    live.dispatch([event("r", "a", 1, Finish(FinishReason.LENGTH))])
    assert len(live) == 0
    assert live.open("r") is not mailbox
    assert (await mailbox.take()).finish == Finish(FinishReason.LENGTH)
