"""The front door: unknown routes and wrong methods in each dialect, closed routes, and no body that breaks anything."""

import asyncio
import json
import re
from functools import cache
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from api.app import PlainRoute, create_app, framework_app
from tests.api.exchange import call, exchange, get, post
from tests.examples import examples
from tests.fakes import ACCOUNT, CARD, FINISH_CHUNK, MODEL, Fakes, FakeStream, chat_completion, text_completion

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
# What needs no key; a secret scanner's report is signed instead.
OPEN = {"/health/live", "/health/ready", "/metrics", "/docs", "/console/v1/secret_scanning"}


class TestRouting:
    @pytest.mark.parametrize(
        ("path", "status", "code"),
        [
            ("/client/v4/nothing", 400, 7000),
            (f"/client/v4/accounts/{ACCOUNT}/ai/nothing", 400, 7000),
            ("/v1/nothing", 404, 7000),
            (f"/client/v4/accounts/{ACCOUNT}/ai/v1/nothing", 404, 7000),
        ],
    )
    async def test_unknown_routes(self, app: ASGIApp, path: str, status: int, code: int) -> None:
        answer = await get(app, path)
        assert (answer.status, answer.json["errors"][0]["code"]) == (status, code)

    async def test_unknown_routes_elsewhere_are_problems(self, app: ASGIApp) -> None:
        answer = await get(app, "/console/v1/nothing")
        assert (answer.status, answer.json["code"]) == (404, "unknown_route")

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
    @pytest.mark.parametrize("path", [CHAT, TEXT, RUN])
    async def test_wrong_methods(self, app: ASGIApp, method: str, path: str) -> None:
        answer = await call(app, method, path)
        assert (answer.status, answer.json["errors"][0]["code"], answer.headers["allow"]) == (405, 7001, "POST")

    async def test_a_trailing_slash_is_another_route(self, app: ASGIApp) -> None:
        assert (await post(app, CHAT + "/", {})).status == 404

    async def test_openapi_lists_every_route_and_the_bodies(self, app: ASGIApp) -> None:
        described = (await get(app, "/openapi.json")).json["paths"]
        body = described["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"model", "messages", "temperature", "stream_options"} <= set(body["properties"])
        assert "$defs" not in body
        assert "/console/v1/invariants" in described

    async def test_openapi_says_the_bound_on_choices_that_is_enforced(self, fakes: Fakes) -> None:
        fakes.settings = fakes.settings.model_copy(update={"choices_max": 5})
        described = (await get(create_app(fakes.services), "/openapi.json")).json["paths"]
        for path in (CHAT, "/v1/completions"):
            body = described[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body["properties"]["n"]["anyOf"][0]["maximum"] == 5


async def test_every_route_but_the_open_ones_is_closed_without_a_key(app: ASGIApp, fakes: Fakes) -> None:
    routes = framework_app(fakes.services).routes
    closed = [route for route in routes if isinstance(route, PlainRoute) and route.path not in OPEN]
    assert len(closed) >= 15
    for route in closed:
        path = re.sub(
            r"{(\w+)}", lambda name: {"account_id": ACCOUNT, "model": MODEL}.get(name[1], "1"), route.path_format
        )
        answer = await call(app, min(route.methods or {"GET"}), path, key=None, body={})
        assert answer.status in {400, 401}, route.path
        assert "key" in answer.body.decode().lower()
        for secret in (CARD.description, "usage"):
            assert secret not in answer.body.decode()


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "system", "text", "none", "auto", MODEL]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
message = st.fixed_dictionaries(
    {},
    optional={"role": values, "content": values, "name": values, "tool_calls": values, "tool_call_id": values},
)
names = [
    "model", "messages", "prompt", "raw", "stream", "stream_options", "options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n", "logit_bias", "logprobs", "top_logprobs", "tools",
    "tool_choice", "response_format", "guided_json", "echo", "suffix", "best_of", "lora", "image", "requests", "extra",
    "frequency_penalty", "presence_penalty", "repetition_penalty",
]  # fmt: skip
bodies = st.fixed_dictionaries({}, optional=dict.fromkeys(names, values)) | st.fixed_dictionaries(
    {"model": st.just(MODEL), "messages": st.lists(message, max_size=3)},
    optional={name: values for name in names if name not in {"model", "messages"}},
)


@cache
def fuzzed() -> tuple[ASGIApp, Fakes]:
    fakes = Fakes()
    return create_app(fakes.services), fakes


def answer_to(path: str, body: bytes) -> Any:
    app, fakes = fuzzed()
    fakes.pipeline.completes = text_completion() if path == TEXT or b'"raw": true' in body else chat_completion()
    fakes.pipeline.streams = FakeStream(FINISH_CHUNK)
    with structlog.testing.capture_logs():
        return asyncio.run(exchange(app, "POST", path, body=body).run())


@pytest.mark.load
@settings(max_examples=examples(120), deadline=None)
@given(st.sampled_from([CHAT, TEXT, RUN]), bodies)
def test_no_body_makes_a_500(path: str, body: dict[str, Any]) -> None:
    answer = answer_to(path, json.dumps(body).encode())
    assert answer.status in {200, 400, 405, 413}, answer.body


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from([CHAT, TEXT, RUN]), st.binary(max_size=200))
def test_no_bytes_make_a_500(path: str, body: bytes) -> None:
    assert answer_to(path, body).status == 400
