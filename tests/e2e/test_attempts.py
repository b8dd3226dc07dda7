"""Requests that are tried again and fall back to other models: what is said, recorded, priced and held."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tenancy.claims import Meter
from tenancy.provisioning import set_quota
from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Answer, Service, running_service

OTHER = "@cf/test/other"
BROKEN = Refusal(500)


@contextlib.asynccontextmanager
async def two_models(tmp_path: Path, checkpoint: Path) -> AsyncIterator[tuple[Service, ScriptedEngine, ScriptedEngine]]:
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        file = write_deployment(
            tmp_path / "d.toml",
            model(checkpoint, replicas=[one]),
            model(checkpoint, replicas=[other], id=OTHER, price="dearer"),
        )
        gateway = {"replica_faults_max": 100}
        async with running_service(tmp_path / "home", checkpoint, one, deployment=file, gateway=gateway) as service:
            yield service, one, other


async def ask(service: Service, dialect: Dialect, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return await service.post(dialect.path(service), dialect.body(service, **fields), headers=headers or {})


def served_model(answer: Answer, *, stream: bool) -> str:
    body = answer.json()["result"] if b'"result"' in answer.body else None
    if stream:
        body = orjson.loads(answer.body.split(b"\n", 1)[0].removeprefix(b"data: "))
    return str((body or answer.json())["model"])


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_failing_model_is_stood_in_for_and_the_answer_says_so(
    tmp_path: Path, checkpoint: Path, dialect: Dialect, *, stream: bool
) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, other):
        one.steer(refuse=BROKEN)
        answer = await ask(service, dialect, models=[OTHER], stream=stream)
        assert answer.status == 200, answer.body
        assert (answer.headers["cf-aig-step"], answer.headers["cf-aig-model"]) == ("1", OTHER)
        failed, served = answer.headers["x-pagegate-attempts"].split(", ")
        assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"] == served
        if dialect is not RUN or not stream:
            assert served_model(answer, stream=stream) == OTHER
            assert served.encode() in answer.body
        assert (len(one.requests), len(other.requests)) == (1, 1)
        await service.oracle(rows=2)
        first, second = await service.record(failed), await service.record(served)
        assert (first["model"], first["outcome"], first["cost_nano"]) == (MODEL, "upstream_failed", 0)
        assert (second["model"], second["outcome"]) == (OTHER, "finished")
        assert second["cost_nano"] > 0


async def test_a_fault_is_tried_again_as_often_as_asked_and_each_attempt_is_settled_once(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, _):
        one.steer(refuse=BROKEN)
        answer = await ask(service, CHAT, {"cf-aig-max-attempts": "3", "cf-aig-retry-delay": "1"})
        assert (answer.status, len(one.requests)) == (502, 3)
        await service.oracle(rows=3)
        assert {row["outcome"] for row in await service.records()} == {"upstream_failed"}
        assert answer.headers["x-request-id"] in {row["id"] for row in await service.records()}


async def test_limits_are_those_of_the_model_that_serves(tmp_path: Path, checkpoint: Path) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, other):
        set_quota(service.services.database, service.account_id, Meter.REQUESTS_PER_MINUTE, 1, model=OTHER)
        one.steer(refuse=BROKEN)
        assert (await ask(service, CHAT, models=[OTHER])).status == 200
        refused = await ask(service, CHAT, models=[OTHER])
        assert (refused.status, len(other.requests)) == (429, 1)
        one.steer(refuse=None)
        served = await ask(service, CHAT, models=[OTHER])
        assert (served.status, served.headers["cf-aig-step"]) == (200, "0")


async def test_once_an_answer_has_begun_nothing_is_tried_again(tmp_path: Path, checkpoint: Path) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, other):
        one.steer(die_after=3)
        answer = await ask(service, CHAT, {"cf-aig-max-attempts": "3"}, models=[OTHER], stream=True, max_tokens=8)
        assert answer.status == 200
        assert b'"error"' in answer.body
        assert (len(one.requests), len(other.requests)) == (1, 0)
        await service.oracle(rows=1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_begins_too_late_is_given_up(tmp_path: Path, checkpoint: Path, *, stream: bool) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, _):
        one.steer(ttft_s=30)
        late = {"cf-aig-request-timeout": "100"}
        openai = await ask(service, CHAT, late, stream=stream)
        assert (openai.status, openai.json()["error"]["code"]) == (504, "first_byte_late")
        native = await service.post(RUN.path(service), RUN.body(service, stream=stream), headers=late)
        assert (native.status, native.json()["errors"][0]["code"]) == (408, 2014)
        fallen_back = await ask(service, ACCOUNT_CHAT, late, stream=stream, models=[OTHER])
        assert (fallen_back.status, fallen_back.headers["cf-aig-step"]) == (200, "1")
        await service.oracle(rows=4)
        assert not one.live


async def test_lines_of_batches_fall_back_when_their_models_engine_fails_or_is_gone(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, other):
        one.steer(refuse=BROKEN)
        [answer] = await run_as_batch(service, models=[OTHER])
        assert (answer["success"], answer["result"]["model"]) == (True, OTHER)
        second, first = await service.records()
        assert (first["model"], first["outcome"], first["cost_nano"]) == (MODEL, "upstream_failed", 0)
        assert (second["model"], second["outcome"]) == (OTHER, "finished")
        assert second["cost_nano"] > 0
        [answer] = await run_as_batch(service, models=["none"])
        assert answer["success"] is False

        one.steer(loads="error")
        await eventually_async(lambda: is_unready(service), within_s=20, what="an engine that is missed")
        asked = len(one.requests)
        [answer] = await run_as_batch(service, models=[OTHER])
        assert answer["result"]["model"] == OTHER
        assert len(one.requests) == asked
        assert len(other.requests) == 2


async def run_as_batch(service: Service, **fields: Any) -> list[dict[str, Any]]:
    path = RUN.path(service) + "?queueRequest=true"
    queued = (await service.post(path, {"requests": [RUN.body(service, **fields)]})).json()["result"]
    found: list[dict[str, Any]] = []

    async def is_over() -> bool:
        polled = await service.post(path, {"request_id": queued["request_id"]})
        found[:] = polled.json()["result"].get("responses", [])
        return bool(found)

    await eventually_async(is_over, within_s=20, what="the end of the batch")
    return found


async def is_unready(service: Service) -> bool:
    asked = CHAT.body(service, options={"rejectIfBusy": True})
    return (await service.post(CHAT.path(service), asked)).status == 503


async def test_a_bound_that_can_not_be_honoured_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    async with two_models(tmp_path, checkpoint) as (service, one, _):
        for headers in (
            {"cf-aig-max-attempts": "6"},
            {"cf-aig-max-attempts": "two"},
            {"cf-aig-request-timeout": "0"},
            {"cf-aig-retry-delay": "5001"},
            {"cf-aig-backoff": "random"},
        ):
            answer = await ask(service, CHAT, headers)
            assert (answer.status, answer.json()["error"]["param"]) == (400, next(iter(headers)))
        unknown = await ask(service, CHAT, models=["none"])
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert not one.requests
        await service.oracle(rows=0)
