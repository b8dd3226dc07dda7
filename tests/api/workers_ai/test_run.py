"""/ai/run over the whole application: both input shapes, both result shapes, native streams, the spec's codes."""

from typing import Any
from urllib.parse import quote

import orjson
import pytest
from starlette.types import ASGIApp

from api.workers_ai.batch import asks_after
from billing.errors import InsufficientCredits, PriceUnavailable
from gateway.errors import CapacityExceeded, EngineUnavailable, Evicted, GenerationFailed, ModelNotFound, PromptTooLong
from gateway.request import Completion, Endpoint
from tenancy.errors import AccountSuspended, ConcurrencyExceeded, KeyExpired, KeyRevoked, TenancyUnavailable
from tests.api.exchange import exchange, post
from tests.fakes import (
    ACCOUNT,
    ADMIN_KEY,
    CAP,
    CREATED,
    KEY,
    MODEL,
    OTHER_ACCOUNT,
    ROLE_CHUNK,
    SETTLEMENT,
    Fakes,
    FakeStream,
    chat_completion,
    content_chunk,
    text_completion,
    until,
)

RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/"
MESSAGES = [{"role": "user", "content": "hi"}]


def code_of(answer: Any) -> int:
    assert answer.json["success"] is False
    assert (answer.json["result"], answer.json["messages"]) == (None, [])
    return int(answer.json["errors"][0]["code"])


