"""The Responses API over the whole application: what reaches the gateway, and every event in its order."""

import asyncio
import json
from functools import cache
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from api.app import create_app
from backends.errors import EngineBroke
from gateway.errors import CapacityExceeded, GenerationFailed, PromptTooLong
from gateway.request import Completion, Endpoint, OutputCap
from tests.api.exchange import Exchange, exchange, get, post
from tests.examples import examples
from tests.fakes import (
    ACCOUNT,
    CREATED,
    FINISH_CHUNK,
    MODEL,
    ROLE_CHUNK,
    SETTLEMENT,
    Fakes,
    FakeStream,
    chat_completion,
    chunk,
    content_chunk,
    until,
)

RESPONSES = "/v1/responses"
PREFIXES = ["/v1", f"/client/v4/accounts/{ACCOUNT}/ai/v1"]
USAGE = {
    "input_tokens": 11,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 9,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 20,
    "cost": "0.00004329",
}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


def cut_short(reason: str) -> Completion:
    choice = {**chat_completion().choices[0], "finish_reason": reason}
    return Completion(CREATED, (choice,), OutputCap(9, clamped=False), SETTLEMENT)


def events(answer: Exchange) -> list[dict[str, Any]]:
    """Each event's data; its name stands beside it, and numbers have no gaps."""
    found = []
    frames = answer.body.decode().split("\n\n")
    assert frames.pop() == ""
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


class TestWholeAnswers:
    @pytest.mark.parametrize("prefix", PREFIXES)
    async def test_are_response_objects(self, app: ASGIApp, prefix: str) -> None:
        answer = await post(app, f"{prefix}/responses", asked(instructions="Be brief.", metadata={"a": "b"}))
        request_id = answer.headers["x-request-id"]
        assert answer.json == {
            "id": request_id,
            "object": "response",
            "created_at": CREATED,
            "status": "completed",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": "Be brief.",
            "max_output_tokens": None,
            "metadata": {"a": "b"},
            "model": MODEL,
            "output": [
                {
                    "id": f"msg_{request_id}-0",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}],
                }
            ],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": USAGE,
        }
        assert answer.headers["cf-ai-neurons"] == "3.9354"

    @pytest.mark.parametrize(
        ("finish_reason", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
    )
    async def test_that_were_cut_are_incomplete(
        self, app: ASGIApp, fakes: Fakes, finish_reason: str, reason: str
    ) -> None:
        fakes.pipeline.completes = cut_short(finish_reason)
        answer = (await post(app, RESPONSES, asked())).json
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert answer["output"][0]["status"] == "incomplete"

    async def test_put_reasoning_in_an_item_before_the_message(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = chat_completion(reasoning_content="Hm.")
        reasoning, message = (await post(app, RESPONSES, asked())).json["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert (reasoning["type"], reasoning["summary"], message["type"]) == ("reasoning", [], "message")
        assert message["id"].endswith("-1")

    async def test_say_what_was_lowered_and_what_was_ignored(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = chat_completion(cap=OutputCap(64, clamped=True))
        answer = await post(app, RESPONSES, asked(reasoning={"effort": "low"}, max_output_tokens=99))
        assert answer.headers["x-pagegate-max-tokens"] == "64"
        assert answer.headers["x-ignored-params"] == "reasoning"
        assert answer.json["max_output_tokens"] == 99


class TestRequests:
    async def test_reach_the_gateway_as_chats(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(app, RESPONSES, asked(max_output_tokens=7, temperature=0.5, top_p=0.9))
        (request,) = fakes.pipeline.requests
        assert (request.endpoint, request.route, request.max_tokens) == (Endpoint.CHAT, "responses", 7)
        assert request.messages == ({"role": "user", "content": "hi"},)
        assert request.sampling == {"temperature": 0.5, "top_p": 0.9}

    async def test_bring_instructions_and_items_into_one_conversation(self, app: ASGIApp, fakes: Fakes) -> None:
        items = [
            {"role": "developer", "content": "Also."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "Two", "annotations": []},
                    {"type": "refusal", "refusal": "!"},
                ],
            },
            {"role": "user", "content": "Three"},
        ]
        await post(app, RESPONSES, asked(input=items, instructions="First."))
        assert fakes.pipeline.requests[0].messages == (
            {"role": "system", "content": "First.\n\nAlso."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two!"},
            {"role": "user", "content": "Three"},
        )

    async def test_may_repeat_what_an_answer_gave(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = chat_completion(reasoning_content="Hm.")
        output = (await post(app, RESPONSES, asked())).json["output"]
        again = await post(app, RESPONSES, asked(input=[*output, {"role": "user", "content": "And?"}]))
        assert again.status == 200
        assert fakes.pipeline.requests[1].messages == (
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "And?"},
        )

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "store": True, "truncation": "disabled"},
            {"text": {"format": {"type": "text"}, "verbosity": "low"}, "include": ["reasoning.encrypted_content"]},
            {"background": False, "previous_response_id": None, "n": 1, "top_logprobs": 0, "include": []},
            {"max_output_tokens": 5, "max_tokens": 5, "user": "u", "stream_options": {"include_obfuscation": False}},
        ],
    )
    async def test_may_say_what_changes_nothing(self, app: ASGIApp, fields: dict[str, Any]) -> None:
        answer = await post(app, RESPONSES, asked(**fields))
        assert answer.status == 200, answer.body
        assert "x-ignored-params" not in answer.headers

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"prompt": {"id": "pmpt_1"}}, "prompt"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"include": ["message.output_text.logprobs"]}, "include[0]"),
            ({"n": 2}, "n"),
            ({"lora": "x"}, "lora"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "input[0].content[0]",
            ),
        ],
    )
    async def test_for_what_is_not_served_are_refused_by_name(
        self, app: ASGIApp, fakes: Fakes, fields: dict[str, Any], param: str
    ) -> None:
        answer = await post(app, RESPONSES, asked(**fields))
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "unsupported_parameter", param)
        assert fakes.pipeline.requests == []

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"type": "reasoning"}]}, "input"),
            ({"input": [{"role": "user", "content": "x"}] * 2_048}, "input"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
            ({"input": [{"content": "x"}]}, "input[0].role"),
            ({"input": [{"type": "thing"}]}, "input[0].type"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
            ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
            (
                {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}}},
                "text.format.schema.type",
            ),
            ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
            ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, "input[0].content[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 5, "max_tokens": 6}, "max_output_tokens"),
            ({"temperature": 2.5}, "temperature"),
            ({"metadata": {"a": []}}, "metadata"),
        ],
    )
    async def test_with_faults_are_refused_with_their_place(
        self, app: ASGIApp, fields: dict[str, Any], param: str
    ) -> None:
        answer = await post(app, RESPONSES, asked(**fields))
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "invalid_parameter", param)

    async def test_that_the_gateway_refuses_are_refused_in_this_dialect(self, app: ASGIApp, fakes: Fakes) -> None:
        for stream in (False, True):
            fakes.pipeline.completes = fakes.pipeline.streams = PromptTooLong(prompt_tokens=9, limit_tokens=8)
            answer = await post(app, RESPONSES, asked(stream=stream))
            assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
            fakes.pipeline.completes = fakes.pipeline.streams = CapacityExceeded("Full.", retry_after_s=3)
            answer = await post(app, RESPONSES, asked(stream=stream))
            assert (answer.status, answer.headers["retry-after"]) == (429, "3")


