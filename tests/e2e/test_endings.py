"""Every request that began ends: whatever the engine answers, whoever leaves, nothing stays held, one row says why."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal, Script
from tests.doubles.waiting import eventually
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service


@pytest.fixture
async def tight(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Service]:
    """A service that holds sixteen outputs ahead, so that an account's money can run out in mid-stream."""
    async with (
        ScriptedEngine() as engine,
        running_service(tmp_path / "home", checkpoint, engine, gateway={"hold_outputs_ahead": 16}) as service,
    ):
        yield service


class TestSeveralChoices:
    async def test_a_client_that_leaves_before_the_first_token_takes_nothing_along(self, service: Service) -> None:
        service.engine.script = Script(ttft_s=30)
        body = CHAT.body(service, stream=True, n=4)
        asking = asyncio.create_task(service.post(CHAT.path(service), body))
        await eventually(lambda: len(service.engine.live) == 4, what="four generations")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await service.oracle(rows=1)
        assert (await service.records())[0]["outcome"] == "client_disconnected"

    async def test_a_client_that_leaves_in_the_middle_pays_for_all_choices(self, service: Service) -> None:
        service.engine.script = Script(itl_ms=20)
        body = CHAT.body(service, stream=True, n=3, max_tokens=400)
        async with service.open_stream(CHAT.path(service), body) as response:
            await response.content.readuntil(b'"w3 "')
        await service.oracle(rows=1)
        row = (await service.records())[0]
        assert row["outcome"] == "client_disconnected"
        assert row["completion_tokens"] == sum(service.engine.produced.values())

    async def test_one_choice_that_fails_fails_the_stream(self, service: Service) -> None:
        service.engine.script = Script(error_after=3)
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True, n=3))
        assert b"error" in answer.events()[-1]
        assert b"[DONE]" not in answer.body
        await service.oracle(rows=1)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_that_the_money_cannot_follow_ends_with_length(tight: Service, n: int) -> None:
    await _set_limit(tight, nano=10_000 * n)
    answer = await tight.post(CHAT.path(tight), CHAT.body(tight, stream=True, n=n, max_tokens=4000))
    events = answer.events()
    assert events[-1] == b"[DONE]"
    finishes = [
        choice["finish_reason"]
        for event in events[:-1]
        for choice in orjson.loads(event)["choices"]
        if choice["finish_reason"]
    ]
    assert finishes == ["length"] * n
    await tight.oracle(rows=1)
    row = (await tight.records())[0]
    assert (row["outcome"], row["code"]) == ("finished", "budget_reached")
    assert row["cost_nano"] <= 10_000 * n
    sent = sum(1 for event in events[:-1] for c in orjson.loads(event)["choices"] if c["delta"].get("content"))
    assert row["completion_tokens"] == sent


@pytest.fixture
async def small(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Service]:
    """A service that puts a kilobyte of an answer together at most."""
    async with (
        ScriptedEngine() as engine,
        running_service(tmp_path / "home", checkpoint, engine, gateway={"answer_bytes_max": 1_024}) as service,
    ):
        yield service


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_that_grows_too_large_to_be_put_together_ends_there(small: Service, n: int) -> None:
    answer = await small.post(CHAT.path(small), CHAT.body(small, n=n, max_tokens=4_000))
    choices = answer.json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * n
    assert 1_024 < sum(map(len, texts)) < 1_050
    await small.oracle(rows=1)
    row = (await small.records())[0]
    assert (row["outcome"], row["code"]) == ("finished", "answer_too_large")
    assert row["completion_tokens"] == sum(len(text.split()) for text in texts)
    streamed = await small.post(CHAT.path(small), CHAT.body(small, n=n, max_tokens=1_000, stream=True))
    assert streamed.body.count(b'"content":"w') == 1_000 * n


async def test_more_log_probabilities_than_are_put_together_are_refused_unless_streamed(small: Service) -> None:
    body = CHAT.body(small, max_tokens=2, logprobs=True, top_logprobs=20)
    refused = await small.post(CHAT.path(small), body)
    assert (refused.status, refused.json()["error"]["code"]) == (400, "answer_too_large")
    assert (await small.post(CHAT.path(small), body | {"stream": True})).status == 200
    assert (await small.post(CHAT.path(small), body | {"top_logprobs": 2})).status == 200
    assert (await small.post(CHAT.path(small), {**body, "max_tokens": None})).status == 200
    await small.oracle(rows=3)


def _events_with(outputs: int, *, at_end: int = 0) -> tuple[bytes, ...]:
    """An answer whose outputs come in two chunks, the first token and all others: as from an engine that did not stop
    while its reader stood still. at_end: outputs that come with the finish chunk, as a token that is no text does.
    """
    start = b'{"id":"r","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    usage = b',"usage":{"prompt_tokens":5,"total_tokens":9,"completion_tokens":%d,"prompt_tokens_details":null}}'
    delta = b'"delta":{"content":"%b"},"finish_reason":null}]'
    chunks = [
        start + delta % b"first" + usage % 1 + b"}",
        start + delta % b"others" + usage % outputs + b"}",
        start + b'"delta":{},"finish_reason":"stop"}]' + usage % (outputs + at_end) + b"}",
    ]
    return tuple(b"data: %b\n\n" % chunk for chunk in [*chunks, b"[DONE]"])


