"""Ranges of the generation parameters, and the names under which an engine gets them."""

import json
from typing import Any

import orjson
import pytest

from api.body import parse
from api.charged_body import ignored_headers
from api.errors import InputInvalid, ParameterUnsupported
from api.sampling import GenerationOptions


def options(**fields: Any) -> GenerationOptions:
    return parse(GenerationOptions, json.dumps(fields).encode())


GOOD: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 2}, {"temperature": 0.7}, {"top_p": 1}, {"min_p": 0}, {"top_k": 1},
    {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"frequency_penalty": -2}, {"presence_penalty": 2},
    {"repetition_penalty": 0.01}, {"stop": ["a", "b", "c", "d"]}, {"logit_bias": {"1": -100, "49151": 100}},
]  # fmt: skip


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_what_is_in_range_reaches_the_engine_as_it_is(fields: dict[str, Any]) -> None:
    sent = options(**fields).engine_fields()
    assert orjson.loads(orjson.dumps(sent)) == fields


BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("temperature", []),
    ("top_p", 1.01), ("top_p", -0.01), ("min_p", 2), ("top_k", -2), ("top_k", 1.5), ("seed", 2**63), ("seed", 1.0),
    ("seed", 10**30), ("frequency_penalty", 2.1), ("presence_penalty", -2.1), ("repetition_penalty", 0),
    ("repetition_penalty", 2.1), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", True), ("max_tokens", 1.5),
    ("max_tokens", "9"), ("max_completion_tokens", 0), ("n", 0), ("n", 129), ("n", True), ("stream", "yes"),
    ("stream", 1), ("stop", 7), ("stop", ""), ("stop", [7]), ("stop", ["a"] * 5), ("stop", "x" * 257), ("stop", {}),
    ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1.5": 1}), ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}), ("logit_bias", {"1": "1"}), ("logit_bias", [1]), ("logit_bias", {"١": 1}),
    ("logit_bias", {str(token): 0 for token in range(301)}), ("stream_options", 7), ("stream_options", True),
    ("stream_options", {"include_usage": 1}), ("options", True), ("options", {"rejectIfBusy": "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:30])
def test_what_is_out_of_range_or_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputInvalid) as caught:
        options(**{name: value})
    assert caught.value.path[0] == name
    assert f"'/{name}" in caught.value.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    with pytest.raises(Exception, match="not valid JSON"):
        parse(GenerationOptions, b'{"temperature":%b}' % number.encode())


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in GenerationOptions.model_fields if name not in {"include_usage", "reject_if_busy"}]
    given = options(**dict.fromkeys(names), stream_options=None, options=None)
    assert given.engine_fields() == {}
    assert (given.output_tokens, given.streamed, given.include_usage, given.reject_if_busy) == (
        None,
        False,
        None,
        False,
    )
    assert not given.has_form


def test_zero_top_p_leaves_the_likeliest_token_and_zero_top_k_is_off() -> None:
    sent = options(top_p=0, top_k=0).engine_fields()
    assert 0 < sent["top_p"] < 1e-3
    assert sent["top_k"] == -1


def test_the_two_names_of_the_output_limit_may_not_contradict() -> None:
    assert options(max_tokens=5).output_tokens == 5
    assert options(max_completion_tokens=6).output_tokens == 6
    assert options(max_tokens=7, max_completion_tokens=7).output_tokens == 7
    with pytest.raises(InputInvalid):
        _ = options(max_tokens=7, max_completion_tokens=8).output_tokens


def test_choices_are_bounded_by_this_server() -> None:
    assert options().choices(8) == 1
    assert options(n=8).choices(8) == 8
    with pytest.raises(InputInvalid, match="at most 8"):
        options(n=9).choices(8)


def test_fields_without_effect_are_named_and_nothing_unprintable_is() -> None:
    given = options(foo=1, user="me", metadata={}, **{"x-override-y": 1, "bad\r\nname": 1, "ünï": 1})
    assert ignored_headers(given) == {"x-ignored-params": "foo, x-override-y"}
    assert ignored_headers(options(user="me", store=True)) == {}
    assert ignored_headers(options()) == {}


def test_the_list_of_names_is_bounded() -> None:
    names = ignored_headers(options(**{f"field{index}": 1 for index in range(100)}))["x-ignored-params"]
    assert names.count(",") == 15


def test_nothing_that_is_not_listed_reaches_an_engine() -> None:
    inner = {"rid": "x", "priority": 9, "cache_salt": "s", "ignore_eos": True, "bootstrap_host": "h", "lora_path": None}
    assert options(**inner).engine_fields() == {}


def test_an_adapter_is_noticed_under_both_names() -> None:
    assert options(lora="a").asks_for_lora
    assert options(lora_path="a").asks_for_lora
    assert not options(lora=None).asks_for_lora


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("functions", [{"name": "f", "parameters": {}}], []),
        ("function_call", {"name": "f"}, "auto"),
        ("functions", 0, None),
        ("modalities", ["text", "audio"], ["text", "text"]),
        ("modalities", "audio", []),
    ],
)
def test_what_would_make_another_answer_if_it_were_ignored_is_refused(name: str, value: Any, harmless: Any) -> None:
    with pytest.raises(ParameterUnsupported) as caught:
        options(**{name: value}).refuse_other_forms()
    assert caught.value.param == name
    for allowed in (harmless, None):
        given = options(**{name: allowed})
        given.refuse_other_forms()
        assert ignored_headers(given) == {}
