"""Cutting a stream's events as bytes gives what parsing them would give."""

from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import EngineBroke
from backends.wire import (
    EngineUsage,
    Loads,
    is_busy,
    read_chunk,
    read_loads,
    read_server_info,
    read_start_parts,
    said_in,
    usage_of,
)

USAGE = {
    "prompt_tokens": 31,
    "total_tokens": 35,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 16},
    "reasoning_tokens": 1,
}
READ_USAGE = EngineUsage(prompt=31, cached=16, completion=4, reasoning=1)


def event(delta: Mapping[str, object], *, finish: str | None = None, **last: object) -> bytes:
    """As the engine sends it."""
    return _event(delta, {"finish_reason": finish, "matched_stop": None}, last)


def bare(delta: Mapping[str, object]) -> bytes:
    """As a client gets it."""
    return _event(delta, {"finish_reason": None}, {})


def _event(delta: Mapping[str, object], ended: Mapping[str, object], last: Mapping[str, object]) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, **ended}
    return orjson.dumps(
        {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **last}
    )


def test_running_usage_comes_off_and_is_read() -> None:
    chunk = read_chunk(event({"content": "hi"}, usage=USAGE))
    assert chunk.body == bare({"content": "hi"})
    assert chunk.usage == READ_USAGE


@pytest.mark.parametrize(
    ("details", "cached"), [(None, 0), ({"cached_tokens": 16}, 16), ({"cached_tokens": 16, "other": 1}, 16)]
)
@pytest.mark.parametrize("first", ["prompt_tokens", "completion_tokens"])
def test_running_usage_is_read_in_whatever_order_and_with_whatever_details(
    details: object, cached: int, first: str
) -> None:
    usage = USAGE | {"prompt_tokens_details": details}
    usage = {first: usage[first], **usage}
    assert read_chunk(event({"content": "hi"}, usage=usage)).usage == READ_USAGE._replace(cached=cached)


def test_a_null_usage_comes_off_too() -> None:
    chunk = read_chunk(event({"content": "hi"}, usage=None))
    assert (chunk.body, chunk.usage) == (bare({"content": "hi"}), None)


def test_an_event_without_usage_passes() -> None:
    assert read_chunk(event({"content": "hi"})).body == bare({"content": "hi"})


@given(matched=st.one_of(st.none(), st.integers(0, 200_000), st.text()), text=st.text())
def test_what_stopped_an_answer_is_for_us_alone(matched: object, text: str) -> None:
    said = {"content": text.encode("utf-8", "replace").decode() + ',"matched_stop":null'}
    matched = matched.encode("utf-8", "replace").decode() if isinstance(matched, str) else matched
    for end in ({}, {"usage": USAGE}, {"usage": None, "extra": 1}):
        chunk = read_chunk(_event(said, {"finish_reason": "stop", "matched_stop": matched}, end))
        assert chunk.body is not None
        [choice] = orjson.loads(chunk.body)["choices"]
        assert choice == {"index": 0, "delta": said, "logprobs": None, "finish_reason": "stop"}
        assert chunk.finish_reason == "stop"


def test_the_usage_event_is_for_us_alone() -> None:
    payload = orjson.dumps({"id": "r", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})
    chunk = read_chunk(payload)
    assert (chunk.body, chunk.usage, chunk.finish_reason) == (None, READ_USAGE, None)


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort"])
def test_the_finish_reason_is_read(reason: str) -> None:
    assert read_chunk(event({}, finish=reason)).finish_reason == reason


@given(text=st.text(), tail=st.sampled_from(["", ',"usage":{"completion_tokens":9}}', '"finish_reason":"stop"', "}}"]))
def test_generated_text_is_never_mistaken_for_a_key(text: str, tail: str) -> None:
    said = {"content": text.encode("utf-8", "replace").decode() + tail}
    chunk = read_chunk(event(said, usage=USAGE))
    assert chunk.body == bare(said)
    assert chunk.usage == READ_USAGE
    assert chunk.finish_reason is None


def test_usage_in_another_place_or_spacing_costs_a_parse_but_is_read() -> None:
    payload = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "id": "r", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}'  # noqa: E501 - one line of JSON
    chunk = read_chunk(payload)
    assert chunk.usage == EngineUsage(prompt=3, cached=0, completion=2, reasoning=0)
    assert chunk.body is not None
    assert orjson.loads(chunk.body)["choices"][0]["delta"] == {"content": "x"}
    assert b"usage" not in chunk.body


@pytest.mark.parametrize(
    "payload",
    [
        b'{"error":{"message":"out of memory"}}',
        b'{"object":"error","message":"bad","code":400}',
        b"not json",
        b"[1]",
        b"",
    ],
)
def test_an_error_in_the_stream_is_no_output(payload: bytes) -> None:
    with pytest.raises(EngineBroke):
        read_chunk(payload)


def test_an_explicit_zero_is_zero_and_nothing_is_nothing() -> None:
    assert usage_of({"prompt_tokens": 0, "completion_tokens": 0}) == EngineUsage(0, 0, 0, 0)
    assert usage_of(None) is None
    assert usage_of({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None}) == EngineUsage(
        5, 0, 1, 0
    )


