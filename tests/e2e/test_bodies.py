"""Bad input gets the right status, code and body in its dialect; no engine sees it and no record is written of it."""

import time
from typing import Any

import orjson
import pytest

from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tenancy.provisioning import issue_key, list_keys, revoke_key, set_limits, set_suspended
from tests.doubles.waiting import eventually_async
from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, COMPLETIONS, DIALECTS, MESSAGES, RUN, Dialect, dialect_name
from tests.e2e.service import Answer, Service

OPENAI_SHAPED = [CHAT, ACCOUNT_CHAT, COMPLETIONS]


def is_openai_error(answer: Answer, status: int, kind: str) -> None:
    """The superset body: OpenAI's error object beside the envelope's fields."""
    body = answer.json()
    assert (answer.status, body["error"]["type"]) == (status, kind), body
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    assert body["success"] is False
    assert body["result"] is None
    assert body["messages"] == []
    assert body["errors"][0]["message"] == body["error"]["message"]
    assert isinstance(body["errors"][0]["code"], int)


def is_native_error(answer: Answer, status: int, code: int) -> None:
    body = answer.json()
    assert (answer.status, body["errors"][0]["code"]) == (status, code), body
    assert (body["success"], body["messages"]) == (False, [])
    assert isinstance(body["errors"][0]["message"], str)


def is_refused(dialect: Dialect, answer: Answer, status: int, *, native_code: int, kind: str) -> None:
    if dialect is RUN:
        is_native_error(answer, status, native_code)
    else:
        is_openai_error(answer, status, kind)
    assert answer.headers["x-request-id"]
    assert answer.headers["cf-ai-req-id"]


async def left_no_trace(service: Service) -> None:
    assert service.engine.requests == []
    await service.oracle(rows=0)


async def is_bad_request(service: Service, dialect: Dialect, body: bytes | dict[str, Any]) -> Answer:
    answer = await service.post(dialect.path(service), body)
    is_refused(dialect, answer, 400, native_code=5006, kind="invalid_request_error")
    return answer


