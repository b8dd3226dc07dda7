"""What the engine gets: token ids, allowed fields, ids of ours, and nothing else."""

from typing import Any

import orjson
import pytest

from gateway.engine_call import engine_body, rid_of
from gateway.request import Endpoint, GenerationRequest
from tenancy.principal import Principal

REQUEST_ID = "019f0000-0000-7000-8000-000000000001"


def request(**changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "id": REQUEST_ID,
        "principal": Principal("a" * 32, "k", frozenset(), None, None),
        "model": "@cf/a/b",
        "endpoint": Endpoint.CHAT,
        "route": "chat",
        "messages": ({"role": "user", "content": "secret words"},),
        "prompt": None,
        "sampling": {"temperature": 0.5},
        "max_tokens": None,
        "n": 1,
        "stream": False,
        "reject_if_busy": False,
        "received_at_ns": 0,
        "deadline_s": 60.0,
    }
    return GenerationRequest(**(fields | changes))


def body(wanted: GenerationRequest, index: int = 0, *, stream: bool = False) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(engine_body(wanted, [1, 2, 3], 64, index, stream=stream, cache_salt="s"))
    return fields


def test_a_chat_sends_ids_and_no_words() -> None:
    fields = body(request())
    assert fields["input_ids"] == [1, 2, 3]
    assert fields["max_tokens"] == 64
    assert fields["rid"] == REQUEST_ID
    assert b"secret words" not in engine_body(request(), [1, 2, 3], 64, 0, stream=False, cache_salt="s")


def test_a_completion_sends_its_ids_as_the_prompt() -> None:
    fields = body(request(endpoint=Endpoint.COMPLETIONS, messages=None, prompt="secret words"))
    assert fields["prompt"] == [1, 2, 3]
    assert "messages" not in fields


def test_stream_options_are_sent_with_streams_alone() -> None:
    assert "stream_options" not in body(request())
    assert body(request(), stream=True)["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_clients_field_cannot_replace_ours() -> None:
    fields = body(
        request(sampling={"cache_salt": "mine", "rid": "mine", "model": "other", "max_tokens": 9_999, "stream": True})
    )
    assert (fields["rid"], fields["model"], fields["max_tokens"], fields["stream"]) == (
        REQUEST_ID,
        "@cf/a/b",
        64,
        False,
    )


@pytest.mark.parametrize("n", [2, 8, 128])
def test_no_choices_id_is_the_beginning_of_anothers(n: int) -> None:
    rids = [rid_of(request(n=n), index) for index in range(n)]
    assert len({len(rid) for rid in rids}) == 1
    assert len(set(rids)) == n
    assert all(rid.startswith(REQUEST_ID) for rid in rids)


def test_choices_of_one_seeded_request_draw_apart() -> None:
    seeds = {body(request(n=4, sampling={"seed": 7}), index)["seed"] for index in range(4)}
    assert seeds == {7, 8, 9, 10}