OPENING = ["response.created", "response.in_progress"]
ADDED = ["response.output_item.added", "response.content_part.added"]
DONE = ["response.content_part.done", "response.output_item.done"]


class TestStreams:
    async def stream(self, fakes: Fakes, *payloads: bytes, **fields: Any) -> Exchange:
        fakes.pipeline.streams = FakeStream(*payloads, **fields)
        return await post(create_app(fakes.services), RESPONSES, asked(stream=True))

    async def test_tell_every_event_in_order(self, fakes: Fakes) -> None:
        answer = await self.stream(fakes, ROLE_CHUNK, content_chunk("Par"), content_chunk("is"), FINISH_CHUNK)
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
        assert [event["type"] for event in found] == [
            *OPENING,
            *ADDED,
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            *DONE,
            "response.completed",
        ]
        created, _, item_added, part_added, first, second, said, part_done, item_done, completed = found
        assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
        assert created["response"]["usage"] is None
        place = {"item_id": item_added["item"]["id"], "output_index": 0, "content_index": 0}
        for event in (part_added, first, second, said, part_done):
            assert place.items() <= event.items()
        assert (item_added["item"]["content"], part_added["part"]["text"]) == ([], "")
        assert (first["delta"], second["delta"], said["text"]) == ("Par", "is", "Paris")
        assert item_done["item"]["content"] == [part_done["part"]]
        assert completed["response"]["output"] == [item_done["item"]]
        assert completed["response"]["usage"] == USAGE

    async def test_end_in_what_a_whole_answer_would_be(self, fakes: Fakes) -> None:
        whole = (await post(create_app(fakes.services), RESPONSES, asked())).json
        answer = await self.stream(fakes, ROLE_CHUNK, content_chunk("Paris."), FINISH_CHUNK)
        text = orjson.dumps(events(answer)[-1]["response"]).decode()
        assert json.loads(text.replace(answer.headers["x-request-id"], whole["id"])) == whole

    async def test_give_reasoning_its_own_item(self, fakes: Fakes) -> None:
        thought = chunk(b'{"reasoning_content":"Hm","content":null}')
        answer = await self.stream(fakes, ROLE_CHUNK, thought, thought, content_chunk("Hi"), FINISH_CHUNK)
        found = events(answer)
        assert [event["type"] for event in found] == [
            *OPENING,
            *ADDED,
            "response.reasoning_text.delta",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            *DONE,
            *ADDED,
            "response.output_text.delta",
            "response.output_text.done",
            *DONE,
            "response.completed",
        ]
        assert [event["output_index"] for event in found if "output_index" in event] == [0] * 7 + [1] * 6
        reasoning, message = found[-1]["response"]["output"]
        assert reasoning["content"][0]["text"] == "HmHm"
        assert message["content"][0]["text"] == "Hi"

    async def test_that_are_cut_end_as_incomplete(self, fakes: Fakes) -> None:
        answer = await self.stream(fakes, content_chunk("Par"), chunk(b"{}", b'"length"'))
        *_, item_done, last = events(answer)
        assert item_done["item"]["status"] == "incomplete"
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["usage"] == USAGE

    async def test_without_a_word_still_have_their_message(self, fakes: Fakes) -> None:
        found = events(await self.stream(fakes, ROLE_CHUNK, FINISH_CHUNK))
        assert [event["type"] for event in found] == [
            *OPENING,
            *ADDED,
            "response.output_text.done",
            *DONE,
            "response.completed",
        ]

    async def test_that_fail_say_so_in_their_last_event(self, fakes: Fakes) -> None:
        error = GenerationFailed("The engine failed while generating. You are not charged.")
        error.__cause__ = EngineBroke("secret detail")
        answer = await self.stream(fakes, ROLE_CHUNK, content_chunk("Par"), error=error)
        last = events(answer)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"]["code"] == "server_error"
        assert "not charged" in last["response"]["error"]["message"]
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["output"][0]["content"][0]["text"] == "Par"
        assert "secret" not in answer.body.decode()

    async def test_are_closed_when_the_client_leaves(self, fakes: Fakes) -> None:
        stream = FakeStream(ROLE_CHUNK, content_chunk("Hi"), hangs=True)
        fakes.pipeline.streams = stream
        running = exchange(create_app(fakes.services), "POST", RESPONSES, body=asked(stream=True)).start()
        await running.until_sent(5)
        running.leave()
        await running.ended()
        await until(lambda: stream.closed == 1)


