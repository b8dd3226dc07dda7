"""OpenAI's own client uploads files and runs batches of them; every line is run and charged once."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.responses import Response

from billing.budgets import BudgetPeriod
from billing.price_book import Tier, set_price
from tenancy.claims import Meter
from tenancy.provisioning import set_limits, set_quota
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT
from tests.e2e.ledger import expected_cost_nano
from tests.e2e.service import Service, running_service

ENDED = {"completed", "failed", "expired", "cancelled"}


@pytest.fixture
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0) as client:
        yield client


def chat_line(service: Service, custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": service.model, "messages": [{"role": "user", "content": f"Say {custom_id}."}], "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body | more}


def as_file(lines: list[dict[str, Any]]) -> tuple[str, io.BytesIO]:
    return "requests.jsonl", io.BytesIO(b"\n".join(json.dumps(line).encode() for line in lines))


async def start(client: openai.AsyncOpenAI, lines: list[dict[str, Any]], **more: Any) -> Batch:
    file = await client.files.create(file=as_file(lines), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str, *, within_s: float = 20) -> Batch:
    async def is_over() -> bool:
        return (await client.batches.retrieve(batch_id)).status in ENDED

    await eventually_async(is_over, within_s=within_s, what="the end of the batch")
    return await client.batches.retrieve(batch_id)


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = (await client.files.content(file_id)).text
    return [json.loads(line) for line in content.splitlines()]


class TestFiles:
    async def test_what_was_uploaded_is_listed_read_and_deleted(
        self, service: Service, client: openai.AsyncOpenAI
    ) -> None:
        lines = [chat_line(service, "a"), chat_line(service, "b")]
        sent = as_file(lines)[1].getvalue()
        file = await client.files.create(
            file=("mine.jsonl", sent), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
        assert (file.bytes, file.filename, file.purpose, file.status) == (len(sent), "mine.jsonl", "batch", "processed")
        assert file.expires_at == file.created_at + 7200
        listed = [one async for one in client.files.list(purpose="batch")]
        assert [one.id for one in listed] == [file.id]
        assert (await client.files.content(file.id)).content == sent
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)

    async def test_a_file_that_is_no_json_lines_is_refused(self, client: openai.AsyncOpenAI) -> None:
        for content in (b"", b"\n \n", b'{"custom_id": 1}\nnot json', b"[1, 2]"):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.files.create(file=("x.jsonl", content), purpose="batch")
            assert refused.value.code == "invalid_file"

    async def test_pages_of_files_join_without_gaps(self, service: Service, client: openai.AsyncOpenAI) -> None:
        made = [
            (await client.files.create(file=as_file([chat_line(service, str(at))]), purpose="batch")).id
            for at in range(5)
        ]
        newest_first = [file.id async for file in client.files.list(limit=2)]
        assert newest_first == made[::-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == made

    async def test_another_accounts_file_is_unknown(self, service: Service, client: openai.AsyncOpenAI) -> None:
        file = await client.files.create(file=as_file([chat_line(service, "a")]), purpose="batch")
        path = f"/v1/files/{file.id}"
        assert (await service.send("GET", path)).status == 200
        assert (await service.send("GET", path, key=service.admin_key)).status == 403
        assert (await service.send("GET", "/v1/files/file-unknown")).json()["error"]["code"] == "file_not_found"

    async def test_a_file_that_is_too_large_is_refused_before_it_is_read(self, service: Service) -> None:
        too_large = str(service.services.settings.batches.file_bytes_max + (1 << 20))
        reader, writer = await asyncio.open_connection(*service.base_url.removeprefix("http://").split(":"))
        head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: {too_large}\r\n\r\n"
        writer.write(head.encode())
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


class TestBatches:
    async def test_every_line_is_answered_and_charged_once(self, service: Service, client: openai.AsyncOpenAI) -> None:
        names = [f"line-{at}" for at in range(12)]
        batch = await start(client, [chat_line(service, name) for name in names], metadata={"job": "nightly"})
        assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
        assert batch.error_file_id is None
        assert batch.in_progress_at
        assert batch.finalizing_at
        assert batch.completed_at
        said = await answers(client, batch.output_file_id)
        assert [one["custom_id"] for one in said] == names
        for one in said:
            assert (one["error"], one["response"]["status_code"]) == (None, 200)
            assert one["response"]["body"]["choices"][0]["message"]["content"]
            record = await service.record(one["response"]["request_id"])
            assert record["outcome"] == "finished"
            usage = one["response"]["body"]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
                record["prompt_tokens"],
                record["completion_tokens"],
            )
        output = await client.files.retrieve(str(batch.output_file_id))
        assert output.bytes == len((await client.files.content(output.id)).content)
        await service.oracle(rows=12)

    async def test_wrong_lines_end_in_the_error_file_and_the_others_are_answered(
        self, service: Service, client: openai.AsyncOpenAI
    ) -> None:
        lines = [chat_line(service, "good"), chat_line(service, "bad", temperature=9)]
        batch = await ended(client, (await start(client, lines)).id)
        assert batch.status == "completed"
        assert [one["custom_id"] for one in await answers(client, batch.output_file_id)] == ["good"]
        [bad] = await answers(client, batch.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"

    async def test_a_file_that_is_wrong_fails_the_batch_and_says_where(
        self, service: Service, client: openai.AsyncOpenAI
    ) -> None:
        good = chat_line(service, "a")
        lines = [
            good,
            good,
            good | {"custom_id": ""},
            good | {"custom_id": "b", "method": "GET"},
            good | {"custom_id": "c", "url": "/v1/embeddings"},
            good | {"custom_id": "d", "body": {}},
            chat_line(service, "e", model="another"),
        ]
        batch = await ended(client, (await start(client, lines)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [(one.line, one.code) for one in batch.errors.data or []] == [
            (2, "duplicate_custom_id"),
            (3, "missing_required_parameter"),
            (4, "invalid_method"),
            (5, "invalid_url"),
            (6, "missing_required_parameter"),
            (7, "mismatched_model"),
        ]
        await service.oracle(rows=0)

    async def test_a_cancelled_batch_runs_no_more_lines(
        self, service: Service, client: openai.AsyncOpenAI, engine: ScriptedEngine
    ) -> None:
        engine.steer(ttft_s=0.3)
        batch = await start(client, [chat_line(service, str(at)) for at in range(60)])
        await eventually_async(lambda: _has_begun(client, batch.id), within_s=10, what="a line's answer")
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        done = await answers(client, batch.output_file_id)
        unrun = await answers(client, batch.error_file_id)
        assert len(done) == batch.request_counts.completed < 60
        assert {one["error"]["code"] for one in unrun} == {"batch_cancelled"}
        assert len(done) + len(unrun) == 60
        await service.oracle(rows=len(done))
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)

    async def test_batches_are_listed_in_pages(self, service: Service, client: openai.AsyncOpenAI) -> None:
        made = [(await start(client, [chat_line(service, "a")])).id for _ in range(3)]
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]

    async def test_lines_are_priced_and_recorded_as_batch_where_there_is_such_a_price(
        self, service: Service, client: openai.AsyncOpenAI
    ) -> None:
        book = service.services.price_book
        listed = book.price_in_force(service.model, time.time_ns())
        half = replace(listed, tier=Tier.BATCH.value, output_nano_per_m=listed.output_nano_per_m // 2)
        with service.services.database.write() as connection:
            set_price(connection, replace(half, effective_from_ns=1, effective_to_ns=None))
        await book.refresh()
        batch = await ended(client, (await start(client, [chat_line(service, "a", service_tier="priority")])).id)
        [said] = await answers(client, batch.output_file_id)
        row = await service.record(said["response"]["request_id"])
        price = book.by_version(row["price_version"])
        assert (row["tier"], price.tier, price.output_nano_per_m) == ("batch", "batch", half.output_nano_per_m)
        assert row["cost_nano"] == expected_cost_nano(service, row) > 0

    async def test_lines_wait_while_pages_are_taken_and_nobody_waits_behind_them(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with (
            ScriptedEngine(pool_tokens=2_048) as engine,
            running_service(tmp_path / "home", checkpoint, engine, batches={"idle_share": 0.5}) as service,
            openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key) as client,
        ):
            engine.steer(itl_ms=2)
            long = chat_line(service, "long")["body"] | {"max_tokens": 1_500}
            taken = asyncio.create_task(service.post("/v1/chat/completions", long), name="interactive")
            await eventually(lambda: engine.used_tokens() > 1_100, what="most pages taken")
            batch = await start(client, [chat_line(service, str(at)) for at in range(3)])
            await eventually(lambda: service.services.batching.figures.undone == 3, what="a batch that may begin")
            assert not taken.done()
            assert len(engine.requests) == 1
            short = await service.post("/v1/chat/completions", chat_line(service, "short")["body"])
            assert short.status == 200
            assert (await taken).status == 200
            assert (await ended(client, batch.id)).status == "completed"
            assert len(engine.requests) == 5

    async def test_lines_for_whose_answers_no_room_is_left_are_told_so_and_cost_nothing(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with (
            ScriptedEngine() as engine,
            running_service(
                tmp_path / "home", checkpoint, engine, batches={"account_batch_bytes_max": 4_096, "at_once_max": 1}
            ) as service,
            openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0) as client,
        ):
            batch = await ended(client, (await start(client, [chat_line(service, str(at)) for at in range(20)])).id)
            done, unrun = await answers(client, batch.output_file_id), await answers(client, batch.error_file_id)
            assert 1 <= len(done) < 20
            assert len(done) + len(unrun) == 20
            assert {one["error"]["code"] for one in unrun} == {"batches_full"}
            assert batch.errors is not None
            assert [one.code for one in batch.errors.data or []] == ["batches_full"]
            await service.oracle(rows=len(done))
            with pytest.raises(openai.RateLimitError) as refused:
                await start(client, [chat_line(service, "more", user="u" * 250)] * 9)
            assert refused.value.code == "batches_full"
            for file_id in (batch.output_file_id, batch.error_file_id):
                await client.files.delete(str(file_id))
            assert (await ended(client, (await start(client, [chat_line(service, "a")])).id)).error_file_id is None

    async def test_an_answer_that_grows_too_large_ends_there_and_is_charged_once(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with (
            ScriptedEngine() as engine,
            running_service(tmp_path / "home", checkpoint, engine, gateway={"answer_bytes_max": 1_024}) as service,
            openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key) as client,
        ):
            lines = [chat_line(service, "long", max_tokens=4_000), chat_line(service, "short")]
            lines.append(chat_line(service, "wide", logprobs=True, top_logprobs=20))
            batch = await ended(client, (await start(client, lines)).id)
            long, short = await answers(client, batch.output_file_id)
            (wide,) = await answers(client, batch.error_file_id)
            choices = [one["response"]["body"]["choices"][0] for one in (long, short)]
            assert 1_024 < len(choices[0]["message"]["content"]) < 1_050
            assert choices[0]["finish_reason"] == "length"
            assert wide["response"]["body"]["error"]["code"] == "answer_too_large"
            record = await service.record(long["response"]["request_id"])
            assert (record["outcome"], record["code"]) == ("finished", "answer_too_large")
            assert long["response"]["body"]["usage"]["completion_tokens"] == record["completion_tokens"]
            await service.oracle(rows=2)

    async def test_completions_are_an_endpoint_too(self, service: Service, client: openai.AsyncOpenAI) -> None:
        line = chat_line(service, "a") | {"url": "/v1/completions"}
        line["body"] = {"model": service.model, "prompt": "Once", "max_tokens": 4, "n": 2}
        file = await client.files.create(file=as_file([line]), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = await ended(client, made.id)
        [said] = await answers(client, batch.output_file_id)
        assert [choice["index"] for choice in said["response"]["body"]["choices"]] == [0, 1]

    async def test_a_revoked_keys_lines_end_with_that_error(
        self, service: Service, client: openai.AsyncOpenAI, engine: ScriptedEngine
    ) -> None:
        engine.steer(ttft_s=0.3)
        batch = await start(client, [chat_line(service, str(at)) for at in range(20)])
        await eventually_async(lambda: _has_begun(client, batch.id), within_s=10, what="a line's answer")
        keys = f"/console/v1/accounts/{service.account_id}/keys"
        issued = await service.send("POST", keys, {"name": "other", "kind": "inference"}, key=service.admin_key)
        used = next(
            key
            for key in (await service.console(f"/accounts/{service.account_id}/keys"))["keys"]
            if "ai:run" in key["scopes"] and key["id"] != issued.json()["id"]
        )
        await service.send("DELETE", f"{keys}/{used['id']}", key=service.admin_key)
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=issued.json()["key"]) as other:
            done = await ended(other, batch.id)
            refused = await answers(other, done.error_file_id)
        assert {one["response"]["status_code"] for one in refused} == {401}
        assert {one["response"]["body"]["error"]["code"] for one in refused} == {"revoked_api_key"}

    async def test_a_used_up_budget_ends_lines_with_that_error(
        self, service: Service, client: openai.AsyncOpenAI
    ) -> None:
        await service.post(CHAT.path(service), CHAT.body(service))
        service.services.budgets.add(service.account_id, 1, BudgetPeriod.TOTAL)
        await service.services.holds.credit.refresh()
        batch = await ended(client, (await start(client, [chat_line(service, "a")])).id)
        [refused] = await answers(client, batch.error_file_id)
        assert refused["response"]["body"]["error"]["code"] == "budget_exceeded"


async def _has_begun(client: openai.AsyncOpenAI, batch_id: str) -> bool:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    return counts is not None and counts.completed > 0


async def test_lines_may_be_responses_that_neither_are_kept_nor_go_on_from_one(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    asked = {"model": service.model, "input": "Say a.", "max_output_tokens": 2}
    bodies = [asked, asked | {"store": True}, asked | {"previous_response_id": "resp"}, asked | {"background": True}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/responses", "body": body} for at, body in enumerate(bodies)
    ]
    file = await client.files.create(file=as_file(lines), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    over = await ended(client, batch.id)
    (told,) = await answers(client, over.output_file_id)
    answer = Response.model_validate(told["response"]["body"])
    assert (told["custom_id"], answer.output_text, answer.status) == ("0", "w0 w1 ", "incomplete")
    refused = await answers(client, over.error_file_id)
    assert [line["response"]["body"]["error"]["param"] for line in refused] == [
        "store",
        "previous_response_id",
        "background",
    ]
    row = await service.record(told["response"]["request_id"])
    assert (row["endpoint"], row["outcome"], row["completion_tokens"]) == ("responses", "finished", 2)
    await service.oracle(rows=1)


async def test_a_batch_that_nobody_asks_after_is_charged_to_its_account(
    service: Service, client: openai.AsyncOpenAI
) -> None:
    await start(client, [chat_line(service, str(at)) for at in range(5)])
    figures = service.services.batching.figures
    await eventually(lambda: figures.ended["succeeded"] == 5, within_s=10, what="the ends of all lines")
    usage = (await service.console(f"/accounts/{service.account_id}/usage"))["totals"]
    assert (usage["requests"], usage["completion_tokens"]) == (5, 40)
    assert sum(row["cost_nano"] for row in await service.records()) > 0


async def test_a_line_that_a_shutdown_cuts_off_is_not_charged_and_runs_again(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    engine.steer(itl_ms=30)
    home = tmp_path / "home"
    async with running_service(home, checkpoint, engine) as service:
        async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key) as client:
            line = chat_line(service, "cut")
            line["body"]["max_tokens"] = 400
            batch = await start(client, [line])
        await eventually(lambda: any(n > 3 for n in engine.produced.values()), within_s=10, what="some tokens")
        await service.services.pipeline.drain(within_s=0)
    engine.steer()
    async with running_service(home, checkpoint, engine) as service:
        async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key) as client:
            done = await ended(client, batch.id)
            [said] = await answers(client, done.output_file_id)
        assert said["response"]["body"]["usage"]["completion_tokens"] == 400
        records = sorted(await service.records(), key=lambda record: record["started_at"])
        assert [record["outcome"] for record in records] == ["cancelled", "finished"]
        assert [record["cost_nano"] > 0 for record in records] == [False, True]
        assert records[0]["completion_tokens"] > 3
        assert records[1]["id"] == said["response"]["request_id"]
        assert len(engine.requests) == 2


async def test_lines_leave_half_of_an_accounts_limits_to_its_other_requests(
    service: Service, client: openai.AsyncOpenAI, engine: ScriptedEngine
) -> None:
    database, account_id = service.services.database, service.account_id
    set_limits(database, account_id, concurrency=4, credit_limit_nano=None)
    set_quota(database, account_id, Meter.REQUESTS_PER_MINUTE, 12)
    engine.steer(itl_ms=20)
    batch = await start(client, [chat_line(service, str(at)) for at in range(20)])
    figures = service.services.batching.figures
    most = 0
    async with asyncio.timeout(20):
        while figures.ended["succeeded"] < 6:
            most = max(most, len(engine.live))
            await asyncio.sleep(0.005)
    assert 1 <= most <= 2
    engine.steer()
    answered = [await service.post("/v1/chat/completions", chat_line(service, "x")["body"]) for _ in range(6)]
    assert [answer.status for answer in answered] == [200] * 6
    assert figures.ended["succeeded"] == 6
    await client.batches.cancel(batch.id)
    done = await ended(client, batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (6, 0)
