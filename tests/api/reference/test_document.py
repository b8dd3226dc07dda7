"""The API's document: every route with what it answers and refuses, from the schemas and the table that do it."""

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from starlette.types import ASGIApp

from api.app import framework_app
from api.reference.document import Described
from api.reference.document import document as write
from tests.api.exchange import call, get, post
from tests.fakes import ACCOUNT, ADMIN_KEY, FINISH_CHUNK, KEY, MODEL, ROLE_CHUNK, Fakes, FakeStream, content_chunk

CHAT = "/v1/chat/completions"
RUN = "/client/v4/accounts/{account_id}/ai/run/{model}"


@pytest.fixture(scope="module")
def written() -> list[bytes]:
    """What the first test is answered: to write the document takes longer than most tests of it."""
    return []


@pytest.fixture
async def document(app: ASGIApp, written: list[bytes]) -> Any:
    if not written:
        written.append((await get(app, "/openapi.json")).body)
    return orjson.loads(written[0])


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, of_path in document["paths"].items():
        for method, operation in of_path.items():
            yield method, path, operation


async def test_everything_is_told_of_every_route(document: Any) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(ids)) == len(ids) >= 50
    for method, path, operation in operations(document):
        assert "default" not in operation["responses"], (method, path)
        assert any(status.startswith("2") for status in operation["responses"]), (method, path)
        assert operation["summary"] != path, f"the endpoint of {path} has no docstring"


async def test_all_schemas_are_schemas_and_all_references_lead_somewhere(document: Any) -> None:
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for _, _, operation in operations(document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            Draft202012Validator.check_schema(content["schema"])

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    found = document
                    for step in inner.removeprefix("#/").split("/"):
                        found = found[step]
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (CHAT, "429", "requests_per_minute_exceeded"),
        (CHAT, "429", "budget_exceeded"),
        (CHAT, "404", "model_not_found"),
        (CHAT, "400", "context_length_exceeded"),
        (RUN, "413", "context_length_exceeded"),
        (RUN, "400", "model_not_found"),
        (RUN, "405", "lora_unsupported"),
        (RUN, "408", "engine_timeout"),
        (RUN, "410", "model_retired"),
    ],
)
async def test_refusals_stand_under_the_status_of_their_dialect(
    document: Any, path: str, status: str, code: str
) -> None:
    refusals = {
        found
        for found, response in document["paths"][path]["post"]["responses"].items()
        if f"`{code}`" in response["description"]
    }
    assert refusals == {status}


async def test_an_answer_is_as_the_document_says_whole_and_refused(app: ASGIApp, document: Any) -> None:
    said = document["paths"][CHAT]["post"]["responses"]
    good = await post(app, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})
    _validate(document, said["200"], good.json)
    bad = await post(app, CHAT, {"model": MODEL, "messages": []})
    _validate(document, said[str(bad.status)], bad.json)


def _validate(document: Any, response: Any, body: Any) -> None:
    schema = {**response["content"]["application/json"]["schema"], "components": document["components"]}
    Draft202012Validator(schema).validate(body)


async def test_frames_of_streams_are_as_the_document_says(app: ASGIApp, fakes: Fakes, document: Any) -> None:
    for path, body in (
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
        (RUN.format(account_id=ACCOUNT, model=MODEL), {"prompt": "hi"}),
        ("/v1/responses", {"model": MODEL, "input": "hi"}),
    ):
        template = path.replace(ACCOUNT, "{account_id}").replace(MODEL, "{model}")
        events = document["paths"][template]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        schema = {**events["x-event-schema"], "components": document["components"]}
        fakes.pipeline.streams = FakeStream(*_chunks())
        answer = await post(app, path, {**body, "stream": True})
        frames = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ") and line[6:] != b"[DONE]"]
        assert len(frames) >= 2
        for frame in frames:
            Draft202012Validator(schema).validate(orjson.loads(frame))


def _chunks() -> tuple[bytes, ...]:
    return ROLE_CHUNK, content_chunk("Hi"), FINISH_CHUNK


async def test_the_page_tells_every_route_and_runs_nothing(app: ASGIApp, document: Any) -> None:
    answer = await get(app, "/docs", key=None)
    page = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    for method, path, _ in operations(document):
        assert f"<code>{method.upper()} {path}</code>" in page
    assert "<script" not in page
    assert "style=" not in page
    assert "://" not in re.sub(r"<pre.*?</pre>|https?:// ", "", page, flags=re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"style-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


async def test_a_wrong_method_is_told_all_that_its_path_has(app: ASGIApp) -> None:
    answer = await call(app, "OPTIONS", f"/console/v1/accounts/{ACCOUNT}/keys", key=ADMIN_KEY)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, POST")


async def test_a_parameter_that_is_given_twice_is_refused(app: ASGIApp) -> None:
    answer = await get(app, f"/client/v4/accounts/{ACCOUNT}/ai/models/search?page=1&page=2", key=KEY)
    assert (answer.status, answer.json["errors"][0]["message"]) == (400, "Invalid value at '/page': is given twice.")


async def test_a_route_of_which_nothing_is_told_is_listed_all_the_same(fakes: Fakes) -> None:
    async def bare() -> None:
        """Bare."""

    told = write(
        [Described("GET", "/bare", bare, None, body_required=True, media_type="application/json", told=None)],
        {},
        choices_max=1,
    )
    assert told["paths"]["/bare"]["get"]["responses"] == {"default": {"description": "The answer, or a refusal."}}
    assert framework_app(fakes.services).openapi()["openapi"] == "3.1.0"
