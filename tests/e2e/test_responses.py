"""The Responses API as the openai package drives it, over real sockets: answers, events, records, ends."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service

PREFIXES = ["/v1", "/client/v4/accounts/{account}/ai/v1"]


@pytest.fixture(params=PREFIXES)
async def client(service: Service, request: pytest.FixtureRequest) -> AsyncIterator[openai.AsyncOpenAI]:
    prefix = request.param.format(account=service.account_id)
    async with openai.AsyncOpenAI(
        base_url=service.base_url + prefix, api_key=service.api_key, max_retries=0, timeout=10
    ) as client:
        yield client


async def test_an_answer_and_its_record_agree(client: openai.AsyncOpenAI, service: Service) -> None:
    service.engine.steer(usage={"cached_tokens": 2})
    answer = await client.responses.create(
        model=service.model, input="hi", instructions="Count.", max_output_tokens=3, temperature=0, top_p=0.5
    )
    assert answer.output_text == "w0 w1 w2 "
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    row = await service.record(answer.id)
    usage: Any = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (row["prompt_tokens"], row["completion_tokens"])
    assert usage.input_tokens_details.cached_tokens == row["cached_tokens"] == 2
    assert usage.cost == row["cost"]
    assert (row["endpoint"], row["outcome"], row["finish_reason"]) == ("responses", "finished", "length")
    await service.oracle(rows=1)


async def test_an_answer_that_ended_by_itself_is_completed(client: openai.AsyncOpenAI, service: Service) -> None:
    service.engine.steer(tokens=2)
    answer = await client.responses.create(model=service.model, input=[{"role": "user", "content": "hi"}])
    assert (answer.status, answer.output_text) == ("completed", "w0 w1 ")
    again = await client.responses.create(
        model=service.model,
        input=[
            {"role": "user", "content": "hi"},
            *[item.model_dump() for item in answer.output],  # type: ignore[list-item]  # as its manual does
            {"role": "user", "content": "more"},
        ],
    )
    assert again.status == "completed"
    assert again.usage is not None
    assert answer.usage is not None
    assert again.usage.input_tokens > answer.usage.input_tokens
    await service.oracle(rows=2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_kept_response_is_gone_on_from_and_can_be_read_and_deleted(
    client: openai.AsyncOpenAI, service: Service, *, stream: bool
) -> None:
    service.engine.steer(tokens=2)
    ask = client.responses.create
    if stream:
        events = await ask(model=service.model, input="hi", instructions="Be kind.", store=True, stream=True)
        first = [event async for event in events][-1].response  # type: ignore[union-attr]  # the last one has it
    else:
        first = await ask(model=service.model, input="hi", instructions="Be kind.", store=True)
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text == "w0 w1 "
    second = await ask(model=service.model, input="more", previous_response_id=first.id, store=True)
    assert second.previous_response_id == first.id
    whole = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "w0 w1 "},
        {"role": "user", "content": "more"},
    ]
    written = await ask(model=service.model, input=whole)  # type: ignore[arg-type]  # plain dictionaries
    prompts = [received.body["input_ids"] for received in service.engine.requests]
    assert prompts[1] == prompts[2], "the conversation without the instructions of its first turn"
    with pytest.raises(openai.BadRequestError) as streamed:  # else it would read a stream without an event
        await client.responses.retrieve(first.id, stream=True)
    assert streamed.value.param == "stream"
    await client.responses.delete(first.id)
    for lost in (first.id, written.id, "resp_of_nobody"):
        with pytest.raises(openai.NotFoundError) as refused:
            await ask(model=service.model, input="more", previous_response_id=lost)
        assert (refused.value.code, refused.value.param) == ("response_not_found", "previous_response_id")
    items = client.responses.input_items
    given = [item async for item in items.list(second.id, limit=2)]
    told = [item.model_dump() for item in given]
    assert [(one["role"], one["content"][0]["text"]) for one in told] == [
        ("user", "more"),
        ("assistant", "w0 w1 "),
        ("user", "hi"),
    ]
    in_order = [item.id async for item in items.list(second.id, limit=1, order="asc")]
    assert in_order == [item.id for item in reversed(given)]
    with pytest.raises(openai.NotFoundError):
        await items.list(first.id)
    third = await ask(model=service.model, input="and more", previous_response_id=second.id)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens, "who went on from it holds what was said"
    await service.oracle(rows=4)


async def test_a_stream_tells_every_event_in_order(client: openai.AsyncOpenAI, service: Service) -> None:
    service.engine.steer(tokens=2)
    stream = await client.responses.create(model=service.model, input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "w0 w1 "
    usage: Any = last.response.usage
    row = await service.record(last.response.id)
    assert (usage.output_tokens, usage.cost) == (2, row["cost"])
    await service.oracle(rows=1)


async def test_the_accumulating_helper_reads_the_stream(client: openai.AsyncOpenAI, service: Service) -> None:
    service.engine.steer(tokens=3)
    async with client.responses.stream(model=service.model, input="hi") as stream:
        final = await stream.get_final_response()
    assert final.output_text == "w0 w1 w2 "
    assert final.status == "completed"


async def test_a_stream_whose_engine_dies_ends_in_a_failed_response_and_costs_nothing(
    client: openai.AsyncOpenAI, service: Service
) -> None:
    service.engine.steer(die_after=2, itl_ms=5)
    stream = await client.responses.create(model=service.model, input="hi", max_output_tokens=9, stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    await service.oracle(rows=1)
    row = (await service.records())[0]
    assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)


async def test_a_closed_stream_stops_the_engine(client: openai.AsyncOpenAI, service: Service) -> None:
    service.engine.steer(itl_ms=10)
    stream = await client.responses.create(model=service.model, input="hi", max_output_tokens=400, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await service.oracle(rows=1)
    assert (await service.records())[0]["outcome"] == "client_disconnected"


async def test_what_is_not_served_yet_is_a_bad_request_that_names_it(
    client: openai.AsyncOpenAI, service: Service
) -> None:
    refused: list[dict[str, Any]] = [
        {"background": True},
        {"conversation": "conv_1"},
    ]
    for fields in refused:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.responses.create(model=service.model, input="hi", **fields)
        assert (bad.value.code, bad.value.param) == ("unsupported_parameter", next(iter(fields)))
    await service.oracle(rows=0)


async def test_a_repeated_idempotency_key_is_answered_once(service: Service, engine: ScriptedEngine) -> None:
    body = {"model": service.model, "input": "hi", "max_output_tokens": 2}
    headers = {"idempotency-key": "one"}
    first, second = [await service.post("/v1/responses", body, headers=headers) for _ in range(2)]
    assert first.body == second.body
    for other in ({"store": True}, {"metadata": {"of": "another"}}):
        assert (await service.post("/v1/responses", {**body, **other}, headers=headers)).status == 422
    assert len(engine.requests) == 1
    await service.oracle(rows=1)
