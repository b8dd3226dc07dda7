"""A stream put together equals the whole answer."""

import tracemalloc
from typing import Any

import orjson

from gateway.assemble import Assembly
from gateway.request import Endpoint


def chunk(index: int, **fields: Any) -> bytes:
    return orjson.dumps({"id": "r", "choices": [{"index": index, "finish_reason": None, "logprobs": None, **fields}]})


def test_texts_of_interleaved_choices_come_apart_in_order() -> None:
    assembly = Assembly(Endpoint.CHAT)
    for payload in (
        chunk(1, delta={"role": "assistant", "content": ""}),
        chunk(0, delta={"role": "assistant", "content": ""}),
        chunk(0, delta={"content": "Pa"}),
        chunk(1, delta={"content": "北"}),
        chunk(0, delta={"content": "ris"}),
        chunk(1, delta={}, finish_reason="length"),
        chunk(0, delta={}, finish_reason="stop"),
    ):
        assembly.add(payload)
    first, second = assembly.choices()
    assert first["message"] == {"role": "assistant", "content": "Paris"}
    assert (first["index"], first["finish_reason"]) == (0, "stop")
    assert second["message"]["content"] == "北"
    assert second["finish_reason"] == "length"


def test_log_probabilities_grow_list_by_list() -> None:
    chat = Assembly(Endpoint.CHAT)
    chat.add(chunk(0, delta={"content": "a"}, logprobs={"content": [{"token": "a"}]}))
    chat.add(chunk(0, delta={"content": "b"}, logprobs={"content": [{"token": "b"}]}))
    assert _read(chat.choices()[0]["logprobs"]) == {"content": [{"token": "a"}, {"token": "b"}]}
    plain = Assembly(Endpoint.COMPLETIONS)
    plain.add(chunk(0, text="a", logprobs={"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None}))
    plain.add(chunk(0, text="b", logprobs={"tokens": ["b"], "token_logprobs": [-2.0], "top_logprobs": None}))
    choice = plain.choices()[0]
    assert choice["text"] == "ab"
    assert _read(choice["logprobs"]) == {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": None}


def test_log_probabilities_take_little_more_than_their_bytes() -> None:
    alternatives = [{"token": f" token {at}", "logprob": -at / 7, "bytes": [32, *range(12)]} for at in range(20)]
    payload = chunk(0, delta={"content": "a"}, logprobs={"content": [alternatives[0] | {"top_logprobs": alternatives}]})
    assembly = Assembly(Endpoint.CHAT)
    tracemalloc.start()
    for _ in range(300):
        assembly.add(payload)
    taken, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 280 * len(payload) < assembly.taken_bytes < 300 * len(payload)
    assert taken < 1.2 * assembly.taken_bytes
    assert most < 1.2 * assembly.taken_bytes + 100 * len(payload)
    assert len(orjson.dumps(assembly.choices())) > assembly.taken_bytes


def test_an_answer_that_is_cut_short_is_too_long_unless_it_had_finished() -> None:
    assembly = Assembly(Endpoint.COMPLETIONS)
    for index, finish_reason in ((0, None), (1, "stop")):
        assembly.add(chunk(index, text="Paris", finish_reason=finish_reason))
    assembly.cut_short()
    assert [choice["finish_reason"] for choice in assembly.choices()] == ["length", "stop"]
    assert assembly.taken_bytes == 2 * len("Paris")


def test_a_choice_without_text_is_empty_and_not_missing() -> None:
    assembly = Assembly(Endpoint.CHAT)
    assembly.add(chunk(0, delta={"role": "assistant", "content": ""}))
    assembly.add(chunk(0, delta={}, finish_reason="stop"))
    assert assembly.choices()[0]["message"] == {"role": "assistant", "content": ""}


def test_calls_grow_fragment_by_fragment_and_choice_by_choice() -> None:
    def fragment(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
        begun = {} if name is None else {"id": f"call_{name}", "type": "function"}
        return {"tool_calls": [{"index": index, **begun, "function": {"name": name, "arguments": arguments}}]}

    assembly = Assembly(Endpoint.CHAT)
    assembly.add(chunk(0, delta={"role": "assistant", "content": ""}))
    for delta in (fragment(0, "", "f"), fragment(0, '{"a"'), fragment(0, ": 1}"), fragment(1, "{}", "g")):
        assembly.add(chunk(0, delta=delta))
    assembly.add(chunk(1, delta=fragment(0, "{}", "h")))
    assembly.add(chunk(0, delta={}, finish_reason="tool_calls"))
    first, second = assembly.choices()
    assert assembly.taken_bytes == len('{"a": 1}{}{}')
    assert first["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_f", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "call_g", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert first["finish_reason"] == "tool_calls"
    assert second["message"]["tool_calls"][0]["id"] == "call_h"


def _read(written: object) -> object:
    return orjson.loads(orjson.dumps(written))
