"""Calls of two answers have two ids, and come back as the model wrote them."""

from typing import Any

import orjson
import pytest

from gateway.tool_ids import as_the_model_wrote, suffix_of, unique_in_chunk, unique_in_message, without_nulls

RID = "0197f5a0-0000-7000-8000-00000000beef"


def chunk(call_id: str, arguments: str = "") -> bytes:
    call = {"id": call_id, "index": 0, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return orjson.dumps({"id": RID, "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})


def id_in(payload: bytes) -> str:
    return str(orjson.loads(payload)["choices"][0]["delta"]["tool_calls"][0]["id"])


@pytest.mark.parametrize("call_id", ["functions.get_weather:0", "functions.a/b.c:12"])
def test_numbered_ids_get_the_answers_suffix_and_lose_it_on_the_way_back(call_id: str) -> None:
    suffixes = [suffix_of(rid) for rid in (RID, RID[:-4] + "cafe", f"{RID}-003")]
    seen = [id_in(unique_in_chunk(chunk(call_id), suffix)) for suffix in suffixes]
    assert len(set(seen)) == 3
    assert {as_the_model_wrote(one) for one in seen} == {call_id}
    message: dict[str, Any] = {"tool_calls": [{"id": call_id}, {"id": "call_1"}]}
    unique_in_message(message, suffixes[0])
    assert message == {"tool_calls": [{"id": seen[0]}, {"id": "call_1"}]}


def test_pieces_of_arguments_have_neither_id_nor_name() -> None:
    text = '{"id":null,"name":null,"x":1}'
    call = {"id": None, "index": 0, "type": "function", "function": {"name": None, "arguments": text}}
    told = {"id": RID, "choices": [{"index": 0, "delta": {"content": None, "tool_calls": [call]}}]}
    sent = orjson.loads(without_nulls(orjson.dumps(told)))["choices"][0]["delta"]
    assert sent == {
        "content": None,
        "tool_calls": [{"index": 0, "type": "function", "function": {"arguments": text}}],
    }
    for payload in (chunk("call_1", text), orjson.dumps({"choices": [{"delta": {"content": text}}]})):
        assert without_nulls(payload) == payload


def test_other_ids_and_texts_that_look_like_one_stay() -> None:
    for payload in (chunk("call_0123456789abcdef"), chunk("call_1", '{"id":"functions.f:0"}')):
        assert unique_in_chunk(payload, suffix_of(RID)) == payload
    for call_id in ("call_1~ab", "functions.f:0", "", "~"):
        assert as_the_model_wrote(call_id) == call_id
    unique_in_message({"tool_calls": None}, "x")