@pytest.mark.parametrize("n", [1, 3])
async def test_outputs_that_come_at_once_are_held_before_they_are_relayed(tight: Service, n: int) -> None:
    tight.engine.script = Script(raw=_events_with(400))
    answer = await tight.post(CHAT.path(tight), CHAT.body(tight, stream=True, n=n, max_tokens=4000))
    assert answer.body.count(b"others") == n
    await tight.oracle(rows=1)
    assert (await tight.records())[0]["completion_tokens"] == 400 * n
    assert tight.services.holds.credit.over_hold_nano == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_outputs_that_come_at_once_and_cost_more_than_there_is_are_not_relayed(tight: Service, n: int) -> None:
    tight.engine.script = Script(raw=_events_with(3_900))
    limit_nano = 40_000 * n
    await _set_limit(tight, nano=limit_nano)
    answer = await tight.post(CHAT.path(tight), CHAT.body(tight, stream=True, n=n, max_tokens=4000))
    assert b"others" not in answer.body
    assert answer.body.count(b'"finish_reason":"length"') == n
    assert answer.events()[-1] == b"[DONE]"
    await tight.oracle(rows=1)
    row = (await tight.records())[0]
    assert (row["outcome"], row["code"]) == ("finished", "budget_reached")
    assert row["completion_tokens"] == answer.body.count(b"first")
    assert row["cost_nano"] <= limit_nano
    assert tight.services.holds.credit.over_hold_nano == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_that_ends_where_what_is_held_ends_is_not_cut(tight: Service, n: int) -> None:
    tight.engine.script = Script(raw=_events_with(15, at_end=1))
    body = CHAT.body(tight, stream=True, n=n, max_tokens=4000)
    await tight.post(CHAT.path(tight), body)
    await tight.oracle(rows=1)
    # 600: less than sixteen outputs cost, more than the prompt costs beyond what the script says of it.
    await _set_limit(tight, nano=2 * (await tight.records())[0]["cost_nano"] + 600)
    answer = await tight.post(CHAT.path(tight), body)
    assert answer.body.count(b'"finish_reason":"stop"') == n
    assert b'"finish_reason":"length"' not in answer.body
    await tight.oracle(rows=2)
    ends = [(row["outcome"], row["code"], row["completion_tokens"]) for row in await tight.records()]
    assert ends == [("finished", None, 16 * n)] * 2


async def _set_limit(service: Service, *, nano: int) -> None:
    from tenancy.provisioning import set_limits  # noqa: PLC0415 - a deed of the command line, used here alone

    await service.services.database.call(
        lambda: set_limits(service.services.database, service.account_id, concurrency=None, credit_limit_nano=nano)
    )
    await asyncio.sleep(1)  # the longest that a key's cached principal lives


STREAMED_USAGE = b'{"id":"r","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}],"usage":"many"}'


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [5], "usage": {}},
        {"choices": []},
        {"usage": {"prompt_tokens": 1}},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
        {
            "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": "9"},
        },
        {
            "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": -9},
        },
        {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": None}]},
    ],
)
async def test_a_whole_answer_that_is_none_fails_and_costs_nothing(service: Service, body: dict[str, Any]) -> None:
    service.engine.script = Script(refuse=Refusal(200, orjson.dumps(body), {"content-type": "application/json"}))
    answer = await service.post(CHAT.path(service), CHAT.body(service))
    assert answer.status == 502
    await service.oracle(rows=1)
    row = (await service.records())[0]
    assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_with_counts_that_are_no_counts_ends(service: Service, n: int) -> None:
    service.engine.script = Script(raw=(b"data: " + STREAMED_USAGE + b"\n\n", b"data: [DONE]\n\n"))
    answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True, n=n))
    assert answer.status == 502 or b'"error"' in answer.body
    await service.oracle(rows=1)


async def test_what_the_engine_calls_the_clients_fault_is_the_clients(service: Service) -> None:
    service.engine.script = Script(refuse=Refusal(400, b'{"object":"error","message":"private words","code":400}'))
    for stream in (False, True):
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=stream))
        assert answer.status == 400
        assert b"private words" not in answer.body
        assert "retry-after" not in answer.headers
    await service.oracle(rows=2)
    assert {row["outcome"] for row in await service.records()} == {"refused"}


async def test_a_bias_for_a_token_that_does_not_exist_reaches_no_engine(service: Service) -> None:
    answer = await service.post(CHAT.path(service), CHAT.body(service, logit_bias={"999999999": 100}))
    assert answer.status == 400
    assert b"logit_bias" in answer.body
    assert service.engine.requests == []
    await service.oracle(rows=0)
