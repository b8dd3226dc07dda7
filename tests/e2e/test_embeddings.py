"""Embeddings from client to record: a real encoder behind the gateway, in every dialect, paid for by the token."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import cloudflare
import openai
import orjson
import pytest

from api.settings import EMBEDDED_ENGINE
from billing.budgets import BudgetPeriod
from gateway.lifecycle.states import Answered, Begun, By, Closed, State, Unit, Wish, Wished, advance
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.service import Service, running_service
from tests.engines import LocalEngine, build_tiny_checkpoint, start_local_engine
from tests.tiny_encoder import CONTEXT, WIDTH, build_tiny_encoder

pytestmark = pytest.mark.engine

MODEL = "@cf/test/tiny-encoder"
TEXTS = ["the pages are scarce", "thing"]
TOKENS = 6 + 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def embedding_engine(tiny: Path, encoder: Path) -> Iterator[LocalEngine]:
    with start_local_engine(tiny, embedding_model_path=encoder, embedding_model_name=MODEL) as engine:
        yield engine


@pytest.fixture
async def service(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, encoder: Path, embedding_engine: LocalEngine
) -> AsyncIterator[Service]:
    attached = {"embedding_url": embedding_engine.url, "embedding_checkpoint": encoder}
    async with running_service(
        tmp_path / "home", checkpoint, engine, backends=attached, embedding_model_id=MODEL
    ) as service:
        yield service


async def test_openais_client_gets_vectors_and_pays_for_tokens(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0) as client:
        answer = await client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64 by itself
        floats = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert [len(row.embedding) for row in answer.data] == [WIDTH, WIDTH]
    assert answer.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == TOKENS
    await service.oracle(rows=2)
    record = (await service.records())[1]
    assert (record["prompt_tokens"], record["completion_tokens"], record["outcome"]) == (TOKENS, 0, "finished")
    assert record["cost"] == "0.000000018"  # 9 tokens at 2,000,000 nano-USD a million


async def test_the_native_route_says_shape_and_data(service: Service) -> None:
    path = f"/client/v4/accounts/{service.account_id}/ai"
    async with cloudflare.AsyncCloudflare(
        base_url=service.base_url + "/client/v4", api_token=service.api_key, max_retries=0
    ) as client:
        result = await client.ai.run(MODEL, account_id=service.account_id, text=TEXTS)
    assert isinstance(result, dict)
    assert (result["shape"], result["pooling"]) == ([2, WIDTH], "mean")
    bare = (await service.post(f"{path}/v1/embeddings", {"model": MODEL, "input": TEXTS})).json()
    named = (await service.post(f"{path}/run", {"model": MODEL, "input": {"text": TEXTS[0]}})).json()
    assert [row["embedding"] for row in bare["data"]] == result["data"]
    assert named["result"]["data"][0] == pytest.approx(result["data"][0], abs=1e-6)
    await service.oracle(rows=3)


async def test_base64_is_little_endian_float32(service: Service) -> None:
    body = {"model": MODEL, "input": [[2, 5, 3]], "encoding_format": "base64"}
    answer = await service.post("/v1/embeddings", body)
    (row,) = answer.json()["data"]
    plain = await service.post("/v1/embeddings", {**body, "encoding_format": "float"})
    assert list(struct.unpack(f"<{WIDTH}f", base64.b64decode(row["embedding"]))) == plain.json()["data"][0]["embedding"]
    assert answer.headers["cf-ai-neurons"]


async def test_what_is_wrong_is_said_by_name_and_leaves_no_trace(service: Service) -> None:
    for fields, param in (
        ({"input": []}, "input"), ({"input": ""}, "input"), ({"input": [1.5]}, "input"), ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 2049}, "input"), ({"dimensions": WIDTH - 1}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"), ({}, "input"),
    ):  # fmt: skip
        base = {} if "input" in fields or not fields else {"input": "a"}
        answer = await service.post("/v1/embeddings", {"model": MODEL, **base, **fields})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param), fields
    too_long = await service.post("/v1/embeddings", {"model": MODEL, "input": "pages " * CONTEXT})
    assert (too_long.status, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    unknown = await service.post("/v1/embeddings", {"model": MODEL, "input": [10**6]})
    assert (unknown.status, unknown.json()["error"]["code"]) == (400, "invalid_prompt")
    native = f"/client/v4/accounts/{service.account_id}/ai/run/{MODEL}"
    for body, pointer in (
        ({}, "/text"),
        ({"text": ["a"] * 101}, "/text"),
        ({"text": "a", "pooling": "cls"}, "/pooling"),
    ):
        answer = await service.post(native, body)
        assert (answer.status, answer.json()["errors"][0]["code"]) == (400, 5006)
        assert pointer in answer.json()["errors"][0]["message"]
    await service.oracle(rows=0)


async def test_a_model_of_another_task_is_refused_on_either_side(service: Service) -> None:
    chat = await service.post("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "a"}]})
    embed = await service.post("/v1/embeddings", {"model": service.model, "input": "a"})
    nobody = await service.post("/v1/embeddings", {"model": "none", "input": "a"})
    assert [answer.status for answer in (chat, embed, nobody)] == [400, 400, 404]
    assert {chat.json()["error"]["code"], embed.json()["error"]["code"]} == {"wrong_task"}
    await service.oracle(rows=0)


async def test_a_repeated_idempotency_key_is_answered_again_and_paid_once(service: Service) -> None:
    body = {"model": MODEL, "input": TEXTS}
    first = await service.post("/v1/embeddings", body, headers={"idempotency-key": "k1"})
    again = await service.post("/v1/embeddings", body, headers={"idempotency-key": "k1"})
    other = await service.post("/v1/embeddings", {**body, "input": "a"}, headers={"idempotency-key": "k1"})
    written = {**body, "encoding_format": "base64"}
    otherwise = await service.post("/v1/embeddings", written, headers={"idempotency-key": "k1"})
    assert (first.body, first.status) == (again.body, 200)
    assert (other.status, otherwise.status) == (422, 422)
    await service.oracle(rows=1)


async def test_models_say_what_embeds(service: Service) -> None:
    path = f"/client/v4/accounts/{service.account_id}/ai/models"
    found = (await service.send("GET", f"{path}/search?task=Text+Embeddings")).json()["result"]
    assert [model["name"] for model in found] == [MODEL]
    properties = {item["property_id"]: item["value"] for item in found[0]["properties"]}
    assert (properties["max_input_tokens"], properties["output_dimensions"]) == (str(CONTEXT), str(WIDTH))
    schema = (await service.send("GET", f"{path}/schema?model={MODEL}")).json()["result"]
    assert schema["input"]["required"] == ["text"]
    assert MODEL in [model["id"] for model in (await service.send("GET", "/v1/models")).json()["data"]]


async def test_an_engine_that_is_away_costs_nothing(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, encoder: Path
) -> None:
    attached = {"embedding_url": engine.url, "embedding_checkpoint": encoder}  # the scripted engine knows no embeddings
    async with running_service(
        tmp_path / "home", checkpoint, engine, backends=attached, embedding_model_id=MODEL
    ) as service:
        answer = await service.post("/v1/embeddings", {"model": MODEL, "input": TEXTS})
        assert answer.status == 502
        await service.oracle(rows=1)
        (record,) = await service.records()
        assert (record["outcome"], record["cost"]) == ("upstream_failed", "0")


async def test_an_encoder_that_sleeps_with_its_engine_is_woken_by_a_request_for_it(
    tmp_path: Path, engine: ScriptedEngine, tiny: Path, encoder: Path, embedding_engine: LocalEngine
) -> None:
    url = embedding_engine.url
    attached = {"url": url, "checkpoint": tiny, "embedding_url": url, "embedding_checkpoint": encoder}
    async with running_service(
        tmp_path / "home",
        tiny,
        engine,
        backends=attached,
        embedding_model_id=MODEL,
        lifecycle={"poll_interval_s": 0.05},
        gateway={"queue_wait_seconds_max": 30},
    ) as service:
        lifecycle, limits = service.services.lifecycle, service.services.settings.lifecycle.start_limits()
        unit = Unit(service.model, EMBEDDED_ENGINE)
        lifecycle.store.add([(unit, Wish.ASLEEP)])
        await eventually(lambda: bool(lifecycle.waking.records()), what="how the unit stands")
        wanted = {"model": MODEL, "input": TEXTS}
        asked = asyncio.create_task(service.post("/v1/embeddings", wanted))
        await eventually(lambda: lifecycle.store.of([unit])[0].wish is Wish.AWAKE, what="a wish")
        for event in (Begun(), Answered()):  # as its owner has it
            record = lifecycle.store.take(unit, "owner")
            assert record is not None
            assert lifecycle.store.save(record, advance(record, event, record.lease_until_ns, limits)) is not None
        assert (await asked).status == 200
        lifecycle.store.wish(unit, Wished(Wish.HELD, By.OPERATOR))
        [ready] = lifecycle.store.of([unit])
        assert lifecycle.store.save(ready, advance(ready, Closed(), ready.lease_until_ns, limits)) is not None
        await eventually(lambda: lifecycle.waking.records()[0].state is State.DRAINING, what="that it is held asleep")
        refused = await service.post("/v1/embeddings", wanted)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        await service.oracle(rows=2)


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
async def test_for_whom_they_are_is_recorded_and_bounded_in_every_dialect(service: Service, field: str) -> None:
    native = f"/client/v4/accounts/{service.account_id}/ai/run"
    said = {field: "ada", "metadata": {"team": "search"}}
    asking: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"model": MODEL, "input": "a", **said}),
        (f"{native}/{MODEL}", {"text": "a", **said}),
        (native, {"model": MODEL, "input": {"text": "a", **said}}),
    ]
    for path, body in asking:
        answer = await service.post(path, body)
        assert answer.status == 200, answer.body
        row = await service.record(answer.headers["x-request-id"])
        assert (row["end_user"], row["tags"]) == ("ada", {"team": "search"}), path
    service.services.budgets.add(service.account_id, 0, BudgetPeriod.MONTH, end_user="ada")
    await service.services.holds.credit.refresh()
    assert [(await service.post(path, body)).status for path, body in asking] == [429] * 3
    line = {"requests": [{"text": "a", **said}]}
    queued = (await service.post(f"{native}/{MODEL}?queueRequest=true", line)).json()["result"]["request_id"]

    async def is_answered() -> bool:
        return "responses" in (await service.post(native, {"request_id": queued})).json()["result"]

    await eventually_async(is_answered, within_s=15, what="the responses")
    (refused,) = (await service.post(native, {"request_id": queued})).json()["result"]["responses"]
    assert refused["errors"][0]["code"] == 2045


async def test_fields_without_effect_are_named_in_both_dialects(service: Service) -> None:
    native = f"/client/v4/accounts/{service.account_id}/ai/run/{MODEL}"
    for path, body in (("/v1/embeddings", {"model": MODEL, "input": "a"}), (native, {"text": "a"})):
        answer = await service.post(path, body | {"truncate": True, "user": "ada"})
        assert (answer.status, answer.headers["x-ignored-params"]) == (200, "truncate"), path


async def test_batches_of_both_dialects_give_vectors(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0) as client:
        body = {"model": MODEL, "input": TEXTS, "encoding_format": "float"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
        file = await client.files.create(file=("texts.jsonl", orjson.dumps(line)), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")

        async def is_complete() -> bool:
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await eventually_async(is_complete, within_s=15, what="the batch's end")
        output = str((await client.batches.retrieve(batch.id)).output_file_id)
        said = orjson.loads((await client.files.content(output)).content)["response"]
        direct = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert said["body"]["data"][0]["embedding"] == pytest.approx(direct.data[0].embedding, abs=1e-6)
    assert said["body"]["usage"]["prompt_tokens"] == TOKENS
    path = f"/client/v4/accounts/{service.account_id}/ai/run/{MODEL}"
    asked = {"requests": [{"text": TEXTS[:1]}, {"text": []}]}
    queued = (await service.post(path + "?queueRequest=true", asked)).json()["result"]["request_id"]

    async def is_answered() -> bool:
        return "responses" in (await service.post(path, {"request_id": queued})).json()["result"]

    await eventually_async(is_answered, within_s=15, what="the responses")
    good, bad = (await service.post(path, {"request_id": queued})).json()["result"]["responses"]
    assert (good["success"], good["result"]["shape"]) == (True, [1, WIDTH])
    assert (bad["success"], bad["errors"][0]["code"]) == (False, 5006)
    await service.oracle(rows=3)