def test_reports_that_lack_what_admission_needs_are_refused() -> None:
    with pytest.raises(EngineBroke):
        read_loads({"loads": []})
    with pytest.raises(EngineBroke):
        read_server_info({"page_size": 16})


# As SGLang 0.5.23 answers with --dp-size 2, without what nobody reads.
TWO_RANKS = {
    "loads": [
        {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 4096}
        | {"max_total_num_tokens": 8192, "max_running_requests": 16, "token_usage": 0.5},
        {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
        | {"max_total_num_tokens": 8192, "max_running_requests": 16, "token_usage": 0.0},
    ]
}


def test_each_rank_has_a_load_of_its_own() -> None:
    assert read_loads(TWO_RANKS, 0) == Loads(8192, 4096, running=3, waiting=1, running_max=16, unplaced=1)
    assert read_loads(TWO_RANKS, 1) == Loads(8192, 0, running=0, waiting=0, running_max=16)
    assert read_loads({"loads": TWO_RANKS["loads"][1:]}, 1).used_tokens == 0
    with pytest.raises(EngineBroke):
        read_loads(TWO_RANKS, 2)


@pytest.mark.parametrize(
    ("used", "share", "counted"),
    [
        (600_000, 0.4380, 600_000),  # 0.43796 rounded: the same pool
        (600_000, 0.9, 1_233_000),  # the sliding-window pool is fuller than the one that is counted in tokens
        (0, 0.0, 0),
        (0, 0.0001, 0),
    ],
)
def test_of_a_hybrid_models_pools_the_fullest_counts(used: int, share: float, counted: int) -> None:
    load = TWO_RANKS["loads"][0] | {
        "num_used_tokens": used,
        "max_total_num_tokens": 1_370_000,
        "token_usage": share,
    }
    assert read_loads({"loads": [load]}).used_tokens == counted


def test_steps_that_an_engine_has_done_are_a_sign_of_work() -> None:
    load = TWO_RANKS["loads"][0]
    idle = read_loads({"loads": [load | {"total_prefill_busy_us": 60, "decode_moments": None}]})
    decoded = read_loads({"loads": [load | {"total_prefill_busy_us": 60, "decode_moments": [1.0, 9.0]}]})
    prefilled = read_loads({"loads": [load | {"total_prefill_busy_us": 99, "decode_moments": None}]})
    assert idle.worked < decoded.worked < prefilled.worked


def test_a_report_has_the_time_at_which_the_engine_wrote_it_if_it_says() -> None:
    load = TWO_RANKS["loads"][0]
    assert read_loads({"loads": [load | {"timestamp": 1764480000.25}]}).told_at == 1764480000.25
    assert read_loads({"loads": [load]}).told_at is None
    assert read_loads({"loads": [load | {"timestamp": "2026-11-30T09:00:00+00:00"}]}).told_at is None
    assert read_loads({"loads": [load | {"timestamp": 0.0}]}).told_at is None  # SGLang before its first step


@pytest.mark.parametrize(
    ("queues", "unplaced"),
    [
        (None, 1),
        ({"grammar": 2}, 1),
        ({"waiting": 3, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0, "unplaced": 2}, 2),
        ({"waiting": 3, "grammar": 2, "paused": 0, "retracted": 1, "prealloc_ready": 0}, 3),
        ({"waiting": 1, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 4}, 5),
    ],
)
def test_who_waits_for_pages_or_a_slot_is_told_from_who_waits_for_something_else(
    queues: dict[str, int] | None, unplaced: int
) -> None:
    load = TWO_RANKS["loads"][0] | ({} if queues is None else {"queues": queues})
    assert read_loads({"loads": [load]}).unplaced == unplaced


@pytest.mark.parametrize(("running", "waiting", "busy"), [(0, 0, False), (1, 0, True), (0, 2, True)])
def test_an_engine_is_busy_if_anything_runs_or_waits_on_any_rank(running: int, waiting: int, *, busy: bool) -> None:
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0}
    assert is_busy({"loads": [idle, {"num_running_reqs": running, "num_waiting_reqs": waiting}]}) == busy


def test_one_that_does_not_say_what_runs_is_not_taken_to_be_idle() -> None:
    with pytest.raises(EngineBroke):
        is_busy({"loads": [{}]})


def test_the_parts_of_a_start_are_those_that_are_numbers_if_any_are_told() -> None:
    assert read_start_parts({"start_seconds": {"weights": 1, "imports": 2.5, "odd": "x"}}) == {
        "weights": 1.0,
        "imports": 2.5,
    }
    assert read_start_parts({}) == read_start_parts({"start_seconds": 3}) == {}


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"text": "words"}, "words"),
        ({"message": {"content": "words", "reasoning_content": "thought ", "tool_calls": None}}, "thought words"),
        ({"message": {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}, "f{}"),
        ({"message": {"content": 7, "tool_calls": [5, {"function": 6}]}}, ""),
        ({"message": 7}, ""),
    ],
)
def test_all_that_a_whole_answer_says_is_found(choice: dict[str, Any], said: str) -> None:
    assert said_in({"choices": [choice]}) == said


@pytest.mark.parametrize("fields", [{}, {"choices": []}, {"choices": [5]}, {"choices": "x"}])
def test_what_is_no_choice_says_nothing(fields: dict[str, Any]) -> None:
    assert said_in(fields) is None
