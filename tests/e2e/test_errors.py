"""Every error that clients of Workers AI know by its number, brought about on a running service in both dialects.

Beside the numbers: whoever is refused can tell from the status and the headers whether to try again.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from billing.budgets import BudgetPeriod
from tenancy.claims import Meter
from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tenancy.provisioning import issue_key, set_quota, set_suspended
from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT, DIALECTS, RUN
from tests.e2e.service import Answer, Service, running_service

RETIRED = "@cf/test/retired"


async def both(
    service: Service, *, name: str | None = None, key: str | None = None, body: bytes | None = None,
    headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Answer, Answer]:  # fmt: skip
    """The same asked natively and in OpenAI's dialect. name: of another model. body: instead of a good one."""
    run = f"/client/v4/accounts/{service.account_id}/ai/run/{(name or service.model).replace(' ', '%20')}"
    native = await service.post(run, body or RUN.body(service, **fields), key=key, headers=headers or {})
    named = {"model": name} if name else {}
    openai = await service.post(
        CHAT.path(service), body or CHAT.body(service, **fields, **named), key=key, headers=headers or {}
    )
    return native, openai


def check(answers: tuple[Answer, Answer], native: tuple[int, int], openai: tuple[int, str], *, again: bool) -> None:
    """native: status and number. openai: status and code. again: does the answer invite to try again?"""
    one, other = answers
    said = one.json()
    assert (one.status, said["errors"][0]["code"]) == native, one.body
    assert (said["success"], said["result"], said["messages"]) == (False, None, [])
    told = other.json()
    assert (other.status, told["error"]["code"]) == openai, other.body
    assert {"message", "type", "param"} <= told["error"].keys()
    assert told["errors"][0]["code"] == native[1], "the superset body has the number too"
    for answer in answers:
        assert len(answer.headers["cf-ai-req-id"]) == 36
        invites = answer.status in {408, 409, 429} or answer.status >= 500
        invites = invites and answer.headers.get("x-should-retry") != "false"
        assert invites is again, (answer.status, answer.headers)
        if again:
            assert int(answer.headers["retry-after"]) >= 1


async def test_what_is_wrong_with_a_request(service: Service) -> None:
    check(await both(service, body=b"{"), (400, 3003), (400, "invalid_json"), again=False)
    check(await both(service, temperature=9), (400, 5006), (400, "invalid_parameter"), again=False)
    check(await both(service, tools=[{"type": "custom"}]), (400, 5006), (400, "unsupported_parameter"), again=False)
    check(await both(service, name="@cf/no/such"), (400, 5007), (404, "model_not_found"), again=False)
    check(await both(service, name="no such name"), (404, 3042), (404, "invalid_model_name"), again=False)
    compressed = await both(service, headers={"content-encoding": "gzip"})
    check(compressed, (415, 3003), (415, "unsupported_content_encoding"), again=False)
    too_long = [{"role": "user", "content": "word " * 9_000}]
    check(await both(service, messages=too_long), (413, 5021), (400, "context_length_exceeded"), again=False)
    lora = (await both(service, lora="some"))[0]
    assert (lora.status, lora.json()["errors"][0]["code"]) == (405, 5005)
    assert not service.engine.requests
    await service.oracle(rows=0)


async def test_who_is_asking_and_where(service: Service) -> None:
    check(await both(service, key="nonsense"), (401, 10000), (401, "malformed_api_key"), again=False)
    native, openai = await _without_a_key(service)
    check((native, openai), (400, 9106), (401, "missing_api_key"), again=False)
    bound = issue_key(
        service.services.database,
        open_pepper(service.services.settings.pepper_path),
        service.account_id,
        name="bound",
        kind=KeyKind.INFERENCE,
        models=["@cf/other/one"],
        clock=time.time_ns,
    )
    check(await both(service, key=bound.text), (403, 5018), (403, "model_not_allowed"), again=False)
    for method, path, status, number in (
        ("GET", "/client/v4/nothing", 400, 7000),
        ("GET", RUN.path(service), 405, 7001),
        ("POST", f"/client/v4/accounts/xyz/ai/run/{service.model}", 404, 7003),
        ("POST", f"/client/v4/accounts/{'0' * 32}/ai/run/{service.model}", 403, 10000),
    ):
        answer = await service.send(method, path, RUN.body(service) if method == "POST" else None)
        assert (answer.status, answer.json()["errors"][0]["code"]) == (status, number), path
    revoked = await service.send("GET", "/client/v4/user/tokens/verify", key="nonsense")
    assert (revoked.status, revoked.json()["errors"][0]["code"]) == (401, 1000)
    set_suspended(service.services.database, service.account_id, suspended=True)
    await _noticed()
    check(await both(service), (403, 3023), (403, "account_suspended"), again=False)


async def _without_a_key(service: Service) -> tuple[Answer, Answer]:
    answers = []
    for dialect in (RUN, CHAT):
        async with service.session.post(service.base_url + dialect.path(service), json=dialect.body(service)) as said:
            headers = {name.lower(): value for name, value in said.headers.items()}
            answers.append(Answer(said.status, headers, await said.read()))
    return answers[0], answers[1]