async def test_the_document_describes_the_body(app: ASGIApp) -> None:
    described = (await get(app, "/openapi.json")).json["paths"]
    body = described[RESPONSES]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "input", "instructions", "max_output_tokens", "stream"} <= set(body["properties"])
    assert "$defs" not in body


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=9) | st.sampled_from(["user", "message"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=8,
)
names = [
    "instructions", "max_output_tokens", "metadata", "store", "background", "include", "text", "truncation", "tools",
    "tool_choice", "stream", "temperature", "previous_response_id", "reasoning", "n", "top_logprobs",
]  # fmt: skip
items = st.fixed_dictionaries({}, optional={"type": values, "role": values, "content": values})
bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL), "input": values | st.lists(items, max_size=3)}, optional=dict.fromkeys(names, values)
)


@cache
def fuzzed() -> tuple[ASGIApp, Fakes]:
    fakes = Fakes()
    return create_app(fakes.services), fakes


@pytest.mark.load
@settings(max_examples=examples(80), deadline=None)
@given(bodies)
def test_no_body_makes_a_500(body: dict[str, Any]) -> None:
    app, fakes = fuzzed()
    fakes.pipeline.streams = FakeStream(FINISH_CHUNK)
    with structlog.testing.capture_logs():
        answer = asyncio.run(exchange(app, "POST", RESPONSES, body=json.dumps(body).encode()).run())
    # 404: of an answer to go on from that isn't kept.
    assert answer.status in {200, 400, 404}, answer.body
