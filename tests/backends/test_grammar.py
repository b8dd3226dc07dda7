"""Grammars hold what was asked for, and what can't be held is refused with its place."""

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backends import grammar
from backends.grammar import GrammarInvalid

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
OTHER_CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def bytes_only() -> LLTokenizer:
    """A token for each byte: every text has one way to be written."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate([*letters, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return LLTokenizer(tokenizer.to_str(), eos_token=vocabulary["<|end|>"])


def accepts(tokenizer: LLTokenizer, text: str, **fields: Any) -> bool:
    """Whether the text is a whole answer of this form."""
    wanted = grammar.of_fields(fields)
    assert wanted is not None
    grammar.check(wanted)
    matcher = LLMatcher(tokenizer, wanted, limits=grammar.limits(), log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (json_schema(CITY), ['{"city": "Oslo"}', '{"city": ""}'], ["{}", '{"city": 1}', '{"city": "a", "b": 1}', "no"]),
        (json_schema({"type": "integer"}), ["7", "-9007199254740991"], ["1.5", "10000000000000000", '"7"']),
        (json_schema({"oneOf": [{"type": "null"}, {"const": "a"}]}), ["null", '"a"'], ['"b"']),
        (json_schema({"type": "string", "format": "of our own"}), ['"x"'], ["x"]),
        (json_schema({"enum": [f"v{at}" for at in range(2000)]}), ['"v1999"'], ['"v2000"']),
        (
            json_schema(
                {"allOf": [CITY, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}
            ),
            ['{"city": "Oslo", "b": null}'],
            ['{"city": "Oslo"}'],
        ),
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, {"b": null}]}', "{}"], ["[]", '{"a": }']),
        ({"regex": "(yes|no)!"}, ["yes!", "no!"], ["yes", "maybe!"]),
        ({"ebnf": 'root ::= "a" ("b" | "c")+'}, ["ab", "acb"], ["a", "b"]),
        ({"ebnf": 'start: "a" | "b"'}, ["a", "b"], ["ab"]),
    ],
    ids=str,
)
def test_an_answer_has_the_form_that_was_asked_for(
    bytes_only: LLTokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(bytes_only, text, **fields)] == []
    assert [text for text in bad if accepts(bytes_only, text, **fields)] == []


def test_a_recursive_schema_is_held_at_any_depth(bytes_only: LLTokenizer) -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": {**node, "required": ["next"]}}}
    deep = '{"next": ' * 20 + "null" + "}" * 20
    assert accepts(bytes_only, deep, **json_schema(schema))
    assert not accepts(bytes_only, deep[:-1], **json_schema(schema))


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, ["Just text.", f"Let me see.{CALL}", CALL, f"{CALL}\n{OTHER_CALL}"], [CALL[:-1], f"{CALL} and more"]),
        ({"parallel_tool_calls": False}, ["Text", CALL], [f"{CALL}\n{OTHER_CALL}"]),
        ({"tool_choice": "required"}, [CALL, f"{OTHER_CALL}\n{CALL}"], ["Text", f"Text {CALL}", ""]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, [OTHER_CALL], [CALL, "Text"]),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', CALL], ["Text", f'{{"a": 1}}{CALL}']),
    ],
    ids=str,
)
def test_tools_are_called_as_the_choice_says(
    bytes_only: LLTokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(bytes_only, text, tools=TOOLS, **fields)] == []
    assert [text for text in bad if accepts(bytes_only, text, tools=TOOLS, **fields)] == []


def test_tools_that_may_not_be_called_ask_nothing_of_the_answer() -> None:
    assert grammar.of_fields({"tools": TOOLS, "tool_choice": "none"}) is None
    assert grammar.of_fields({"response_format": {"type": "text"}}) is None


def test_every_mix_of_tools_choice_and_form_compiles_or_says_why() -> None:
    choices: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "now"}}]
    forms: list[dict[str, Any]] = [{}, {"response_format": {"type": "json_object"}}, json_schema(CITY), {"regex": "a"}]
    for choice, parallel, form in itertools.product(choices, (None, True, False), forms):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, **form}
        if "regex" in form and choice == "auto":
            with pytest.raises(GrammarInvalid, match="no room for tools"):
                grammar.of_fields(fields)
        else:
            grammar.check(str(grammar.of_fields(fields)))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "objekt"}, "type"),
        ({"type": "object", "required": "city"}, "required"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "properties/a/pattern"),
        ({"properties": {"a": {"minimum": "x", "type": "integer"}}}, "properties/a/minimum"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "properties/a"),
        ({"properties": {"a": {"anyOf": [{}, {"type": "array", "uniqueItems": True}]}}}, "properties/a/anyOf/1"),
        ({"$defs": {"d": {"if": {}, "then": {}}}, "$ref": "#/$defs/d"}, "$defs/d"),
        ({"properties": {"a": {"$ref": "#/$defs/nope"}}}, "properties/a/$ref"),
        ({"$ref": "http://example.com/schema"}, "$ref"),
        ({"items": {"type": "integer", "minimum": 5, "maximum": 3}, "type": "array", "minItems": 1}, "items"),
    ],
    ids=str,
)
def test_a_schema_that_cant_be_held_is_refused_with_its_place(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        grammar.check_schema(schema)
    assert "/".join(str(step) for step in caught.value.path) == path
    assert caught.value.reason.endswith(".")


def test_parameters_of_a_tool_that_is_not_strict_may_ask_for_more_than_can_be_held() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    grammar.check_schema(schema, lenient=True)
    with pytest.raises(GrammarInvalid):
        grammar.check_schema(schema)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "("}, {"ebnf": "root ::= ("}, {"ebnf": "start: nothing"}, {"regex": "a", "ebnf": 'start: "a"'},
        {"regex": "a", "response_format": {"type": "json_object"}}, {"response_format": {"type": "xml"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        {"regex": "a" * (grammar.TEXT_BYTES_MAX + 1)},
    ],
    ids=lambda fields: str(fields)[:60],
)  # fmt: skip
def test_what_cant_be_compiled_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(GrammarInvalid):
        grammar.check(str(grammar.of_fields(fields)))


def test_the_search_for_the_part_at_fault_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def only_the_whole(text: str) -> None:
        looked_at.append(text)
        if len(looked_at) == 1:
            raise GrammarInvalid("is too large.")

    monkeypatch.setattr("backends.grammar.check", only_the_whole)
    with pytest.raises(GrammarInvalid, match="too large") as caught:
        grammar.check_schema({"anyOf": [{"type": "integer", "minimum": at} for at in range(1_000)]})
    assert caught.value.path == ()
    assert len(looked_at) == 101


def test_the_size_of_a_schema_is_bounded() -> None:
    words = ["w" * 60] * (grammar.SCHEMA_BYTES_MAX // 64)
    grammar.check_schema({"enum": [f"{word}{at}" for at, word in enumerate(words[:-100])]})
    with pytest.raises(GrammarInvalid, match="larger than"):
        grammar.check_schema({"enum": words, "description": "x" * 2000})


def test_names_and_texts_of_tools_cant_break_out_of_the_grammar(bytes_only: LLTokenizer) -> None:
    odd = {"type": "function", "function": {"name": "a/b:c.d-e", "parameters": {"enum": ['"\n%json {', "\\"]}}}
    call = f'<tool_call>{{"name": "a/b:c.d-e", "arguments": {json.dumps(chr(34) + chr(10) + "%json {")}}}</tool_call>'
    assert accepts(bytes_only, call, tools=[odd], tool_choice="required")
