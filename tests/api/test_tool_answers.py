"""Tool calls and JSON answers in the shapes of every dialect, whole and streamed."""

import json
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from gateway.request import Completion
from tests.api.exchange import post
from tests.fakes import (
    ACCOUNT,
    CAP,
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
)

CHAT = "/v1/chat/completions"
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
RESPONSES = "/v1/responses"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}},
]
NATIVE = [
    {"id": "call_a", "name": "get_weather", "arguments": {"city": "Köln"}},
    {"id": "call_b", "name": "get_weather", "arguments": {}},
]


def called(calls: list[dict[str, Any]], content: str | None = None, finish_reason: str = "tool_calls") -> Completion:
    told = [{**call, "index": at} for at, call in enumerate(calls)]
    (choice,) = chat_completion(content or "", tool_calls=told).choices
    choice |= {"finish_reason": finish_reason}
    choice["message"]["content"] = content
    return Completion(CREATED, (choice,), CAP, SETTLEMENT)


def fragment(index: int, arguments: str, begun: dict[str, Any] | None = None) -> bytes:
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if begun is not None:
        call |= {"id": begun["id"], "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    return chunk(orjson.dumps({"tool_calls": [call]}))


def calling_stream() -> FakeStream:
    return FakeStream(
        ROLE_CHUNK,
        content_chunk("Let me see."),
        fragment(0, "", CALLS[0]),
        fragment(0, '{"city": '),
        fragment(0, '"Köln"}'),
        fragment(1, "", CALLS[1]),
        fragment(1, "{}"),
        chunk(b"{}", b'"tool_calls"'),
    )


def payloads(body: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class TestChat:
    async def test_tells_calls_as_openai_does(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = called(CALLS)
        answer = (await post(app, CHAT, {"model": MODEL, "messages": MESSAGES, "tools": [TOOL]})).json
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": CALLS}
        assert choice["finish_reason"] == "tool_calls"
        assert fakes.pipeline.requests[0].sampling == {"tools": [TOOL], "tool_choice": "auto"}

    async def test_passes_the_engines_deltas_on_untouched(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = calling_stream()
        sent = [b"data: %b\n\n" % payload for payload in calling_stream()._payloads]
        body = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "stream": True}
        assert (await post(app, CHAT, body)).body == b"".join(sent) + b"data: [DONE]\n\n"


class TestRun:
    async def test_tells_calls_in_both_shapes(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = called(CALLS)
        result = (await post(app, RUN, {"messages": MESSAGES, "tools": [TOOL["function"]]})).json["result"]
        assert (result["response"], result["tool_calls"]) == ("", NATIVE)
        assert result["choices"][0]["message"]["tool_calls"] == CALLS
        assert result["choices"][0]["finish_reason"] == "tool_calls"

    async def test_streams_each_call_whole(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = calling_stream()
        answer = await post(app, RUN, {"messages": MESSAGES, "tools": [TOOL["function"]], "stream": True})
        frames = payloads(answer.body)
        assert [frame["response"] for frame in frames] == ["Let me see.", "", "", ""]
        calls = [call for frame in frames for call in frame.get("tool_calls", [])]
        assert calls == [{"index": at, **call} for at, call in enumerate(NATIVE)]
        assert frames[-1]["finish_reason"] == "tool_calls"
        assert all(frame["p"] for frame in frames)
        assert answer.body.endswith(b"data: [DONE]\n\n")

    async def test_gives_arguments_that_were_cut_as_the_text_they_are(self, app: ASGIApp, fakes: Fakes) -> None:
        cut = {**CALLS[0], "function": {"name": "get_weather", "arguments": '{"ci'}}
        fakes.pipeline.completes = called([cut], finish_reason="length")
        result = (await post(app, RUN, {"messages": MESSAGES, "tools": [TOOL]})).json["result"]
        assert result["tool_calls"] == [{"id": "call_a", "name": "get_weather", "arguments": '{"ci'}]
        assert result["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize(
        ("text", "response"),
        [('{"a": [1, "ü"]}', {"a": [1, "ü"]}), ("7", 7), ('"x"', "x"), ('{"a": ', '{"a": '), ("", "")],
    )
    @pytest.mark.parametrize(
        "form",
        [
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            {"guided_json": {"type": "object"}},
        ],
        ids=str,
    )
    async def test_in_json_mode_is_the_value_and_the_choice_its_text(
        self, app: ASGIApp, fakes: Fakes, text: str, response: Any, form: dict[str, Any]
    ) -> None:
        fakes.pipeline.completes = chat_completion(text)
        result = (await post(app, RUN, {"messages": MESSAGES, **form})).json["result"]
        assert result["response"] == response
        assert result["choices"][0]["message"]["content"] == text

    async def test_json_mode_streams_text(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = FakeStream(ROLE_CHUNK, content_chunk("{"), content_chunk("}"), FINISH_CHUNK)
        body = {"prompt": "a", "response_format": {"type": "json_object"}, "stream": True}
        frames = payloads((await post(app, RUN, body)).body)
        assert "".join(frame["response"] for frame in frames) == "{}"

    async def test_a_text_that_looks_like_json_stays_text(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = chat_completion("7")
        assert (await post(app, RUN, {"prompt": "a"})).json["result"]["response"] == "7"


class TestResponses:
    async def test_tells_calls_as_items(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = called(CALLS, "Let me see.")
        tools = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]  # a literal above
        answer = (await post(app, RESPONSES, {"model": MODEL, "input": "hi", "tools": tools})).json
        assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
        told = [(item["call_id"], item["name"], item["arguments"]) for item in answer["output"][1:]]
        assert told == [("call_a", "get_weather", '{"city": "Köln"}'), ("call_b", "get_weather", "{}")]
        assert len({item["id"] for item in answer["output"]}) == 3
        assert answer["tools"] == tools

    async def test_of_calls_alone_have_no_message(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = called(CALLS)
        answer = (await post(app, RESPONSES, {"model": MODEL, "input": "hi", "tools": [TOOL]})).json
        assert [item["type"] for item in answer["output"]] == ["function_call", "function_call"]

    async def test_stream_calls_event_by_event(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = calling_stream()
        body = {"model": MODEL, "input": "hi", "tools": [TOOL], "stream": True}
        events = payloads((await post(app, RESPONSES, body)).body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        begun = [event["item"] for event in events if event["type"] == "response.output_item.added"][1:]
        assert [(item["call_id"], item["arguments"]) for item in begun] == [("call_a", ""), ("call_b", "")]
        ended = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert [event["arguments"] for event in ended] == ['{"city": "Köln"}', "{}"]
        output = events[-1]["response"]["output"]
        assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]

    async def test_read_earlier_calls_and_results_as_turns(self, app: ASGIApp, fakes: Fakes) -> None:
        call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
        items = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            call,
            {**call, "call_id": "c2", "arguments": "{broken"},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
        ]
        await post(app, RESPONSES, {"model": MODEL, "input": items, "tools": [TOOL]})
        messages = fakes.pipeline.requests[0].messages
        assert messages is not None
        assert [turn["role"] for turn in messages] == ["user", "assistant", "tool", "tool"]
        assert messages[1]["content"] == "Let me see."
        arguments = [one["function"]["arguments"] for one in messages[1]["tool_calls"]]
        assert arguments == [{"a": 1}, "{broken"]
        assert [(turn["tool_call_id"], turn["content"]) for turn in messages[2:]] == [("c1", "4"), ("c2", "5")]

    async def test_take_a_format_for_their_text(self, app: ASGIApp, fakes: Fakes) -> None:
        form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
        answer = (await post(app, RESPONSES, {"model": MODEL, "input": "hi", "text": {"format": form}})).json
        assert answer["text"] == {"format": form}
        sent = fakes.pipeline.requests[0].sampling["response_format"]
        assert sent["json_schema"] == {"name": "x", "schema": {"type": "object"}, "strict": True}