NOT_AN_OBJECT = [b"", b"{", b"nul", b'{"a":1,}', b"\xff\xfe{}", b'"text"', b"[]", b"7", b"null"]
NOT_A_NUMBER = [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400"]
WRONG: list[dict[str, Any]] = [
    {"max_tokens": "many"},
    {"max_tokens": 1.5},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": True},
    {"max_tokens": 10**30},
    {"temperature": "warm"},
    {"temperature": -0.1},
    {"temperature": 5.1},
    {"temperature": []},
    {"top_p": 1.01},
    {"top_p": -1},
    {"seed": 1.5},
    {"seed": "s"},
    {"stream": "yes"},
    {"frequency_penalty": 2.1},
    {"presence_penalty": -2.1},
    {"repetition_penalty": -1},
    {"messages": None, "prompt": None},
]


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
class TestBadBodies:
    async def test_broken_json_and_json_that_is_no_object(self, service: Service, dialect: Dialect) -> None:
        for body in NOT_AN_OBJECT:
            answer = await service.post(dialect.path(service), body)
            assert answer.status == 400, (body, answer.body)
            assert dialect.error_of(answer.json())
        await left_no_trace(service)

    async def test_wrong_types_and_numbers_out_of_range(self, service: Service, dialect: Dialect) -> None:
        for fields in WRONG:
            answer = await is_bad_request(service, dialect, dialect.body(service, **fields))
            _, message = dialect.error_of(answer.json())
            assert "oneOf" not in message
            for name, value in fields.items():
                assert value is None or name in message, (fields, message)
        await left_no_trace(service)

    async def test_numbers_that_are_none(self, service: Service, dialect: Dialect) -> None:
        good = orjson.dumps(dialect.body(service, max_tokens=None))
        for name in ("temperature", "top_p", "max_tokens", "seed"):
            for number in NOT_A_NUMBER:
                body = good[:-1] + b',"' + name.encode() + b'":' + number + b"}"
                answer = await service.post(dialect.path(service), body)
                assert answer.status == 400, (name, number, answer.body)
        await left_no_trace(service)

    async def test_half_of_a_surrogate_pair_is_no_text(self, service: Service, dialect: Dialect) -> None:
        half = orjson.dumps(dialect.body(service)).replace(b"Say something.", b"\\ud83d")
        answer = await service.post(dialect.path(service), half)
        assert answer.status == 400, answer.body
        assert dialect.error_of(answer.json())
        await left_no_trace(service)

    async def test_deep_nesting(self, service: Service, dialect: Dialect) -> None:
        for brackets in (b"[" * 100_000, b"[" * 5_000 + b"]" * 5_000, b'{"a":' * 2_000 + b"1" + b"}" * 2_000):
            good = orjson.dumps(dialect.body(service))
            answer = await service.post(dialect.path(service), good[:-1] + b',"deep":' + brackets + b"}")
            assert answer.status == 400, answer.body[:200]
        await left_no_trace(service)

    async def test_a_body_above_the_limit_is_too_large(self, service: Service, dialect: Dialect) -> None:
        good = orjson.dumps(dialect.body(service))
        body = good[:-1] + b',"padding":"' + b"x" * 11_000_000 + b'"}'
        answer = await service.post(dialect.path(service), body)
        is_refused(dialect, answer, 413, native_code=3006, kind="invalid_request_error")
        await left_no_trace(service)

    async def test_a_prompt_of_a_million_tokens_can_never_fit(self, service: Service, dialect: Dialect) -> None:
        words = "a b c d " * 250_000
        prompt = {"prompt": words} if dialect is COMPLETIONS else {"messages": [{"role": "user", "content": words}]}
        answer = await service.post(dialect.path(service), dialect.body(service, **prompt))
        if dialect is RUN:
            is_native_error(answer, 413, 5021)
        else:
            is_openai_error(answer, 400, "invalid_request_error")
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert any(character.isdigit() for character in dialect.error_of(answer.json())[1]), "the numbers are told"
        assert "retry-after" not in answer.headers
        assert service.engine.requests == []

    async def test_ten_bad_ones_leave_no_slot_taken(self, service: Service, dialect: Dialect) -> None:
        set_limits(service.services.database, service.account_id, concurrency=1, credit_limit_nano=None)
        for _ in range(10):
            assert (await service.post(dialect.path(service), b'{"messages":7,"prompt":7}')).status == 400
            unknown = await service.post(dialect.path(service), {"model": "@cf/no/such", "messages": 7})
            assert unknown.status == 400
        answer = await service.post(dialect.path(service), dialect.body(service))
        assert answer.status == 200, answer.body
        await service.oracle(rows=1)


class TestBadMessages:
    @pytest.mark.parametrize("dialect", [CHAT, ACCOUNT_CHAT, RUN], ids=dialect_name)
    async def test_are_refused(self, service: Service, dialect: Dialect) -> None:
        bad: list[object] = [[], "hi", [7], [{}], [{"role": 7, "content": "x"}], [{"role": "user", "content": 7}]]
        for messages in bad:
            await is_bad_request(service, dialect, dialect.body(service, messages=messages))
        await left_no_trace(service)

    @pytest.mark.parametrize("dialect", [CHAT, RUN], ids=dialect_name)
    async def test_null_and_array_content_are_good(self, service: Service, dialect: Dialect) -> None:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None},
            {"role": "system", "content": "Late, and merged to the front."},
            {"role": "user", "content": "three"},
        ]
        answer = await service.post(dialect.path(service), dialect.body(service, messages=messages))
        assert answer.status == 200, answer.body
        await service.oracle(rows=1)

    async def test_stream_options_without_a_stream_do_not_reach_the_engine(self, service: Service) -> None:
        for options in (None, {"include_usage": True}):
            answer = await service.post(CHAT.path(service), CHAT.body(service, stream_options=options))
            assert answer.status == 200, answer.body
        assert len(service.engine.requests) == 2
        assert not any("stream_options" in received.body for received in service.engine.requests)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_older_tools_are_refused_and_not_left_out(self, service: Service, dialect: Dialect) -> None:
        body = dialect.body(service, functions=[{"name": "f", "parameters": {}}], function_call={"name": "f"})
        assert b"'/functions'" in (await is_bad_request(service, dialect, body)).body
        await left_no_trace(service)

    async def test_fields_that_steer_an_engine_never_reach_it(self, service: Service) -> None:
        inner = {
            "rid": "mine",
            "priority": 9,
            "cache_salt": "s",
            "extra_key": "k",
            "lora_path": None,
            "custom_logit_processor": "p",
            "bootstrap_host": "h",
            "bootstrap_port": 1,
            "bootstrap_room": 1,
            "input_ids": [1],
            "ignore_eos": True,
            "return_hidden_states": True,
        }
        for dialect in DIALECTS:
            answer = await service.post(dialect.path(service), dialect.body(service) | inner)
            assert answer.status == 200, answer.body
            received = service.engine.requests[-1]
            for name in inner.keys() - {"rid", "input_ids", "cache_salt", "extra_key", "priority"}:
                assert name not in received.body, name
            assert received.body["rid"] != "mine"
            assert received.body.get("input_ids") != [1]
            assert received.body.get("cache_salt") != "s"
            assert received.body.get("extra_key") != "k"
            assert received.body.get("priority") != 9


