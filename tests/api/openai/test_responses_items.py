"""Input items of a kept response: every form that a client may send, as the vendor's own client reads it."""

from typing import Any

import pytest
from openai.types.responses import ResponseItemList

from api.errors import InputInvalid
from api.openai.responses_items import InputItemsQuery, input_item_page

TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"type": "message", "role": "user", "content": [{"type": "text", "text": "hi"}], "id": None, "status": None},
    {"role": "assistant", "content": "Yes?"},
    {"id": "rs_1", "type": "reasoning", "status": "completed", "summary": [], "content": []},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "seen"},
    {"id": "msg_1-0", "type": "message", "role": "assistant", "status": "incomplete", "content": [
        {"type": "output_text", "text": "So", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "no"},
    ]},
]  # fmt: skip


def page(**query: Any) -> ResponseItemList:
    found = input_item_page("r", TURNS, InputItemsQuery(**query))
    return ResponseItemList.model_validate(found)


def test_items_are_whole_whatever_a_client_left_out() -> None:
    items = [item.model_dump() for item in page(order="asc").data]
    assert [item["id"] for item in items] == [
        "msg_r-in0", "msg_r-in1", "msg_r-in2", "rs_1", "fc_r-in4", "fco_r-in5", "msg_1-0"
    ]  # fmt: skip
    assert [item["status"] for item in items] == ["completed"] * 6 + ["incomplete"]
    parts = [part["type"] for item in items for part in item.get("content") or ()]
    assert parts == ["input_text", "input_text", "output_text", "output_text", "refusal"]


def test_the_last_comes_first_a_page_at_a_time() -> None:
    first = page(limit=4)
    assert (first.first_id, first.last_id, first.has_more) == ("msg_1-0", "rs_1", True)
    second = page(limit=4, after=first.last_id)
    assert (second.first_id, second.last_id, second.has_more) == ("msg_r-in2", "msg_r-in0", False)


def test_to_go_on_from_what_is_no_item_is_refused() -> None:
    with pytest.raises(InputInvalid, match="no input item"):
        page(after="msg_elsewhere")
