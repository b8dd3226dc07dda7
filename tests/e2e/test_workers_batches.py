"""Workers AI's asynchronous batches and background runs: queued, asked after, listed, cancelled, told to a webhook."""

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from tests.billing.webhooks.receiver import running_receiver
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.service import Service, running_service


def run_path(service: Service) -> str:
    return f"/client/v4/accounts/{service.account_id}/ai/run/{service.model}"


async def queue(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    answer = await service.post(run_path(service) + "?queueRequest=true", body)
    assert answer.status == 200, answer.body
    result: dict[str, Any] = answer.json()["result"]
    return result


async def poll(service: Service, request_id: str) -> dict[str, Any]:
    answer = await service.post(run_path(service), {"request_id": request_id})
    assert answer.status == 200, answer.body
    result: dict[str, Any] = answer.json()["result"]
    return result


async def responses(service: Service, request_id: str, *, within_s: float = 20) -> dict[str, Any]:
    async def is_over() -> bool:
        return "responses" in await poll(service, request_id)

    await eventually_async(is_over, within_s=within_s, what="the batch's responses")
    return await poll(service, request_id)


async def test_each_request_is_answered_with_its_index_and_reference(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.line_rows.ANSWERS_AT_ONCE", 2)  # told in two pieces
    asked = [
        {"prompt": "One.", "max_tokens": 4, "external_reference": "row-1"},
        {"messages": [{"role": "user", "content": "Two."}], "max_tokens": 6, "stream": True},
        {"prompt": "Three.", "temperature": 99, "external_reference": "row-3"},
    ]
    queued = await queue(service, {"requests": asked})
    assert queued == {"status": "queued", "request_id": queued["request_id"], "model": service.model}
    done = await responses(service, queued["request_id"])
    first, second, third = done["responses"]
    assert [first["id"], second["id"], third["id"]] == [0, 1, 2]
    assert [first["success"], second["success"], third["success"]] == [True, True, False]
    assert [first.get("external_reference"), second.get("external_reference")] == ["row-1", None]
    assert first["result"]["response"] == first["result"]["choices"][0]["message"]["content"]
    assert third["external_reference"] == "row-3"
    assert third["errors"][0]["code"] == 5006
    used = [item["result"]["usage"] for item in (first, second)]
    assert done["usage"]["completion_tokens"] == sum(one["completion_tokens"] for one in used) == 10
    assert done["usage"]["total_tokens"] == sum(one["total_tokens"] for one in used)
    await service.oracle(rows=2)


async def test_a_large_batch_is_taken_in_one_body_and_a_larger_one_refused(service: Service) -> None:
    asked = [{"prompt": "x" * 8_000, "max_tokens": 1, "temperature": 0, "seed": 1, "stream": False}] * 1_200
    queued = await queue(service, {"requests": asked})
    one = f"/client/v4/accounts/{service.account_id}/ai/batches/{queued['request_id']}"
    assert (await service.send("DELETE", one)).status == 200
    refused = await service.post(run_path(service) + "?queueRequest=true", {"requests": asked * 2})
    assert (refused.status, refused.json()["errors"][0]["code"]) == (413, 3006)
    answer = await service.post(run_path(service), {"prompt": "x" * 9_000_000})
    assert answer.status == 413, "other bodies are bounded as before"


async def test_one_plain_request_is_a_batch_of_one(service: Service) -> None:
    queued = await queue(service, {"prompt": "Alone.", "max_tokens": 4})
    done = await responses(service, queued["request_id"])
    assert [item["success"] for item in done["responses"]] == [True]


async def test_what_was_queued_is_listed_and_can_be_cancelled(service: Service, engine: ScriptedEngine) -> None:
    engine.steer(ttft_s=0.2)
    batches = f"/client/v4/accounts/{service.account_id}/ai/batches"
    queued = await queue(service, {"requests": [{"prompt": f"{at}", "max_tokens": 2} for at in range(50)]})
    one = f"{batches}/{queued['request_id']}"

    async def runs() -> bool:
        return bool((await service.send("GET", one)).json()["result"]["requests"]["succeeded"])

    await eventually_async(runs, within_s=10, what="a first response")
    assert (await poll(service, queued["request_id"]))["status"] == "running"
    assert (await service.send("DELETE", one)).status == 200
    done = await responses(service, queued["request_id"])
    good = [item for item in done["responses"] if item["success"]]
    assert 0 < len(good) < len(done["responses"]) == 50
    listed = (await service.send("GET", batches)).json()
    assert [entry["request_id"] for entry in listed["result"]] == [queued["request_id"]]
    assert listed["result"][0]["status"] == "cancelled"
    [operated] = (await service.console("/batches?ended=true"))["batches"]
    assert (operated["state"], operated["lines"], operated["succeeded"]) == ("cancelled", 50, len(good))
    metrics = (await service.send("GET", "/metrics")).body.decode()
    assert f'pagegate_batch_lines_ended_total{{state="succeeded"}} {len(good)}.0' in metrics
    assert "pagegate_batch_lines_running 0.0" in metrics
    assert (await service.send("DELETE", one)).status == 409
    await service.oracle(rows=len(good))


async def test_an_operator_cancels_any_batch(service: Service, engine: ScriptedEngine) -> None:
    engine.steer(ttft_s=0.2)
    queued = await queue(service, {"requests": [{"prompt": f"{at}", "max_tokens": 2} for at in range(50)]})
    path = f"/console/v1/batches/{queued['request_id']}/cancel"
    assert (await service.send("POST", path)).status == 403
    assert (await service.send("POST", path, key=service.admin_key)).json()["state"] == "cancelling"
    done = await responses(service, queued["request_id"])
    assert sum(item["success"] for item in done["responses"]) < 50
    assert (await service.console("/batches"))["batches"] == []
    assert (await service.send("POST", path, key=service.admin_key)).status == 409


async def test_an_unknown_batch_is_a_404_on_every_route(service: Service) -> None:
    request_id = "01a2293c-ab61-7467-a3a4-35b0b78efdf6"
    one = f"/client/v4/accounts/{service.account_id}/ai/batches/{request_id}"
    answers = [
        await service.post(run_path(service), {"request_id": request_id}),
        await service.send("GET", one),
        await service.send("DELETE", one),
    ]
    assert [(answer.status, answer.json()["success"]) for answer in answers] == [(404, False)] * 3


class TestBackgroundRuns:
    @pytest.mark.parametrize("shape", ["raw", "chat"])
    async def test_its_end_is_told_to_the_webhook_and_signed(
        self, tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, shape: str
    ) -> None:
        async with running_receiver(tmp_path) as receiver:
            billing = {
                "webhook_networks": [ipaddress.ip_network("127.0.0.0/8")],
                "webhook_authorities": receiver.authorities,
            }
            async with running_service(tmp_path / "home", checkpoint, engine, billing=billing) as service:
                engine.steer(ttft_s=0.2)
                body = {
                    "model": service.model,
                    "input": {"prompt": "Later.", "max_tokens": 4},
                    "options": {"background": True, "webhookUrl": receiver.url, "webhookFormat": shape},
                }
                answer = await service.post(f"/client/v4/accounts/{service.account_id}/ai/run", body)
                begun = answer.json()["result"]
                receiver.secret = begun["webhook_secret"]
                assert (answer.status, begun["state"]) == (200, "queued")
                await eventually(lambda: len(receiver.bodies) >= 1, within_s=15, what="the webhook's message")
                [told] = receiver.bodies
                assert (told["id"], told["state"], told["error"]) == (begun["id"], "completed", None)
                assert told["model"] == service.model
                assert told["usage"]["completion_tokens"] == 4
                assert ("response" in told["result"]) == (shape == "raw")
                assert told["result"]["choices"][0]["message"]["content"]
                assert await poll(service, begun["id"]) == told
                path = f"/client/v4/accounts/{service.account_id}/ai/batches/{begun['id']}"
                one = (await service.send("GET", path)).json()["result"]
                assert one | told == one
                assert (one["status"], one["requests"]["succeeded"]) == ("completed", 1)
                listed = await service.console(f"/accounts/{service.account_id}/webhooks")
                assert listed["webhooks"] == []
                await service.oracle(rows=1)

    async def test_a_run_that_fails_is_told_too(self, tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> None:
        async with running_service(tmp_path / "home", checkpoint, engine) as service:
            body = {
                "model": service.model,
                "input": {"prompt": "Wrong.", "temperature": 99},
                "options": {"background": True},
            }
            answer = await service.post(f"/client/v4/accounts/{service.account_id}/ai/run", body)
            run_id = answer.json()["result"]["id"]

            async def is_over() -> bool:
                return "error" in await poll(service, run_id)

            await eventually_async(is_over, within_s=10, what="the run's end")
            told = await poll(service, run_id)
            assert (told["state"], told["result"], told["error"]["code"]) == ("failed", None, 5006)

    async def test_options_that_contradict_are_refused(self, service: Service) -> None:
        for options, param in (
            ({"webhookUrl": "https://example.com/"}, "webhookUrl"),
            ({"background": True, "webhookUrl": "http://example.com/"}, "webhookUrl"),
            ({"background": True, "webhookUrl": "https://127.0.0.1/"}, "webhookUrl"),
            ({"background": True, "webhookFormat": "xml"}, "webhookFormat"),
            ({"background": "yes"}, "background"),
        ):
            body = {"model": service.model, "input": {"prompt": "No."}, "options": options}
            answer = await service.post(f"/client/v4/accounts/{service.account_id}/ai/run", body)
            assert (answer.status, answer.json()["errors"][0]["code"]) == (400, 5006)
            assert param in answer.json()["errors"][0]["message"]
        await service.oracle(rows=0)

    async def test_a_run_that_is_refused_leaves_no_webhook_behind(self, tmp_path: Path, checkpoint: Path) -> None:
        async with running_receiver(tmp_path) as receiver, ScriptedEngine() as engine:
            billing = {"webhook_networks": [ipaddress.ip_network("127.0.0.0/8")]}
            async with running_service(tmp_path / "home", checkpoint, engine, billing=billing) as service:
                options = {"background": True, "webhookUrl": receiver.url}
                body = {"model": "@cf/no/such", "input": {"prompt": "No."}, "options": options}
                answer = await service.post(f"/client/v4/accounts/{service.account_id}/ai/run", body)
                assert (answer.status, answer.json()["errors"][0]["code"]) == (400, 5007)
                with service.services.database.read() as connection:
                    kept = connection.exec_driver_sql("SELECT count(*) FROM webhook_endpoints").scalar()
                assert kept == 0
