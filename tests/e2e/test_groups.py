"""A model of several prefill and several decode halves, any with any: where requests go, what is held, what fails."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, ScriptedGroup, model, scripted_group, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Answer, Service, deployed_service

LONG = [{"role": "user", "content": "the pages are the scarce thing " * 40}]
# With its prompt, a request of so many tokens fills a decode half of a small pool.
SMALL_POOL, WHOLE_POOL = 1024, 800


@pytest.fixture
async def group() -> AsyncIterator[ScriptedGroup]:
    async with scripted_group() as group:
        yield group


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, group: ScriptedGroup) -> AsyncIterator[Service]:
    async with group_service(tmp_path, checkpoint, group) as service:
        yield service


@contextlib.asynccontextmanager
async def group_service(
    tmp_path: Path, checkpoint: Path, group: ScriptedGroup, table: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Service]:
    """Once all halves of the table, or of the group, are known."""
    table = table or group.table()
    deployed = model(checkpoint, groups=[table])
    async with deployed_service(tmp_path, checkpoint, group.decode[0], deployed, **settings) as service:
        await known(service, {one["name"] for side in ("prefill", "decode") for one in table[side]})
        yield service


async def known(service: Service, names: set[str]) -> None:
    fleet = service.services.fleet.of(MODEL)
    await eventually(
        lambda: {engine.id for engine in fleet.engines() if engine.answers} == names, within_s=30, what="known halves"
    )


async def ask(service: Service, **fields: Any) -> Answer:
    body = CHAT.body(service, **({"max_tokens": 8} | fields)) | {"model": MODEL}
    return await service.post(CHAT.path(service), body, headers={"x-pagegate-explain": "1"})


def asking(service: Service, **fields: Any) -> "asyncio.Task[Answer]":
    return asyncio.create_task(ask(service, **fields), name="a client")


def decision_of(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(answer.headers["x-pagegate-decision"])
    return found


async def comes_to_rest(service: Service, group: ScriptedGroup) -> None:
    """Nothing runs or is held at any half, nor is a prompt on its way into one."""
    fleet = service.services.fleet.of(MODEL)

    def is_at_rest() -> bool:
        prompts = sum(len(half) for half in fleet.placing.halves.values())
        held = sum(engine.ledger.held_pages for engine in fleet.engines())
        return not any(engine.live for engine in group.engines) and prompts == held == 0

    await eventually(is_at_rest, within_s=30, what="halves at rest")


def rids(engine: ScriptedEngine) -> set[str]:
    return {received.body["rid"] for received in engine.requests}


class TestWhereRequestsGo:
    async def test_any_prefill_half_computes_for_any_decode_half_and_both_are_told_the_same(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with scripted_group(prefill=3, decode=2) as group, group_service(tmp_path, checkpoint, group) as service:
            for engine in group.engines:
                engine.steer(ttft_s=0.02, itl_ms=1)
            asked = [asking(service, stream=number % 2 == 0, max_tokens=40) for number in range(24)]
            answers = await asyncio.gather(*asked)
            assert [answer.status for answer in answers] == [200] * 24
            met = Counter(
                (p, d)
                for p, prefill in enumerate(group.prefill)
                for d, decode in enumerate(group.decode)
                for _ in rids(prefill) & rids(decode)
            )
            assert len(met) > 3, "some half worked with more than one of the other side"
            assert met.total() == 24
            for number, prefill in enumerate(group.prefill):
                assert prefill.requests
                assert {received.body["bootstrap_port"] for received in prefill.requests} == {8998 + number}
            prompts = {received.body["rid"]: received.body for one in group.prefill for received in one.requests}
            for received in (received for one in group.decode for received in one.requests):
                assert received.body == prompts[received.body["rid"]]
            await comes_to_rest(service, group)
            await service.oracle(rows=24)

    async def test_the_decision_and_the_capacity_page_name_both_halves(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        answer = await ask(service)
        decision = decision_of(answer)
        assert (decision["replica"], decision["prefill"]) in {(d, p) for d in ("d0", "d1") for p in ("p0", "p1")}
        group.prefill[0].steer(ttft_s=30)
        group.prefill[1].steer(ttft_s=30)
        asked = [asking(service), asking(service)]
        await eventually(lambda: all(one.live for one in group.prefill), what="a prompt at each prefill half")
        (shown,) = (await service.console("/capacity"))["models"]
        rows = {row["id"]: row for row in shown["replicas"]}
        assert {name: row["role"] for name, row in rows.items()} == {
            "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode",
        }  # fmt: skip
        assert [rows[name]["prompts"]["inside"] for name in ("p0", "p1")] == [1, 1]
        assert all(rows[name]["held_pages"] > 0 and rows[name]["prompts"]["computed_in_s"] > 0 for name in ("p0", "p1"))
        assert all(rows[name]["forecast"] and rows[name]["prompts"] is None for name in ("d0", "d1"))
        for one in asked:
            one.cancel()
        await comes_to_rest(service, group)

    async def test_prompts_with_the_same_beginning_go_to_the_half_that_has_it(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        again = [{"role": "user", "content": "the pages are the scarce thing " * 90}]
        group.prefill[0].steer(ttft_s=30)
        busy = asking(service)
        await eventually(lambda: bool(group.prefill[0].live), what="a busy first half")
        assert decision_of(await ask(service, messages=again))["prefill"] == "p1"
        busy.cancel()
        await comes_to_rest(service, group)
        group.prefill[0].steer()
        assert decision_of(await ask(service))["prefill"] == "p0", "another prompt goes to the first idle one"
        found = [decision_of(await ask(service, messages=again)) for _ in range(3)]
        assert {one["prefill"] for one in found} == {"p1"}

    async def test_a_pair_and_a_replica_serve_beside_a_group(
        self, tmp_path: Path, checkpoint: Path, group: ScriptedGroup
    ) -> None:
        async with ScriptedEngine() as unified:
            fields = model(checkpoint, groups=[group.table()], replicas=[unified])
            async with deployed_service(tmp_path, checkpoint, unified, fields) as service:
                await known(service, {"r0", "p0", "p1", "d0", "d1"})
                for engine in (unified, *group.engines):
                    engine.steer(itl_ms=5)
                answers = await asyncio.gather(*(asking(service, max_tokens=30) for _ in range(12)))
                assert [answer.status for answer in answers] == [200] * 12
                assert unified.requests
                assert all(one.requests for one in group.decode)
                assert "bootstrap_room" not in unified.requests[0].body
                await comes_to_rest(service, group)


class TestRoom:
    async def test_nothing_is_computed_while_no_decode_half_has_room(self, tmp_path: Path, checkpoint: Path) -> None:
        async with (
            scripted_group(prefill=2, decode=2, pool_tokens=SMALL_POOL) as group,
            group_service(tmp_path, checkpoint, group) as service,
        ):
            for decode in group.decode:
                decode.steer(itl_ms=20)
            asked = [asking(service, stream=True, max_tokens=WHOLE_POOL) for _ in range(2)]
            await eventually(lambda: all(len(one.live) == 1 for one in group.decode), what="two full decode halves")
            await eventually(lambda: not any(one.live for one in group.prefill), what="two idle prefill halves")
            before = [len(one.requests) for one in group.prefill]
            refused = await ask(service, max_tokens=WHOLE_POOL, options={"rejectIfBusy": True})
            assert refused.status == 429
            waiting = asking(service, max_tokens=WHOLE_POOL)
            await eventually(lambda: len(service.services.fleet.of(MODEL).room) == 1, what="one that waits")
            assert [len(one.requests) for one in group.prefill] == before, "no prefill half has heard of either"
            for one in asked:
                one.cancel()
            for decode in group.decode:
                decode.steer()
            assert (await waiting).status == 200
            await comes_to_rest(service, group)
            assert await wasted(service) == 0

    async def test_a_prompt_goes_to_the_prefill_half_with_pages_and_waits_where_none_has(
        self, tmp_path: Path, checkpoint: Path, group: ScriptedGroup
    ) -> None:
        for prefill in group.prefill:
            prefill.pool_tokens = 512  # one such prompt each
            prefill.steer(ttft_s=0.3)
        async with group_service(tmp_path, checkpoint, group) as service:
            asked = [asking(service, messages=LONG, max_tokens=40) for _ in range(5)]
            answers = await asyncio.gather(*asked)
            assert [answer.status for answer in answers] == [200] * 5
            assert all(prefill.peak_used_tokens <= 512 for prefill in group.prefill)
            assert all(len(prefill.requests) >= 2 for prefill in group.prefill)
            await comes_to_rest(service, group)


class TestFailures:
    async def test_a_prefill_half_that_dies_leaves_the_others_to_compute_for_all(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        group.prefill[0].steer(die_after=0)
        answers = await asyncio.gather(*(asking(service) for _ in range(6)))
        assert [answer.status for answer in answers] == [200] * 6
        await comes_to_rest(service, group)
        await service.oracle(rows=6)
        aborted = rids(group.prefill[0])
        assert aborted <= {rid for one in group.decode for rid in one.aborts}, "its decode half was told"

    async def test_a_prefill_half_that_fails_again_and_again_is_left_alone_and_its_decode_halves_are_not(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        group.prefill[0].steer(error_after=0)
        fleet = service.services.fleet.of(MODEL)
        halves = {engine.id: engine for engine in fleet.engines()}
        for _ in range(40):
            await ask(service)
            if halves["p0"].health.verdict(asyncio.get_running_loop().time()).value != "open":
                break
            group.prefill[1].steer(ttft_s=0.05)
        before = len(group.prefill[0].requests)
        assert [(await ask(service)).status for _ in range(4)] == [200] * 4
        assert len(group.prefill[0].requests) == before
        assert all(halves[name].standing(0.0).value == "open" for name in ("d0", "d1"))
        await comes_to_rest(service, group)

    async def test_a_decode_half_that_dies_wastes_a_prefill_which_is_counted_and_gives_both_sides_back(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        for decode in group.decode:
            decode.steer(ttft_s=0.1, error_after=0)
        answer = await ask(service)
        assert answer.status >= 500
        await comes_to_rest(service, group)
        await service.oracle(rows=1)
        sent = next(received for one in group.decode for received in one.requests).body
        assert await wasted(service) == len(sent["input_ids"])

    async def test_where_all_prefill_halves_are_gone_nobody_decodes_and_it_is_said(
        self, service: Service, group: ScriptedGroup
    ) -> None:
        for prefill in group.prefill:
            await prefill.__aexit__(None, None, None)
        fleet = service.services.fleet.of(MODEL)
        await eventually(lambda: not fleet.up, within_s=30, what="a model that is down")
        answer = await ask(service, options={"rejectIfBusy": True})
        assert answer.status in {429, 503}
        assert not any(decode.live for decode in group.decode)
        for prefill in group.prefill:
            await prefill.__aenter__()
        await eventually(lambda: fleet.up, within_s=30, what="a model that is up again")
        assert (await ask(service)).status == 200


class TestComingAndGoing:
    async def test_halves_are_added_and_taken_away_while_streams_run(
        self, tmp_path: Path, checkpoint: Path, group: ScriptedGroup
    ) -> None:
        """The sides are scaled apart: first a prefill half more, then another decode half instead of the first."""
        table = group.table(prefill=1, decode=1)
        async with group_service(tmp_path, checkpoint, group, table) as service:
            fleet = service.services.fleet.of(MODEL)
            (kept,) = fleet.replicas
            group.decode[0].steer(itl_ms=30)
            body = CHAT.body(service, stream=True, max_tokens=1900) | {"model": MODEL}
            async with service.open_stream(CHAT.path(service), body) as response:
                while b"w3 " not in await response.content.readline():
                    pass
                file = tmp_path / "deployment.toml"
                write_deployment(file, model(checkpoint, groups=[group.table(prefill=2, decode=1)]))
                await service.services.reload()
                await known(service, {"p0", "p1", "d0"})
                assert fleet.replicas == [kept]
                assert len(kept.ledger) == 1
                group.prefill[0].steer(ttft_s=30)
                busy = asking(service, max_tokens=4)
                await eventually(lambda: len(group.prefill[0].live) == 1, what="a busy first half")
                assert decision_of(await ask(service, max_tokens=4))["prefill"] == "p1"
                busy.cancel()
                group.prefill[0].steer()
                other = group.table()
                write_deployment(file, model(checkpoint, groups=[other | {"decode": other["decode"][1:]}]))
                await service.services.reload()
                await known(service, {"p0", "p1", "d1"})
                assert decision_of(await ask(service, max_tokens=4))["replica"] == "d1"
                before = group.decode[0].produced[next(iter(group.decode[0].live))]
                while b"data: " not in await response.content.readline() or not _has_gone_on(group, before):
                    pass
            await comes_to_rest(service, group)
            await service.oracle(rows=4)

    async def test_each_side_asks_for_what_it_needs_itself(
        self, tmp_path: Path, checkpoint: Path, group: ScriptedGroup
    ) -> None:
        """Prompts that wait and few outputs ask for prefill halves; the metrics say so for each side."""
        for prefill in group.prefill:
            prefill.pool_tokens = 512
            prefill.steer(ttft_s=2)
        settings = {"lifecycle": {"scaling_interval_s": 0.2}}
        table = group.table(decode=1)
        async with group_service(tmp_path, checkpoint, group, table, **settings) as service:
            asked = [asking(service, messages=LONG, max_tokens=4) for _ in range(12)]
            await eventually(lambda: len(service.services.fleet.of(MODEL).room) > 4, what="prompts that wait")

            async def more_prefill_halves_are_wished() -> bool:
                return (await wished(service)).get("prefill", 0) > 2

            await eventually_async(more_prefill_halves_are_wished, within_s=30, what="a wish for prefill halves")
            assert (await wished(service))["decode"] == 1
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def _has_gone_on(group: ScriptedGroup, before: int) -> bool:
    return any(group.decode[0].produced.get(rid, 0) > before + 5 for rid in group.decode[0].live)


async def wished(service: Service) -> dict[str, float]:
    """By side."""
    text = (await service.send("GET", "/metrics")).body.decode()
    found = [line for line in text.splitlines() if line.startswith("pagegate_wished_replicas{")]
    sides = ("unified", "prefill", "decode")
    return {side: float(line.rsplit(" ", 1)[1]) for line in found for side in sides if f'side="{side}"' in line}


async def wasted(service: Service) -> float:
    text = (await service.send("GET", "/metrics")).body.decode()
    found = [line for line in text.splitlines() if line.startswith("pagegate_wasted_prefill_tokens_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)
