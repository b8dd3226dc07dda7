"""Chat and completions over the whole application: requests as the gateway gets them, answers to the byte."""

import asyncio
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from api.app import create_app
from backends.errors import EngineBroke
from billing.errors import InsufficientCredits, PriceUnavailable
from gateway.errors import CapacityExceeded, GenerationFailed, ModelNotFound, PromptTooLong
from gateway.request import Completion, Endpoint, OutputCap
from tests.api.exchange import exchange, post
from tests.fakes import (
    ACCOUNT,
    ADMIN_KEY,
    CREATED,
    FINISH_CHUNK,
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

PREFIXES = ["/v1", f"/client/v4/accounts/{ACCOUNT}/ai/v1"]
CHAT = "/v1/chat/completions"
ACCOUNT_CHAT = f"/client/v4/accounts/{ACCOUNT}/ai/v1/chat/completions"
TEXT = "/v1/completions"
USAGE = (
    '"usage":{"prompt_tokens":11,"completion_tokens":9,"total_tokens":20,"prompt_tokens_details":{"cached_tokens":4},'
    '"completion_tokens_details":{"reasoning_tokens":0},"cost":"0.00004329"}'
)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hi", **fields}


class TestWholeAnswers:
    @pytest.mark.parametrize("prefix", PREFIXES)
    async def test_of_chat_are_bare_objects_without_the_engines_own_fields(self, app: ASGIApp, prefix: str) -> None:
        answer = await post(app, f"{prefix}/chat/completions", chat())
        request_id = answer.headers["x-request-id"]
        assert answer.body.decode() == (
            f'{{"id":"{request_id}","object":"chat.completion","created":{CREATED},"model":"{MODEL}",'
            '"choices":[{"index":0,"message":{"role":"assistant","content":"Paris.","refusal":null},"logprobs":null,'
            f'"finish_reason":"stop"}}],{USAGE},"system_fingerprint":null}}'
        )
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cf-ai-neurons"] == "3.9354"

    async def test_of_completions_are_text_completions(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = text_completion()
        answer = await post(app, TEXT, text())
        assert answer.json["object"] == "text_completion"
        assert answer.json["choices"] == [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "length"}]

    async def test_carry_reasoning_and_tool_calls_if_there_are_any(self, app: ASGIApp, fakes: Fakes) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        fakes.pipeline.completes = chat_completion(reasoning_content="Hm.", tool_calls=[{**call, "index": 0}])
        message = (await post(app, CHAT, chat())).json["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"] == [call]

    async def test_carry_logprobs(self, app: ASGIApp, fakes: Fakes) -> None:
        choice = {**chat_completion().choices[0], "logprobs": {"content": [{"token": "P", "logprob": -0.1}]}}
        fakes.pipeline.completes = Completion(CREATED, (choice,), OutputCap(9, clamped=False), SETTLEMENT)
        answer = await post(app, CHAT, chat(logprobs=True))
        assert answer.json["choices"][0]["logprobs"]["content"][0]["token"] == "P"

    async def test_say_what_max_tokens_was_lowered_to_and_what_was_ignored(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = chat_completion(cap=OutputCap(77, clamped=True))
        answer = await post(app, CHAT, chat(max_tokens=10**9, reasoning_effort="low"))
        assert answer.headers["x-pagegate-max-tokens"] == "77"
        assert answer.headers["x-ignored-params"] == "reasoning_effort"
        fakes.pipeline.completes = chat_completion()
        answer = await post(app, CHAT, chat())
        assert "x-pagegate-max-tokens" not in answer.headers
        assert "x-ignored-params" not in answer.headers

    async def test_are_given_up_when_the_client_leaves(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = None
        waiting = exchange(app, "POST", CHAT, body=chat()).start()
        await until(lambda: len(fakes.pipeline.requests) == 1)
        waiting.leave()
        await waiting.ended()
        assert fakes.pipeline.cancelled == 1


class TestRequests:
    async def test_are_the_gateways_words(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(
            app, CHAT, chat(max_tokens=5, temperature=0.5, n=2, seed=7, stop="x", options={"rejectIfBusy": True})
        )
        (request,) = fakes.pipeline.requests
        assert (request.endpoint, request.route, request.model) == (Endpoint.CHAT, "chat", MODEL)
        assert request.messages == ({"role": "user", "content": "hi"},)
        assert request.prompt is None
        assert (request.max_tokens, request.n, request.stream, request.reject_if_busy) == (5, 2, False, True)
        assert request.sampling == {"temperature": 0.5, "seed": 7, "stop": ("x",)}
        assert request.principal.account_id == ACCOUNT
        assert request.deadline_s == fakes.settings.gateway.queue_wait_seconds_max

    async def test_of_completions_take_text_or_token_ids(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = text_completion()
        for prompt in ("hi", ["hi"], [1, 2, 3], [[1, 2, 3]]):
            assert (await post(app, TEXT, text(prompt=prompt))).status == 200
        assert [request.prompt for request in fakes.pipeline.requests] == ["hi", "hi", (1, 2, 3), (1, 2, 3)]
        assert {request.endpoint for request in fakes.pipeline.requests} == {Endpoint.COMPLETIONS}

    async def test_ask_for_logprobs_in_each_surfaces_way(self, app: ASGIApp, fakes: Fakes) -> None:
        await post(app, CHAT, chat(logprobs=True, top_logprobs=3))
        await post(app, CHAT, chat(logprobs=False))
        fakes.pipeline.completes = text_completion()
        await post(app, TEXT, text(logprobs=2))
        assert [request.sampling for request in fakes.pipeline.requests] == [
            {"logprobs": True, "top_logprobs": 3},
            {},
            {"logprobs": 2},
        ]

    async def test_stream_options_without_a_stream_have_no_effect(self, app: ASGIApp, fakes: Fakes) -> None:
        assert (await post(app, CHAT, chat(stream_options={"include_usage": True}))).status == 200
        assert "stream_options" not in fakes.pipeline.requests[0].sampling

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "model"),
            (CHAT, {"model": MODEL}, "messages"),
            (CHAT, chat(messages="hi"), "messages"),
            (CHAT, chat(messages=[7]), "messages[0]"),
            (CHAT, chat(model=7), "model"),
            (CHAT, chat(top_logprobs=3), "top_logprobs"),
            (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
            (CHAT, chat(n=9), "n"),
            (CHAT, chat(tools=[{}]), "tools[0].name"),
            (TEXT, text(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
            (CHAT, chat(lora="a"), "lora"),
            (CHAT, chat(lora_path="a"), "lora"),
            (TEXT, {"model": MODEL}, "prompt"),
            (TEXT, text(prompt=""), "prompt"),
            (TEXT, text(prompt=[]), "prompt"),
            (TEXT, text(prompt=["a", "b"]), "prompt"),
            (TEXT, text(prompt=[True]), "prompt"),
            (TEXT, text(prompt=[-1]), "prompt"),
            (TEXT, text(prompt=[2**31]), "prompt"),
            (TEXT, text(prompt=None), "prompt"),
            (TEXT, text(logprobs=6), "logprobs"),
            (TEXT, text(logprobs=True), "logprobs"),
            (TEXT, text(echo=True), "echo"),
            (TEXT, text(suffix="x"), "suffix"),
            (TEXT, text(best_of=2), "best_of"),
        ],
        ids=str,
    )
    async def test_with_faults_name_the_parameter(
        self, app: ASGIApp, fakes: Fakes, path: str, body: dict[str, Any], param: str
    ) -> None:
        answer = await post(app, path, body)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert fakes.pipeline.requests == []

    async def test_defaults_of_what_is_not_served_pass(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = text_completion()
        assert (await post(app, TEXT, text(echo=False, suffix=None, best_of=1))).status == 200
        assert (await post(app, TEXT, text(suffix="", best_of=2, n=2))).status == 200


class TestStreams:
    async def test_are_the_engines_chunks_byte_for_byte(self, app: ASGIApp, fakes: Fakes) -> None:
        chunks = [ROLE_CHUNK, content_chunk("北🙂"), content_chunk("\\u0041 \\n"), FINISH_CHUNK]
        fakes.pipeline.streams = FakeStream(*chunks)
        answer = await post(app, CHAT, chat(stream=True))
        assert answer.chunks == [b"data: " + chunk + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]
        assert answer.headers["content-type"].startswith("text/event-stream")

    async def test_end_with_usage_once_and_done_once(self, app: ASGIApp) -> None:
        answer = await post(app, ACCOUNT_CHAT, chat(stream=True))
        request_id = answer.headers["x-request-id"]
        assert answer.chunks[-2].decode() == (
            f'data: {{"id":"{request_id}","object":"chat.completion.chunk","created":{CREATED},"model":"{MODEL}",'
            f'"choices":[],{USAGE}}}\n\n'
        )
        assert answer.body.count(b"[DONE]") == answer.body.count(b'"usage"') == 1

    @pytest.mark.parametrize(
        ("path", "asked", "sent"),
        [
            (CHAT, None, 0),
            (CHAT, True, 1),
            (CHAT, False, 0),
            (ACCOUNT_CHAT, None, 1),
            (ACCOUNT_CHAT, True, 1),
            (ACCOUNT_CHAT, False, 0),
        ],
    )
    async def test_carry_usage_as_each_prefix_promises(
        self, app: ASGIApp, path: str, *, asked: bool | None, sent: int
    ) -> None:
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        answer = await post(app, path, chat(stream=True, **options))
        assert answer.body.count(b'"usage"') == sent

    async def test_of_completions_say_so_in_the_usage_chunk(self, app: ASGIApp) -> None:
        answer = await post(app, TEXT, text(stream=True, stream_options={"include_usage": True}))
        assert orjson.loads(answer.chunks[-2].removeprefix(b"data: "))["object"] == "text_completion"

    async def test_that_fail_say_so_and_neither_stop_nor_done(self, app: ASGIApp, fakes: Fakes) -> None:
        failed = GenerationFailed("The engine failed.")
        failed.__cause__ = EngineBroke("cut")
        fakes.pipeline.streams = FakeStream(ROLE_CHUNK, content_chunk("Hi"), error=failed)
        answer = await post(app, ACCOUNT_CHAT, chat(stream=True))
        assert orjson.loads(answer.chunks[-1].removeprefix(b"data: "))["error"]["code"] == "generation_failed"
        for absent in (b"[DONE]", b'"usage"', b'"finish_reason":"'):
            assert absent not in answer.body

    async def test_refused_before_they_began_have_a_status(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = CapacityExceeded("Busy.", retry_after_s=3)
        answer = await post(app, CHAT, chat(stream=True))
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        assert answer.headers["content-type"] == "application/json"

    async def test_are_given_up_when_the_client_leaves_while_waiting(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = None
        waiting = exchange(app, "POST", CHAT, body=chat(stream=True)).start()
        await until(lambda: len(fakes.pipeline.requests) == 1)
        waiting.leave()
        await waiting.ended()
        assert fakes.pipeline.cancelled == 1

    async def test_are_closed_when_the_client_leaves_in_the_middle(self, app: ASGIApp, fakes: Fakes) -> None:
        stream = FakeStream(ROLE_CHUNK, hangs=True)
        fakes.pipeline.streams = stream
        running = exchange(app, "POST", CHAT, body=chat(stream=True)).start()
        await running.until_sent(1)
        running.leave()
        await running.ended()
        assert stream.closed == 1

    async def test_say_what_max_tokens_was_lowered_to(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.streams = FakeStream(FINISH_CHUNK, cap=OutputCap(77, clamped=True))
        answer = await post(app, CHAT, chat(stream=True, max_tokens=10**6))
        assert answer.headers["x-pagegate-max-tokens"] == "77"


class TestRefusals:
    @pytest.mark.parametrize(
        ("error", "status", "kind", "code"),
        [
            (ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
            (PromptTooLong(prompt_tokens=9, limit_tokens=8), 400, "invalid_request_error", "context_length_exceeded"),
            (InsufficientCredits("Out."), 402, "insufficient_quota", "insufficient_credits"),
            (PriceUnavailable("No price."), 503, "server_error", "price_unavailable"),
            (CapacityExceeded("Busy."), 429, "rate_limit_error", "capacity_exceeded"),
            (GenerationFailed("Failed."), 502, "server_error", "generation_failed"),
        ],
    )
    async def test_of_the_gateway_are_openais(
        self, app: ASGIApp, fakes: Fakes, error: Exception, *, status: int, kind: str, code: str
    ) -> None:
        fakes.pipeline.completes = error
        for prefix in PREFIXES:
            answer = await post(app, f"{prefix}/chat/completions", chat())
            assert answer.status == status
            assert (answer.json["error"]["type"], answer.json["error"]["code"]) == (kind, code)
            assert answer.json["success"] is False
            assert answer.json["error"]["param"] == ("model" if code == "model_not_found" else None)

    async def test_for_the_key_come_before_the_body_is_read(self, app: ASGIApp) -> None:
        for path, key, status in (
            (CHAT, None, 401),
            (CHAT, "unknown", 401),
            (CHAT, ADMIN_KEY, 403),
            (ACCOUNT_CHAT.replace(ACCOUNT, OTHER_ACCOUNT), "inference-key", 403),
            (ACCOUNT_CHAT.replace(ACCOUNT, "nonsense"), "inference-key", 404),
        ):
            refused = exchange(app, "POST", path, body=[b"{"], key=key, never_ends=True)
            assert (await refused.run()).status == status
            assert refused._pending == [b"{"]

    async def test_a_scheme_or_a_second_credential_nobody_asked_for_is_refused(self, fakes: Fakes) -> None:
        app = create_app(fakes.services)
        for value in ("", "Basic YTpi", "Bearer", "Bearer ", "inference-key"):
            assert (await post(app, CHAT, chat(), key=None, headers={"authorization": value})).status == 401
        twice = exchange(app, "POST", CHAT, body=chat())
        twice.scope["headers"].append((b"authorization", b"Bearer inference-key"))
        assert (await twice.run()).status == 401
        assert (
            await post(app, CHAT, chat(), key=None, headers={"authorization": "bearer inference-key"})
        ).status == 200

    async def test_many_at_once_keep_their_answers_apart(self, app: ASGIApp) -> None:
        answers = await asyncio.gather(*(post(app, CHAT, chat()) for _ in range(20)))
        assert len({answer.json["id"] for answer in answers}) == 20
        assert all(answer.json["id"] == answer.headers["x-request-id"] for answer in answers)
