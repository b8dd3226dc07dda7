"""What clients ask of an answer's form becomes the engine's fields, or is refused by its path."""

from typing import Any

import pytest

from api.answer_form import TOOLS_MAX, form_fields
from api.errors import InputInvalid
from api.sampling import GenerationOptions

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "parameters": CITY}
NESTED = {"type": "function", "function": FLAT}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def fields(*, chat: bool = True, **asked: Any) -> dict[str, Any]:
    options = GenerationOptions.model_validate(asked)
    assert options.has_form
    return form_fields(options, chat=chat)


@pytest.mark.parametrize("tool", [FLAT, NESTED, {"type": "function", **FLAT}], ids=["flat", "nested", "responses"])
def test_tools_come_in_any_form_and_go_in_one(tool: dict[str, Any]) -> None:
    assert fields(tools=[tool]) == {"tools": [NESTED], "tool_choice": "auto"}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("any", "required"),
        ({"type": "function", "function": {"name": "now"}}, {"type": "function", "function": {"name": "now"}}),
        ({"type": "function", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
    ids=str,
)
def test_the_choice_is_kept(choice: Any, sent: Any) -> None:
    assert fields(tools=[NESTED, OTHER], tool_choice=choice)["tool_choice"] == sent


def test_allowed_tools_leave_the_others_out() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    sent = fields(tools=[NESTED, OTHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert sent == {"tools": [OTHER], "tool_choice": "required"}
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    assert fields(tools=[NESTED, OTHER], tool_choice=flat) == {"tools": [OTHER], "tool_choice": "auto"}


def test_a_model_that_may_not_call_is_not_told_of_tools() -> None:
    assert fields(tools=[NESTED], tool_choice="none") == {}
    assert fields(tools=[], tool_choice="auto") == {}


def test_only_one_call_at_a_time_is_said_where_it_was_asked_for() -> None:
    assert fields(tools=[OTHER], parallel_tool_calls=False)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in fields(tools=[OTHER], parallel_tool_calls=True)


@pytest.mark.parametrize(
    ("form", "name", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}, "city", CITY),
        ({"type": "json_schema", "json_schema": CITY}, "answer", CITY),
        ({"type": "json_schema", "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": CITY}}}, "answer", None),
        (
            {"type": "json_schema", "json_schema": {"properties": {"schema": CITY}, "type": "object"}},
            "answer",
            {"properties": {"schema": CITY}, "type": "object"},
        ),
        ({"type": "json_schema", "name": "city", "schema": CITY}, "city", CITY),
    ],
    ids=str,
)
def test_a_schema_is_bare_or_wrapped(form: dict[str, Any], name: str, schema: dict[str, Any] | None) -> None:
    sent = fields(response_format=form)["response_format"]["json_schema"]
    assert sent == {"name": name, "schema": schema or form["json_schema"]}


def test_strict_is_handed_on() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    assert fields(response_format=form)["response_format"] == form
    assert (
        fields(tools=[{"type": "function", "function": {**FLAT, "strict": False}}])["tools"][0]["function"]["strict"]
        is False
    )


def test_other_forms_go_by_their_names() -> None:
    assert fields(response_format={"type": "json_object"}) == {"response_format": {"type": "json_object"}}
    assert fields(response_format={"type": "text"}) == {}
    assert fields(regex="a+", chat=False) == {"regex": "a+"}
    assert fields(ebnf='root ::= "a"') == {"ebnf": 'root ::= "a"'}
    guided = fields(guided_json=CITY)["response_format"]
    assert guided["json_schema"]["schema"] == CITY


def test_nothing_asked_costs_nothing() -> None:
    assert not GenerationOptions.model_validate({"temperature": 1.0, "parallel_tool_calls": True}).has_form


NOT = {"not": {"type": "string"}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": 7}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": 7}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{**FLAT, "description": 7}]}, "tools[0].description"),
        ({"tools": [{**FLAT, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**FLAT, "strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [OTHER, NESTED, OTHER]}, "tools[2]"),
        ({"tools": [OTHER] * (TOOLS_MAX + 1)}, "tools"),
        ({"tools": [{**FLAT, "parameters": {"type": "objekt"}}]}, "tools[0].parameters.type"),
        (
            {"tools": [OTHER, {"type": "function", "function": {**FLAT, "strict": True, "parameters": NOT}}]},
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [OTHER, {**FLAT, "parameters": {"properties": {"a": {"$ref": "#/nope"}}}}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "get_weather"}]},
            },
            "tools[1].parameters.properties.a.$ref",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": 7}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 7}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"properties": {"a": NOT}}}},
            "response_format.json_schema.properties.a",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": NOT}}}},
            "response_format.json_schema.schema.items",
        ),
        ({"guided_json": 7}, "guided_json"),
        ({"guided_json": {"properties": {"a": NOT}}}, "guided_json.properties.a"),
        ({"guided_json": CITY, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"regex": "("}, "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"regex": "a", "tools": [OTHER]}, "regex"),
    ],
    ids=lambda value: str(value)[:70],
)  # fmt: skip
def test_faults_are_named_by_their_path(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InputInvalid) as caught:
        fields(**asked)
    assert caught.value.param == param


def test_a_prompt_without_a_chat_has_no_tools() -> None:
    with pytest.raises(InputInvalid) as caught:
        fields(tools=[OTHER], chat=False)
    assert caught.value.param == "tools"
