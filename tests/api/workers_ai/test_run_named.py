"""POST /ai/run: the model in the body, its input beside it, and options of the run."""

from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from gateway.errors import ModelNotFound
from tests.api.exchange import get, post
from tests.fakes import ACCOUNT, MODEL, Fakes

RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run"


def named(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": {"prompt": "hi"}, **fields}


async def test_the_answer_is_that_of_the_route_with_the_model_in_its_path(app: ASGIApp, fakes: Fakes) -> None:
    body = {"prompt": "hi", "max_tokens": 7, "temperature": 0.5}
    one, other = await post(app, RUN, named(input=body)), await post(app, f"{RUN}/{MODEL}", body)
    results = [answer.json["result"] for answer in (one, other)]
    assert {**results[0], "id": ""} == {**results[1], "id": ""}
    first, second = fakes.pipeline.requests
    assert (first.model, first.messages, first.sampling, first.max_tokens) == (
        second.model,
        second.messages,
        second.sampling,
        second.max_tokens,
    )
    assert first.route == second.route


async def test_it_streams(app: ASGIApp) -> None:
    answer = await post(app, RUN, named(input={"prompt": "hi", "stream": True}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert orjson.loads(answer.body.split(b"\n\n")[0].removeprefix(b"data: "))["response"] == "Hi"


@pytest.mark.parametrize("background", [{}, {"background": False}, {"webhookFormat": "raw", "webhookUrl": None}])
async def test_options_without_effect_pass(app: ASGIApp, background: dict[str, Any]) -> None:
    assert (await post(app, RUN, named(options=background))).status == 200


async def test_reject_if_busy_is_an_option_of_the_run(app: ASGIApp, fakes: Fakes) -> None:
    await post(app, RUN, named(options={"rejectIfBusy": True}))
    await post(app, RUN, named(input={"prompt": "hi", "options": {"rejectIfBusy": True}}))
    await post(app, RUN, named())
    assert [request.reject_if_busy for request in fakes.pipeline.requests] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"options": {"background": 1}}, "/options/background"),
        ({"options": {"webhookFormat": "xml"}}, "/options/webhookFormat"),
        ({"options": {"webhookUrl": "https://a.example"}}, "/options/webhookUrl"),
        ({"options": {"rejectIfBusy": 1}}, "/options"),
        ({"options": []}, "/options"),
        ({"model": ""}, "/model"),
        ({"model": 5}, "/model"),
        ({"input": "hi"}, "/input"),
        ({"input": {"prompt": "hi", "temperature": 9}}, "/temperature"),
        ({"input": {}}, "/prompt"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    app: ASGIApp, fakes: Fakes, fields: dict[str, Any], place: str
) -> None:
    answer = await post(app, RUN, named(**fields))
    assert (answer.status, answer.json["errors"][0]["code"]) == (400, 5006)
    assert f"'{place}'" in answer.json["errors"][0]["message"]
    assert fakes.pipeline.requests == []


async def test_a_field_beside_the_input_is_read_as_one_of_it(app: ASGIApp, fakes: Fakes) -> None:
    answer = await post(app, RUN, named(max_tokens=3, odd=1))
    assert (answer.status, answer.headers["x-ignored-params"]) == (200, "odd")
    assert fakes.pipeline.requests[0].max_tokens == 3
    assert (await post(app, RUN, named(temperature=9))).status == 400


@pytest.mark.parametrize("missing", ["model", "input"])
async def test_both_parts_are_needed(app: ASGIApp, missing: str) -> None:
    body = {name: value for name, value in named().items() if name != missing}
    answer = await post(app, RUN, body)
    assert f"'/{missing}'" in answer.json["errors"][0]["message"]


async def test_an_unknown_model_is_refused_as_elsewhere(app: ASGIApp, fakes: Fakes) -> None:
    fakes.pipeline.completes = ModelNotFound("openai/other")
    answer = await post(app, RUN, named(model="openai/other"))
    assert (answer.status, answer.json["errors"][0]["code"]) == (400, 5007)


async def test_other_methods_are_refused(app: ASGIApp) -> None:
    assert (await get(app, RUN)).status == 405


async def test_the_document_describes_the_input_without_references(app: ASGIApp) -> None:
    described = (await get(app, "/openapi.json")).json["paths"]
    path = "/client/v4/accounts/{account_id}/ai/run"
    body = described[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["model", "input"]
    assert {"prompt", "messages", "stream"} <= set(body["properties"]["input"]["properties"])
    assert "$ref" not in orjson.dumps(body).decode()


async def test_a_queued_body_may_have_as_many_values_as_with_the_model_in_the_path(app: ASGIApp) -> None:
    requests = [{"prompt": "a"}] * 12_000 + [{"external_reference": 7}]
    answer = await post(app, RUN + "?queueRequest=true", named(input={"requests": requests}))
    assert "external_reference" in answer.json["errors"][0]["message"]
