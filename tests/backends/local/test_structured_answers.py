"""Structured answers and tool calls over the engine's HTTP surface, in the bytes that a gateway gets."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.backends.local.test_server import CHAT, TEXT, Client
from tests.engines import LocalEngine, start_local_engine

pytestmark = pytest.mark.engine

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Köln"]}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
            },
        },
    }
]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300}


@pytest.fixture(scope="module")
def process(tiny_checkpoint: Path) -> Iterator[LocalEngine]:
    with start_local_engine(tiny_checkpoint, served_model_name="tiny", kv_cache_bytes=8 << 20) as engine:
        yield engine


@pytest.fixture
async def client(process: LocalEngine) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(process.url, session)


async def test_calls_stream_as_openais_deltas(client: Client) -> None:
    for seed in range(5):
        payloads = await client.events(
            tools=TOOLS, tool_choice="required", seed=seed, stream_options={"include_usage": True}, **SAMPLED
        )
        assert payloads[-1] == b"[DONE]"
        chunks = [orjson.loads(payload) for payload in payloads[:-1]]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        for choice in choices[1:-1]:
            (fragment,) = choice["delta"]["tool_calls"]
            if "id" in fragment:
                assert fragment["index"] == len(calls)
                assert fragment["function"]["arguments"] == ""
                calls[fragment["index"]] = fragment
            else:
                calls[fragment["index"]]["function"]["arguments"] += fragment["function"]["arguments"]
        assert [choice["finish_reason"] for choice in choices[1:-1]] == [None] * len(choices[1:-1])
        assert choices[-1]["delta"] == {}
        if choices[-1]["finish_reason"] == "length":
            calls.popitem()
        else:
            assert choices[-1]["finish_reason"] == "tool_calls"
        for call in calls.values():
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Köln")
        assert len({call["id"] for call in calls.values()}) == len(calls)


async def test_a_whole_answer_has_the_calls_that_a_stream_has(client: Client) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 7,
        **SAMPLED,
    }
    choice = (await client.ask(**fields))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    streamed = "".join(
        fragment["function"]["arguments"]
        for payload in (await client.events(**fields))[:-1]
        for fragment in orjson.loads(payload)["choices"][0]["delta"].get("tool_calls", [])
    )
    assert call["function"] == {"name": "get_weather", "arguments": streamed}


async def test_usage_rides_on_the_last_chunk_of_a_delivery(client: Client) -> None:
    payloads = await client.events(
        tools=TOOLS, tool_choice="required", stream_options={"continuous_usage_stats": True}, **SAMPLED
    )
    counts = [orjson.loads(payload)["usage"]["completion_tokens"] for payload in payloads if b'"usage"' in payload]
    assert counts == sorted(set(counts))
    assert counts


async def test_a_client_that_stops_a_call_halfway_gets_no_call_that_is_whole(client: Client) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "stop": '"city"', **SAMPLED}
    choice = (await client.ask(**fields))["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_json_streams_and_is_whole_in_the_end(client: Client, path: str) -> None:
    schema = TOOLS[0]["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    payloads = await client.events(path, response_format=form, **SAMPLED)
    parts = [orjson.loads(payload)["choices"][0] for payload in payloads[:-1]]
    text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
    assert set(json.loads(text)) == {"city", "days"}
    assert parts[-1]["finish_reason"] == "stop"


async def test_regular_expressions_and_grammars_hold(client: Client) -> None:
    assert await client.text(regex="(yes|no)!") in ("yes!", "no!")
    assert await client.text(ebnf='root ::= "a" "b"+ "c"', max_tokens=300) in [
        "a" + "b" * n + "c" for n in range(1, 300)
    ]


async def test_tools_that_may_not_be_called_leave_the_answer_alone(client: Client) -> None:
    plain = await client.text(max_tokens=20)
    assert await client.text(tools=TOOLS, tool_choice="none", max_tokens=20) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "("}, {"ebnf": "root ::= ("}, {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": TOOLS, "tool_choice": "never"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
    ],
    ids=lambda fields: str(fields)[:50],
)  # fmt: skip
async def test_a_form_that_cant_be_held_is_a_400(client: Client, fields: dict[str, Any]) -> None:
    status, answer = await client.post(CHAT, input_ids=[1, 2], **fields)
    assert (status, answer["object"]) == (400, "error")


async def test_a_template_without_tools_is_told_of_them_in_words(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = (await client.ask(messages=messages, max_tokens=1, input_ids=None))["usage"]["prompt_tokens"]
    told = await client.ask(messages=messages, tools=TOOLS, max_tokens=1, input_ids=None)
    assert told["usage"]["prompt_tokens"] > plain + 50
