"""Bytes become a schema or a typed error; no body makes anything else happen."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.body import DEPTH_MAX, VALUES_MAX, check_shape, parse
from api.errors import BodyNotJson, InputInvalid
from api.openai.schemas import ChatBody


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"nul", b"[]", b"7", b"null", b'"text"', b"\xff\xfe{}", b'{"a":1,}', b'{"a":1}{',
        b'{"ignored":NaN}', b'{"ignored":Infinity}', b'{"ignored":1e400}', b'{"a":"\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BodyNotJson):
        parse(ChatBody, body)


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(BodyNotJson, match="is empty"):
        parse(ChatBody, b"")


def test_a_body_may_nest_up_to_the_limit_and_no_deeper() -> None:
    check_shape(b'{"a":' + nested(DEPTH_MAX - 1) + b"}")
    with pytest.raises(BodyNotJson, match="nested deeper"):
        check_shape(b'{"a":' + nested(DEPTH_MAX) + b"}")


def test_many_shallow_values_are_not_deep() -> None:
    check_shape(b"[" + b",".join([b"[]"] * 500) + b"]")


@pytest.mark.parametrize("value", [b"[]", b"{}", b'""', b'"a"', b'{"a":""}'])
def test_a_body_holds_a_bounded_number_of_values(value: bytes) -> None:
    with pytest.raises(BodyNotJson, match="JSON values"):
        check_shape(b"[" + b",".join([value] * (VALUES_MAX + 1)) + b"]")


def test_a_long_list_of_token_ids_is_one_prompt_and_not_many_values() -> None:
    check_shape(b"[" + b",".join([b"1"] * 1_000_000) + b"]")


def test_brackets_and_quotes_in_text_count_for_nothing() -> None:
    text = '[{"' * 100_000 + "\\"
    check_shape(orjson.dumps({"messages": [{"role": "user", "content": text}]}))


def test_a_fault_is_named_by_its_path_and_never_shows_the_value() -> None:
    with pytest.raises(InputInvalid) as caught:
        parse(ChatBody, b'{"model":"m","messages":[],"temperature":"secret"}')
    assert caught.value.param == "temperature"
    assert "secret" not in caught.value.message
    with pytest.raises(InputInvalid) as caught:
        parse(ChatBody, b'{"model":"m"}')
    assert caught.value.path == ("messages",)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


@pytest.mark.load
@given(json_values, st.integers(0, 70))
def test_depth_is_counted_as_a_parser_would(value: Any, around: int) -> None:
    body = b"[" * around + orjson.dumps(value) + b"]" * around
    too_deep = around + depth_of(value) > DEPTH_MAX
    if too_deep:
        with pytest.raises(BodyNotJson):
            check_shape(body)
    else:
        check_shape(body)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_body_or_a_typed_error(body: bytes) -> None:
    try:
        parse(ChatBody, body)
    except (BodyNotJson, InputInvalid) as error:
        assert error.message  # noqa: PT017 - either outcome is right, and this one must say something