class TestResults:
    async def test_are_both_shapes_in_one_envelope(self, app: ASGIApp) -> None:
        answer = await post(app, RUN + MODEL, {"messages": MESSAGES})
        assert answer.json == {
            "result": {
                "response": "Paris.",
                "tool_calls": [],
                "usage": {
                    "prompt_tokens": 11,
                    "completion_tokens": 9,
                    "total_tokens": 20,
                    "prompt_tokens_details": {"cached_tokens": 4},
                    "completion_tokens_details": {"reasoning_tokens": 0},
                    "cost": "0.00004329",
                },
                "id": answer.headers["x-request-id"],
                "object": "chat.completion",
                "created": CREATED,
                "model": MODEL,
                "choices": [
                    {
                        "index": 0,
                        "logprobs": None,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": "Paris.", "refusal": None},
                    }
                ],
            },
            "success": True,
            "errors": [],
            "messages": [],
        }
        assert answer.headers["cf-ai-neurons"] == "3.9354"

    async def test_of_raw_prompts_are_text_completions(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = text_completion()
        result = (await post(app, RUN + MODEL, {"prompt": "hi", "raw": True})).json["result"]
        assert (result["response"], result["object"], result["choices"][0]["text"]) == (
            " Paris.",
            "text_completion",
            " Paris.",
        )

    async def test_say_text_even_where_the_engine_says_null(self, app: ASGIApp, fakes: Fakes) -> None:
        choice = chat_completion(content=None, reasoning_content="Hm.").choices[0]
        fakes.pipeline.completes = Completion(CREATED, (choice,), CAP, SETTLEMENT)
        result = (await post(app, RUN + MODEL, {"prompt": "hi"})).json["result"]
        assert result["response"] == ""
        message = result["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "Hm."


class TestRequests:
    async def test_with_a_prompt_are_one_user_turn(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(app, RUN + MODEL, {"prompt": "hi"})
        await post(app, RUN + MODEL, {"messages": MESSAGES})
        first, second = fakes.pipeline.requests
        assert first.messages == second.messages == ({"role": "user", "content": "hi"},)
        assert (first.endpoint, first.route) == (Endpoint.CHAT, "run")

    async def test_with_a_raw_prompt_skip_the_template(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = text_completion()
        await post(app, RUN + MODEL, {"prompt": "hi", "raw": True, "logprobs": True, "top_logprobs": 2})
        (request,) = fakes.pipeline.requests
        assert (request.endpoint, request.prompt, request.messages) == (Endpoint.COMPLETIONS, "hi", None)
        assert request.sampling == {"logprobs": 2}

    async def test_without_max_tokens_have_no_hidden_limit(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(app, RUN + MODEL, {"prompt": "hi"})
        assert fakes.pipeline.requests[0].max_tokens is None

    async def test_take_the_wider_native_ranges(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(app, RUN + MODEL, {"prompt": "hi", "temperature": 5, "seed": 9_999_999_999, "model": "ignored"})
        assert fakes.pipeline.requests[0].sampling == {"temperature": 5, "seed": 9_999_999_999}
        assert fakes.pipeline.requests[0].model == MODEL

    @pytest.mark.parametrize("spelled", [MODEL, quote(MODEL, safe="@"), quote(MODEL, safe="")])
    async def test_may_spell_the_model_raw_or_encoded(self, app: ASGIApp, fakes: Fakes, spelled: str) -> None:
        assert (await post(app, RUN + spelled, {"prompt": "hi"})).status == 200
        assert fakes.pipeline.requests[0].model == MODEL

    async def test_null_and_array_content_are_good(self, app: ASGIApp, fakes: Fakes) -> None:
        messages = [
            {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
        assert (await post(app, RUN + MODEL, {"messages": messages})).status == 200

    @pytest.mark.parametrize(
        ("body", "pointer"),
        [
            ({}, "/prompt"),
            ({"prompt": "a", "messages": MESSAGES}, "/prompt"),
            ({"prompt": ""}, "/prompt"),
            ({"prompt": ["a"]}, "/prompt"),
            ({"raw": True, "messages": []}, "/messages"),
            ({"messages": [{"role": "user", "content": 7}]}, "/messages/0/content"),
            ({"prompt": "a", "temperature": 5.1}, "/temperature"),
            ({"prompt": "a", "raw": "yes"}, "/raw"),
            ({"prompt": "a", "image": [1]}, "/image"),
            ({"requests": []}, "/requests"),
            ({"prompt": "a", "n": 2, "stream": True}, "/n"),
            ({"prompt": "a", "logprobs": True, "stream": True}, "/logprobs"),
            ({"prompt": "a", "tools": [{}]}, "/tools/0/name"),
            ({"prompt": "a", "response_format": {"type": "xml"}}, "/response_format/type"),
            ({"prompt": "a", "top_logprobs": 2}, "/top_logprobs"),
        ],
        ids=str,
    )
    async def test_with_faults_are_5006_with_the_failing_path(
        self, app: ASGIApp, fakes: Fakes, body: dict[str, Any], pointer: str
    ) -> None:
        answer = await post(app, RUN + MODEL, body)
        assert (answer.status, code_of(answer)) == (400, 5006)
        assert f"'{pointer}'" in answer.json["errors"][0]["message"]
        assert "oneOf" not in answer.json["errors"][0]["message"]
        assert fakes.pipeline.requests == []

    async def test_that_are_no_json_are_3003(self, app: ASGIApp) -> None:
        for body in (b"", b"{", b"[]"):
            answer = await post(app, RUN + MODEL, body)
            assert (answer.status, code_of(answer)) == (400, 3003)

    async def test_longer_than_a_question_after_a_batch_are_none(self, app: ASGIApp) -> None:
        assert asks_after(b'{"request_id":"x"}')
        body = b'{"request_id":"x","padding":[%b{}]}' % (b"{}," * 20_000)
        assert not asks_after(body), "20,000 objects would be built before anybody counts them"
        answer = await post(app, RUN + MODEL, body)
        assert (answer.status, code_of(answer)) == (400, 3003)

    async def test_for_an_adapter_are_5005(self, app: ASGIApp) -> None:
        answer = await post(app, RUN + MODEL, {"prompt": "a", "lora": "mine"})
        assert (answer.status, code_of(answer)) == (405, 5005)

    @pytest.mark.parametrize("requests", [[], "a", [1], [{"external_reference": 7}], [{"external_reference": "a\0"}]])
    async def test_for_the_batch_queue_are_refused_that_are_none(self, app: ASGIApp, requests: object) -> None:
        answer = await post(app, RUN + MODEL + "?queueRequest=true", {"requests": requests})
        assert (answer.status, code_of(answer)) == (400, 5006)


class TestStreams:
    async def test_end_with_usage_and_done(self, app: ASGIApp) -> None:
        answer = await post(app, RUN + MODEL, {"prompt": "hi", "stream": True})
        frames = [orjson.loads(frame.removeprefix(b"data: ")) for frame in answer.chunks[:-1]]
        assert [frame["response"] for frame in frames] == ["Hi", ""]
        assert frames[-1]["usage"]["completion_tokens"] == 9
        assert answer.chunks[-1] == b"data: [DONE]\n\n"
        assert answer.body.count(b'"usage"') == 1

    async def test_of_raw_prompts_are_the_same_frames(self, app: ASGIApp, fakes: Fakes) -> None:
        raw = b'{"id":"x","choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":%b}]}'
        fakes.pipeline.streams = FakeStream(raw % b"null", raw.replace(b"Hi", b"") % b'"stop"')
        answer = await post(app, RUN + MODEL, {"prompt": "hi", "raw": True, "stream": True})
        assert orjson.loads(answer.chunks[0].removeprefix(b"data: "))["response"] == "Hi"
        assert orjson.loads(answer.chunks[1].removeprefix(b"data: "))["finish_reason"] == "stop"

    @pytest.mark.parametrize(("asked", "count"), [(None, 1), (True, 1), (False, 0)])
    async def test_leave_usage_out_only_if_it_is_declined(
        self, app: ASGIApp, *, asked: bool | None, count: int
    ) -> None:
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        answer = await post(app, RUN + MODEL, {"prompt": "hi", "stream": True, **options})
        assert answer.body.count(b'"usage"') == count
        assert answer.body.count(b"[DONE]") == 1

    async def test_that_fail_end_in_an_error_without_done(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = FakeStream(content_chunk("Hi"), error=GenerationFailed("Failed."))
        answer = await post(app, RUN + MODEL, {"prompt": "hi", "stream": True})
        last = orjson.loads(answer.chunks[-1].removeprefix(b"data: "))
        assert (last["errors"][0]["code"], last["error"]["code"]) == (3043, "generation_failed")
        assert b"[DONE]" not in answer.body
        assert b'"finish_reason"' not in answer.body

    @pytest.mark.parametrize("streamed", [True, False])
    async def test_and_whole_answers_are_given_up_when_the_client_leaves(
        self, app: ASGIApp, fakes: Fakes, *, streamed: bool
    ) -> None:
        fakes.pipeline.completes = fakes.pipeline.streams = None
        waiting = exchange(app, "POST", RUN + MODEL, body={"prompt": "hi", "stream": streamed}).start()
        await until(lambda: len(fakes.pipeline.requests) == 1)
        waiting.leave()
        await waiting.ended()
        assert fakes.pipeline.cancelled == 1

    async def test_are_closed_when_the_client_leaves(self, app: ASGIApp, fakes: Fakes) -> None:
        stream = FakeStream(ROLE_CHUNK, content_chunk("Hi"), hangs=True)
        fakes.pipeline.streams = stream
        running = exchange(app, "POST", RUN + MODEL, body={"prompt": "hi", "stream": True}).start()
        await running.until_sent(1)
        running.leave()
        await running.ended()
        assert stream.closed == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("error", "status", "code"),
        [
            (ModelNotFound("@cf/no/such"), 400, 5007),
            (PromptTooLong(prompt_tokens=9000, limit_tokens=8191), 413, 5021),
            (CapacityExceeded("Busy."), 429, 3040),
            (Evicted("Waited."), 429, 3040),
            (ConcurrencyExceeded("Taken."), 429, 3021),
            (EngineUnavailable("Down."), 503, 7009),
            (GenerationFailed("Failed."), 502, 3043),
            (InsufficientCredits("Out."), 402, 3036),
            (PriceUnavailable("No price."), 503, 7009),
        ],
    )
    async def test_of_the_gateway_have_the_codes_of_the_spec(
        self, app: ASGIApp, fakes: Fakes, error: Exception, status: int, code: int
    ) -> None:
        fakes.pipeline.completes = fakes.pipeline.streams = error
        for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}):
            answer = await post(app, RUN + MODEL, body)
            assert (answer.status, code_of(answer)) == (status, code)

    @pytest.mark.parametrize(
        ("held", "status", "code"),
        [
            (KeyRevoked("Revoked."), 401, 10000),
            (KeyExpired("Expired."), 401, 10000),
            (AccountSuspended("Suspended."), 403, 3023),
            (TenancyUnavailable("The database does not answer."), 503, 7009),
        ],
    )
    async def test_of_keys_have_the_codes_of_the_spec(
        self, app: ASGIApp, fakes: Fakes, held: Exception, status: int, code: int
    ) -> None:
        fakes.authenticator.keys["held"] = held
        answer = await post(app, RUN + MODEL, {"prompt": "hi"}, key="held")
        assert (answer.status, code_of(answer)) == (status, code)

    @pytest.mark.parametrize(
        ("account", "key", "status", "code"),
        [
            (ACCOUNT, None, 400, 9106),
            (ACCOUNT, "unknown", 401, 10000),
            (OTHER_ACCOUNT, KEY, 403, 10000),
            (ACCOUNT, ADMIN_KEY, 403, 10000),
            ("me", KEY, 404, 7003),
            (ACCOUNT.upper(), KEY, 404, 7003),
            ("me", None, 400, 9106),
        ],
    )
    async def test_at_the_front_door(self, app: ASGIApp, account: str, key: str | None, status: int, code: int) -> None:
        answer = await post(app, f"/client/v4/accounts/{account}/ai/run/{MODEL}", {"prompt": "hi"}, key=key)
        assert (answer.status, code_of(answer)) == (status, code)
