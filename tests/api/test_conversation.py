"""Messages in all the forms that clients write come out as plain turns."""

from typing import Any

import pytest

from api.conversation import MESSAGES_MAX, conversation
from api.errors import InputInvalid, ParameterUnsupported


def test_plain_turns_pass_unchanged() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert conversation(turns) == tuple(turns)


def test_system_turns_from_anywhere_are_one_turn_at_the_front() -> None:
    turns = conversation(
        [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        ]
    )
    assert turns == ({"role": "system", "content": "Be kind.\n\nBe brief."}, {"role": "user", "content": "hi"})


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "function", "system", "developer"])
def test_null_is_the_empty_text_for_every_role(role: str) -> None:
    assert conversation([{"role": role, "content": None}])[0]["content"] == ""


def test_parts_are_joined_and_bare_strings_are_parts() -> None:
    parts = [
        {"type": "text", "text": "a"},
        "b",
        {"type": "input_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    assert conversation([{"role": "user", "content": parts}])[0]["content"] == "abcd"


def test_tool_turns_keep_what_a_template_needs() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = conversation(
        [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "4"},
        ]
    )
    assert turns == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
    )


def test_a_call_in_the_older_form_is_a_call() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    (turn,) = conversation([called])
    assert turn["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    with pytest.raises(InputInvalid) as caught:
        conversation([{"role": "assistant", "content": None, "function_call": "f"}])
    assert caught.value.param == "messages[0].function_call"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"city": "Oslo"}', {"city": "Oslo"}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        (None, {}),
        ('{"city": "Os', '{"city": "Os'),
        ("not JSON at all", "not JSON at all"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_are_the_object_that_they_say_and_else_the_text_they_are(written: object, told: object) -> None:
    function = {"name": "f", "arguments": written}
    for call in (function, {"id": "c1", "type": "function", "function": function}):
        (turn,) = conversation([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": told}


def test_ids_that_were_made_unique_come_back_as_the_model_wrote_them() -> None:
    call = {"id": "functions.f:0~0123456789ab", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = conversation(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "functions.f:0~0123456789ab", "content": "4"},
        ]
    )
    assert turns[0]["tool_calls"][0]["id"] == turns[1]["tool_call_id"] == "functions.f:0"


def test_fields_nobody_knows_do_not_travel() -> None:
    assert conversation([{"role": "user", "content": "hi", "rid": "x"}]) == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ({"role": 7, "content": "x"}, "messages[0].role"),
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": {}}, "messages[0].content"),
        ({"role": "user", "content": [7]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 7}, "messages[0].name"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": [7]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": [{}] * 129}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": 7, "function": {"name": "f"}}]},
            "messages[0].tool_calls[0].id",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": 7}}]},
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_faults_are_named_by_their_path(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InputInvalid) as caught:
        conversation([message])
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", ["image_url"]])
def test_pictures_and_sound_are_refused_by_their_path(kind: Any) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind}]
    with pytest.raises(InputInvalid) as caught:
        conversation([{"role": "user", "content": parts}])
    assert caught.value.path[:4] == ("messages", 0, "content", 1)
    assert isinstance(caught.value, ParameterUnsupported) == isinstance(kind, str)


def test_the_number_of_messages_is_bounded() -> None:
    message = {"role": "user", "content": "x"}
    assert len(conversation([message] * MESSAGES_MAX)) == MESSAGES_MAX
    for count in (0, MESSAGES_MAX + 1):
        with pytest.raises(InputInvalid) as caught:
            conversation([message] * count)
        assert caught.value.param == "messages"
