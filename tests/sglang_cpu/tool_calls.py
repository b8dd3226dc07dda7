"""Tools at a real SGLang whose weights are random, so that it calls what it is held to and nothing else.

Used by test_real_sglang.py.
"""

import json
from typing import Any

import openai
import orjson

from backends.tool_marks import in_plain_turns
from tests.backends import test_engine_contract as contract

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("get_weather", PARAMETERS), ("now", NOTHING))
]
NAMED = {"type": "function", "function": {"name": "now"}}


async def chosen_calls_are_made(client: openai.AsyncOpenAI, model: str) -> None:
    """required, any and a named function: a call of the tool's own parameters, whole and streamed alike but for its id.

    Random weights never stop by themselves, so that the answer ends at its length, behind the call.
    """
    ids = []
    for choice, names in (("required", {"get_weather", "now"}), ("any", {"get_weather", "now"}), (NAMED, {"now"})):
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "How is the weather?"}],
            "tools": TOOLS,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": 150,
        }
        answer = (await client.chat.completions.create(**asked)).choices[0]
        call = (answer.message.tool_calls or [])[0]
        name, arguments = call.function.name, json.loads(call.function.arguments)
        assert name in names
        assert set(arguments) == ({"city", "days"} if name == "get_weather" else set())
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        told = [chunk.choices[0] for chunk in chunks if chunk.choices]
        deltas = [call for choice in told for call in choice.delta.tool_calls or [] if call.index == 0]
        # Nor is an id that is null in any piece: the key is left out.
        [first] = [delta for delta in deltas if "id" in delta.model_fields_set]
        assert first.function is not None
        assert first.function.name == name
        text = "".join(delta.function.arguments or "" for delta in deltas if delta.function is not None)
        assert json.loads(text) == arguments
        ids += [call.id, first.id]
    assert len(set(ids)) == 6


async def tools_may_be_left_alone(client: openai.AsyncOpenAI, model: str) -> None:
    """none forbids them, auto offers them: text comes, and the finish reason is a text's."""
    for choice in ("none", "auto"):
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Say something."}],
            "tools": TOOLS,
            "tool_choice": choice,
            "temperature": 0,
            "max_tokens": 8,
        }
        answer = await client.chat.completions.create(**asked)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls


async def our_written_form_is_read_back(engine: contract.Engine) -> None:
    """What a template without tools has its model write is what SGLang's parser makes calls of, left free to choose."""
    calls = [
        {"function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}},
        {"function": {"name": "now", "arguments": "{}"}},
    ]
    [turn] = in_plain_turns([{"role": "assistant", "content": "", "tool_calls": calls}], (), "auto")
    # The grammar back end makes this model write it; SGLang does not know what it will be.
    held = "".join(f"\\{sign}" if sign in "{}[]().*+?|" else sign for sign in turn["content"])
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "regex": held, "max_tokens": 400}
    whole = (await engine.ask(contract.PATHS[0], **asked))["choices"][0]
    said = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole["message"]["tool_calls"]
    ]
    assert said == [("get_weather", {"city": "Oslo", "days": 2}), ("now", {})]
    assert whole["finish_reason"] == "tool_calls"
    streamed: dict[int, list[str]] = {}
    for payload in await engine.stream(contract.PATHS[0], **asked):
        if payload == b"[DONE]":
            continue
        for choice in orjson.loads(payload)["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                parts = streamed.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
    assert [(name, json.loads(text)) for name, text in streamed.values()] == said
