"""What reaches an engine of a client's body, over every route that generates: a list of fields, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, COMPLETIONS, RUN
from tests.e2e.service import Service

# Values are the client's, within the ranges that the dialects check.
PASSED_ON = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 11,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop": ["never said"],
    "logit_bias": {"5": 1.0},
}
# The gateway's own, whatever a client says.
OURS = {"model", "rid", "max_tokens", "stream", "stream_options", "messages", "input_ids", "prompt", "cache_salt"}
# What SGLang would heed: other people's caches, another engine's pages, a place before others, code, and more output.
HOSTILE: dict[str, Any] = {
    "rid": "mine",
    "input_ids": [1],
    "input_embeds": [[0.0]],
    "cache_salt": "theirs",
    "extra_key": "theirs",
    "priority": 1000,
    "bootstrap_host": "attacker.example",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
    "routed_dp_rank": 0,
    "data_parallel_rank": 0,
    "disagg_prefill_dp_rank": 0,
    "session_params": {"id": "theirs"},
    "custom_logit_processor": "code",
    "custom_params": {"a": 1},
    "return_hidden_states": True,
    "return_routed_experts": True,
    "ignore_eos": True,
    "min_tokens": 999,
    "no_stop_trim": True,
    "skip_special_tokens": False,
    "stop_token_ids": [1],
    "chat_template_kwargs": {"x": 1},
    "separate_reasoning": False,
    "stream_reasoning": False,
    "continue_final_message": True,
    "x-override-model": "other",
    "structural_tag": "{}",
    "max_dynamic_patch": 1,
}

# Who asks, how urgently, of which replica and salt: said by engines' routers in headers, and never by a client here.
HOSTILE_HEADERS = (
    "X-Tenant-Id", "x-pagegate-account", "X-PRIORITY", "x-request-priority", "x-fairness-id", "X-Cache-Salt",
    "x-data-parallel-rank", "X-SMG-Target-Worker", "x-smg-routing-key", "x-gateway-destination-endpoint",
    "x-override-model",
)  # fmt: skip


def _responses(tail: str) -> Callable[[Service], tuple[str, dict[str, Any]]]:
    return lambda service: (
        tail.format(account=service.account_id),
        {"model": service.model, "input": "Say something.", "max_output_tokens": 16},
    )


ROUTES: dict[str, Callable[[Service], tuple[str, dict[str, Any]]]] = {
    **{
        dialect.name: lambda service, dialect=dialect: (dialect.path(service), dialect.body(service))  # type: ignore[misc]
        for dialect in (CHAT, ACCOUNT_CHAT, COMPLETIONS, RUN)
    },
    "named run": lambda service: (
        f"/client/v4/accounts/{service.account_id}/ai/run",
        {"model": service.model, "input": RUN.body(service)},
    ),
    "responses": _responses("/v1/responses"),
    "account responses": _responses("/client/v4/accounts/{account}/ai/v1/responses"),
}


def inner(body: dict[str, Any]) -> dict[str, Any]:
    """Where generation parameters stand."""
    found = body.get("input")
    return found if isinstance(found, dict) else body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
async def test_nothing_but_listed_fields_reaches_an_engine(service: Service, route: str, *, stream: bool) -> None:
    path, body = ROUTES[route](service)
    fields = HOSTILE | ({} if "responses" in route else PASSED_ON)
    inner(body).update({name: value for name, value in fields.items() if name not in inner(body)}, stream=stream)
    answer = await service.post(path, body)
    assert answer.status == 200, answer.body
    [received] = service.engine.requests
    assert received.body.keys() <= OURS | PASSED_ON.keys()
    assert len(received.body["rid"]) == 36
    assert received.body.get("input_ids") != [1]
    assert received.body.get("cache_salt") != "theirs"
    for name in received.body.keys() & fields.keys() & PASSED_ON.keys():
        assert received.body[name] == PASSED_ON[name]


async def test_headers_of_a_client_reach_no_engine_however_they_are_spelt_and_repeated(service: Service) -> None:
    path, body = ROUTES["chat"](service)
    await service.post(path, body)
    repeated = [(name, value) for name in HOSTILE_HEADERS for value in ("theirs", "1000")]
    headers = [*service.authorization(None).items(), ("content-type", "application/json"), *repeated]
    async with service.session.post(service.base_url + path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    plain, hostile = (dict(received.headers) for received in service.engine.requests)
    for sent in (plain, hostile):
        sent.pop("Content-Length", None)
    assert hostile == plain


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{"lora": "a"}, {"lora_path": "a"}], ids=["lora", "lora_path"])
async def test_adapters_are_refused_by_name_on_every_route(
    service: Service, route: str, fields: dict[str, Any]
) -> None:
    path, body = ROUTES[route](service)
    inner(body).update(fields)
    answer = await service.post(path, body)
    assert 400 <= answer.status < 500
    assert b"lora" in answer.body.lower()
    assert not service.engine.requests


@pytest.mark.parametrize("name", ["chat", "account chat", "run", "named run"])
async def test_pictures_are_refused_with_the_path_of_the_part(service: Service, name: str) -> None:
    path, body = ROUTES[name](service)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    inner(body)["messages"] = [{"role": "user", "content": [{"type": "text", "text": "see"}, picture]}]
    answer = await service.post(path, body)
    assert 400 <= answer.status < 500
    assert b"pictures" in answer.body
    assert not service.engine.requests
