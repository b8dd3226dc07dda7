"""Conversations with tools, told in plain turns."""

from typing import Any

from backends.tool_marks import has_tool_turns, in_plain_turns

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g", "strict": True}},
]
HI = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{broken"}},
    ],
}


def test_tools_are_told_in_the_system_turn_after_what_stands_there() -> None:
    turns = in_plain_turns([{"role": "system", "content": "Be brief."}, HI], TOOLS, "auto")
    assert [turn["role"] for turn in turns] == ["system", "user"]
    told = turns[0]["content"]
    assert told.startswith("Be brief.\n\n")
    assert '{"name": "f", "description": "Does f.", "parameters": {"type": "object"}}\n{"name": "g"}\n' in told
    assert in_plain_turns([HI], TOOLS, "auto")[0]["role"] == "system"


def test_the_choice_is_told() -> None:
    told = {
        str(choice): in_plain_turns([HI], TOOLS, choice)[0]["content"]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "g"}})
    }
    assert len(set(told.values())) == 3
    assert "calling the function g." in list(told.values())[2]


def test_calls_stand_as_the_model_writes_them_and_broken_arguments_as_the_text_they_are() -> None:
    (turn,) = in_plain_turns([CALLED], [], "auto")
    assert turn == {
        "role": "assistant",
        "content": 'Let me look.\n<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {broken}</tool_call>',
    }


def test_results_are_turns_of_the_user() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    assert in_plain_turns([result], [], "auto") == [{"role": "user", "content": "<tool_response>4</tool_response>"}]


def test_a_conversation_without_tools_is_told_apart() -> None:
    assert not has_tool_turns([HI, {"role": "assistant", "content": "ho"}])
    assert has_tool_turns([HI, CALLED])
    assert has_tool_turns([HI, {"role": "tool", "content": "4"}])