class TestModels:
    @pytest.mark.parametrize("dialect", OPENAI_SHAPED, ids=dialect_name)
    async def test_an_unknown_model_is_not_found(self, service: Service, dialect: Dialect) -> None:
        for model in ("gpt-4", "@cf/huggingfacetb", "../../etc", "m" * 5_000):
            answer = await service.post(dialect.path(service), dialect.body(service, model=model))
            is_openai_error(answer, 404, "invalid_request_error")
        await left_no_trace(service)

    async def test_a_model_is_required_where_the_path_names_none(self, service: Service) -> None:
        for dialect in OPENAI_SHAPED:
            body = dialect.body(service)
            del body["model"]
            is_openai_error(await service.post(dialect.path(service), body), 400, "invalid_request_error")
        await left_no_trace(service)

    async def test_an_unknown_model_in_the_path_is_5007(self, service: Service) -> None:
        path = f"/client/v4/accounts/{service.account_id}/ai/run/@cf/no/such"
        is_native_error(await service.post(path, RUN.body(service)), 400, 5007)
        await left_no_trace(service)

    async def test_a_path_may_be_raw_or_percent_encoded(self, service: Service) -> None:
        author, name = service.model.removeprefix("@cf/").split("/")
        for spelled in (f"@cf/{author}/{name}", f"@cf%2F{author}%2F{name}", f"%40cf%2F{author}%2F{name}"):
            path = f"/client/v4/accounts/{service.account_id}/ai/run/{spelled}"
            answer = await service.post(path, RUN.body(service))
            assert answer.status == 200, (spelled, answer.body)
        await service.oracle(rows=3)


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
class TestCredentials:
    async def test_no_credential(self, service: Service, dialect: Dialect) -> None:
        for headers in ({"authorization": ""}, {"authorization": "Basic YTpi"}, {"authorization": "Bearer"}):
            answer = await service.post(dialect.path(service), dialect.body(service), headers=headers)
            if dialect is CHAT or dialect is COMPLETIONS:
                is_openai_error(answer, 401, "authentication_error")
            else:
                assert answer.status in {400, 401}
                assert answer.json()["errors"][0]["code"] == 9106
        await left_no_trace(service)

    async def test_malformed_and_unknown_keys(self, service: Service, dialect: Dialect) -> None:
        for key in ("sk-foreign", "x" * 5_000, service.api_key[:-1], other_last_character(service.api_key)):
            answer = await service.post(dialect.path(service), dialect.body(service), key=key)
            is_refused(dialect, answer, 401, native_code=10000, kind="authentication_error")
            assert key.encode() not in answer.body
        await left_no_trace(service)

    async def test_a_revoked_key_is_refused_soon(self, service: Service, dialect: Dialect) -> None:
        services = service.services
        assert (await service.send("GET", "/v1/models")).status == 200
        for key in list_keys(services.database, service.account_id):
            if key.kind is KeyKind.INFERENCE:
                revoke_key(services.database, service.account_id, key.id, clock=time.time_ns)

        async def refused() -> bool:
            return (await service.send("GET", "/v1/models")).status == 401

        # To the millisecond it is tested with a clock that can be set; here a busy machine may take longer.
        await eventually_async(refused, what="a refused key")
        answer = await service.post(dialect.path(service), dialect.body(service))
        is_refused(dialect, answer, 401, native_code=10000, kind="authentication_error")
        await left_no_trace(service)

    async def test_an_expired_key(self, service: Service, dialect: Dialect) -> None:
        issued = issue_key(
            service.services.database,
            open_pepper(service.services.settings.pepper_path),
            service.account_id,
            name="short-lived",
            kind=KeyKind.INFERENCE,
            expires_at_ns=time.time_ns() + 300_000_000,
            clock=time.time_ns,
        )

        async def refused() -> bool:
            return (await service.send("GET", "/v1/models", key=issued.text)).status == 401

        assert not await refused()
        await eventually_async(refused, what="an expired key")
        answer = await service.post(dialect.path(service), dialect.body(service), key=issued.text)
        is_refused(dialect, answer, 401, native_code=10000, kind="authentication_error")
        await left_no_trace(service)

    async def test_a_key_that_may_not_generate(self, service: Service, dialect: Dialect) -> None:
        answer = await service.post(dialect.path(service), dialect.body(service), key=service.admin_key)
        is_refused(dialect, answer, 403, native_code=10000, kind="permission_error")
        await left_no_trace(service)

    async def test_a_suspended_account(self, service: Service, dialect: Dialect) -> None:
        set_suspended(service.services.database, service.account_id, suspended=True)
        answer = await service.post(dialect.path(service), dialect.body(service))
        is_refused(dialect, answer, 403, native_code=3023, kind="permission_error")
        assert service.engine.requests == []


