"""The published schema of a model: its bounds are the ones that requests meet."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tests.api.exchange import Exchange, get, post
from tests.fakes import ACCOUNT, MODEL, Fakes, principal

AI = f"/client/v4/accounts/{ACCOUNT}/ai"
SCHEMA = f"{AI}/models/schema?model={MODEL}"


async def published(app: ASGIApp) -> dict[str, Any]:
    answer = await get(app, SCHEMA)
    assert answer.json["success"] is True
    result = answer.json["result"]
    assert isinstance(result, dict)
    return result


def bounds(shape: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Each value at a published bound, and the next one beyond it."""
    for one in (shape, *shape.get("anyOf", ())):
        step = 1 if one.get("type") == "integer" else 0.01
        if "maxItems" in one and one["items"].get("type") == "string":
            yield [MODEL] * one["maxItems"], [MODEL] * (one["maxItems"] + 1)
        if "minimum" in one:
            yield one["minimum"], one["minimum"] - step
        if "maximum" in one:
            yield one["maximum"], one["maximum"] + step
        if "exclusiveMinimum" in one:
            yield one["exclusiveMinimum"] + step, one["exclusiveMinimum"]
        if "exclusiveMaximum" in one:
            yield one["exclusiveMaximum"] - step, one["exclusiveMaximum"]


async def run(app: ASGIApp, name: str, value: object) -> Exchange:
    """The standard library writes integers of more than 64 bits."""
    body = {"prompt": "hi", "logprobs": True, name: value}
    return await post(app, f"{AI}/run/{MODEL}", json.dumps(body).encode())


async def test_every_published_bound_is_the_enforced_one(app: ASGIApp) -> None:
    properties = (await published(app))["input"]["properties"]
    tried = 0
    for name, shape in properties.items():
        for inside, beyond in bounds(shape):
            assert (await run(app, name, inside)).status == 200, (name, inside)
            refused = await run(app, name, beyond)
            assert refused.status == 400, (name, beyond)
            assert f"'/{name}'" in refused.json["errors"][0]["message"]
            tried += 1
    assert tried >= 20


async def test_the_most_choices_are_this_servers(fakes: Fakes) -> None:
    fakes.settings = fakes.settings.model_copy(update={"choices_max": 3})
    schema = await published(create_app(fakes.services))
    assert schema["input"]["properties"]["n"]["maximum"] == 3


async def test_what_is_only_refused_is_not_published(app: ASGIApp) -> None:
    schema = (await published(app))["input"]
    assert {"prompt", "messages", "raw", "stream", "stream_options", "max_tokens"} <= set(schema["properties"])
    for name in ("image", "requests", "lora", "functions", "function_call", "modalities"):
        assert name not in schema["properties"]
        assert (await post(app, f"{AI}/run/{MODEL}", {"prompt": "hi", name: "x"})).status in {400, 405}
    assert schema["oneOf"] == [{"required": ["prompt"]}, {"required": ["messages"]}]


async def test_the_output_names_every_field_of_an_answer(app: ASGIApp) -> None:
    whole, streamed = (await published(app))["output"]["oneOf"]
    result = (await post(app, f"{AI}/run/{MODEL}", {"prompt": "hi"})).json["result"]
    assert set(whole["properties"]) == set(result)
    assert set(whole["properties"]["usage"]["properties"]) == set(result["usage"])
    assert streamed["contentMediaType"] == "text/event-stream"


async def test_limits_of_the_model_are_told(app: ASGIApp) -> None:
    said = (await published(app))["input"]["properties"]["max_tokens"]["description"]
    assert "4096" in said
    assert "8192" in said


@pytest.mark.parametrize(("query", "code"), [("", 5006), ("?model=", 5006), ("?model=@cf/no/such", 5007)])
async def test_an_unknown_model_is_refused(app: ASGIApp, query: str, code: int) -> None:
    answer = await get(app, f"{AI}/models/schema{query}")
    assert (answer.status, answer.json["errors"][0]["code"]) == (400, code)


async def test_a_key_that_may_not_read_is_refused(app: ASGIApp, fakes: Fakes) -> None:
    fakes.authenticator.keys["bare"] = principal()
    assert (await get(app, SCHEMA, key="bare")).status == 403