async def test_bodies_that_are_too_large_or_too_slow(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> None:
    bounds: dict[str, Any] = {"body_bytes_max": 2_000, "body_seconds_max": 0.2}
    async with running_service(tmp_path / "home", checkpoint, engine, **bounds) as service:
        check(await both(service, user="x" * 3_000), (413, 3006), (413, "request_too_large"), again=False)
        native, openai = [await _trickled(service, dialect.path(service)) for dialect in (RUN, CHAT)]
        check((native, openai), (408, 3007), (408, "request_timeout"), again=True)


async def _trickled(service: Service, path: str) -> Answer:
    """A body of which half never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(service.base_url.rsplit(":", 1)[1]))
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {service.api_key}\r\n"
            "content-type: application/json\r\ncontent-length: 100\r\n\r\n{".encode()
        )
        async with asyncio.timeout(10):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(status.split()[1]), headers, body)


async def test_every_refusal_for_want_of_something_has_its_own_number(service: Service) -> None:
    database, account_id = service.services.database, service.account_id
    set_quota(database, account_id, Meter.REQUESTS_PER_MINUTE, 1)
    await _noticed()
    assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
    check(await both(service), (429, 3021), (429, "requests_per_minute_exceeded"), again=True)
    set_quota(database, account_id, Meter.REQUESTS_PER_MINUTE, 1_000)
    service.services.budgets.add(account_id, 1, BudgetPeriod.DAY, hard=True)
    await _noticed()
    check(await both(service), (429, 2045), (429, "budget_exceeded"), again=False)
    set_quota(database, account_id, Meter.TOKENS_PER_MINUTE, 5)
    await _noticed()
    check(await both(service), (429, 3021), (429, "request_exceeds_quota"), again=False)


async def test_capacity_is_3040_with_a_time_to_come_again(tmp_path: Path, checkpoint: Path) -> None:
    async with (
        ScriptedEngine(pool_tokens=1_024, context_tokens=1_024) as small,
        running_service(tmp_path / "home", checkpoint, small) as service,
    ):
        small.steer(itl_ms=20)
        whole_pool = CHAT.body(service, max_tokens=800, stream=True)
        async with service.open_stream(CHAT.path(service), whole_pool) as running:
            await running.content.readany()
            answers = await both(service, options={"rejectIfBusy": True}, max_tokens=800)
        check(answers, (429, 3040), (429, "capacity_exceeded"), again=True)
        await service.oracle(rows=3)


async def test_engines_that_fail_hang_or_are_gone(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> None:
    async with running_service(
        tmp_path / "home", checkpoint, engine, backends={"silence_s_max": 0.3, "answer_s_max": 0.3},
        gateway={"replica_faults_max": 100, "poll_failures_max": 1, "queue_wait_seconds_max": 0.3},
    ) as service:  # fmt: skip
        engine.steer(refuse=Refusal(500, b"inner words"))
        failed = await both(service)
        check(failed, (502, 3043), (502, "generation_failed"), again=True)
        assert not any(b"inner words" in answer.body for answer in failed)
        engine.steer(hang_after=0)
        check(await both(service), (408, 3046), (504, "generation_failed"), again=True)
    assert not engine.live


async def test_a_model_is_announced_before_it_is_retired_and_has_no_stand_in(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    month_ago = _days_ago(30)
    async with ScriptedEngine() as other:
        models = [
            model(checkpoint, replicas=[engine], deprecation_date="2999-12-31"),
            model(checkpoint, replicas=[other], id=RETIRED, deprecation_date=month_ago),
        ]
        file = write_deployment(tmp_path / "d.toml", *models)
        async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
            check(await both(service, name=RETIRED), (410, 5028), (410, "model_retired"), again=False)
            for dialect in DIALECTS:
                for stream in (False, True):
                    answer = await service.post(dialect.path(service), dialect.body(service, stream=stream))
                    assert answer.status == 200
                    assert answer.headers["sunset"] == "Tue, 31 Dec 2999 00:00:00 GMT"
                    assert answer.headers["deprecation"] == "@32503593600"
            (listed,) = (await service.send("GET", "/v1/models")).json()["data"]
            assert (listed["id"], listed["deprecation_date"]) == (MODEL, "2999-12-31")
            assert (await service.send("GET", f"/v1/models/{RETIRED}")).status == 410
            assert await _searched(service, "") == [(MODEL, "2999-12-31")]
            assert await _searched(service, "?include_deprecated=true") == [
                (MODEL, "2999-12-31"),
                (RETIRED, month_ago),
            ]
            assert not other.requests
            await service.oracle(rows=2 * len(DIALECTS))


async def _searched(service: Service, query: str) -> list[tuple[str, str]]:
    answer = await service.send("GET", f"/client/v4/accounts/{service.account_id}/ai/models/search{query}")
    return [(card["name"], _date_of(card["properties"])) for card in answer.json()["result"]]


def _date_of(properties: Iterable[dict[str, Any]]) -> str:
    return next(str(one["value"]) for one in properties if one["property_id"] == "planned_deprecation_date")


def _days_ago(days: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time.time() - days * 86_400))


async def _noticed() -> None:
    """Deeds of other processes are noticed within a second."""
    await asyncio.sleep(1.2)