def other_last_character(key: str) -> str:
    return key[:-1] + ("0" if key[-1] != "0" else "1")


class TestFrontDoor:
    async def test_another_account_and_an_unknown_one_are_refused_alike(self, service: Service) -> None:
        for tail in (f"run/{service.model}", "v1/chat/completions", "v1/models"):
            path = f"/client/v4/accounts/{'0' * 32}/ai/{tail}"
            method = "GET" if tail == "v1/models" else "POST"
            body = None if method == "GET" else {"model": service.model, "messages": MESSAGES}
            is_native_error(await service.send(method, path, body), 403, 10000)
        await left_no_trace(service)

    async def test_a_malformed_account_id(self, service: Service) -> None:
        for account in ("me", "A" * 32, "g" * 32, "0" * 31):
            path = f"/client/v4/accounts/{account}/ai/run/{service.model}"
            is_native_error(await service.post(path, RUN.body(service)), 404, 7003)
        await left_no_trace(service)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_wrong_methods(self, service: Service, dialect: Dialect) -> None:
        for method in ("GET", "PUT", "DELETE", "PATCH"):
            answer = await service.send(method, dialect.path(service))
            assert answer.status == 405, (method, answer.body)
            if dialect is not CHAT and dialect is not COMPLETIONS:
                assert answer.json()["errors"][0]["code"] == 7001
        await left_no_trace(service)

    async def test_unknown_routes(self, service: Service) -> None:
        assert (await service.send("GET", "/v1/nothing")).status == 404
        native = await service.send("GET", f"/client/v4/accounts/{service.account_id}/nothing")
        assert native.json()["errors"][0]["code"] == 7000

    async def test_models_are_listed_with_the_right_method(self, service: Service) -> None:
        for prefix in ("/v1", f"/client/v4/accounts/{service.account_id}/ai/v1"):
            answer = await service.send("GET", f"{prefix}/models")
            assert answer.status == 200
            (listed,) = answer.json()["data"]
            assert listed["id"] == service.model
            assert (await service.send("GET", f"{prefix}/models/{service.model}")).json()["id"] == service.model
            is_openai_error(await service.send("GET", f"{prefix}/models/none"), 404, "invalid_request_error")
