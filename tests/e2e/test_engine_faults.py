"""Engines that hang, stand still, flap or say too much: others go on, clients are told, and nothing of theirs leaks."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.health import Standing
from tenancy.provisioning import set_limits
from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT, DIALECTS, Dialect, dialect_name
from tests.e2e.service import Answer, Service, running_service
from tests.engines import ROOT, free_port

SECRET = b"/opt/engine/secret.py line 7"


@contextlib.asynccontextmanager
async def two_replicas(
    tmp_path: Path, checkpoint: Path, **settings: Any
) -> AsyncIterator[tuple[Service, ScriptedEngine, ScriptedEngine]]:
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[one, other]))
        async with running_service(tmp_path / "home", checkpoint, one, deployment=file, **settings) as service:
            yield service, one, other


async def steer(url: str, **changes: Any) -> None:
    """An engine in a process of its own."""
    async with aiohttp.ClientSession() as session, session.post(url + "/_script", json=changes) as answer:
        assert answer.status == 200


async def runs(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(url + "/_state") as answer:
        return bool((await answer.json())["live"])


async def ask(service: Service, **fields: Any) -> Answer:
    return await service.post(CHAT.path(service), CHAT.body(service, **fields))


def standing(service: Service, index: int) -> Standing:
    return service.services.fleet.of(MODEL).replicas[index].standing(time.monotonic())


async def test_models_are_listed_from_the_catalogue_although_an_engine_is_gone(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with contextlib.AsyncExitStack() as gone, ScriptedEngine() as one, ScriptedEngine() as other:
        third = await gone.enter_async_context(ScriptedEngine())
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[one, other, third]))
        async with running_service(tmp_path / "home", checkpoint, one, deployment=file) as service:
            first = await service.send("GET", "/v1/models")
            assert [card["id"] for card in first.json()["data"]] == [MODEL]
            await gone.aclose()
            answers = [await service.send("GET", "/v1/models") for _ in range(50)]
            assert {(answer.status, answer.body) for answer in answers} == {(200, first.body)}
            assert (await ask(service)).status == 200


class TestHanging:
    async def test_requests_at_a_hanging_engine_fail_after_the_bound_and_the_others_are_not_slowed(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        bounds = {"silence_s_max": 1.0}
        async with two_replicas(tmp_path, checkpoint, backends=bounds) as (service, hung, good):
            hung.steer(hang_after=0)
            began = time.monotonic()
            answers = await asyncio.gather(*(ask(service, stream=number % 2 == 0) for number in range(12)))
            statuses = [answer.status for answer in answers]
            assert statuses.count(200) == len(good.requests) >= 4
            assert {status for status in statuses if status != 200} <= {502, 504}
            assert time.monotonic() - began < 10
            assert len(hung.requests) + len(good.requests) == 12  # none was sent twice
            await service.oracle(rows=12)

    async def test_a_whole_answer_may_take_longer_than_silence_may_while_its_engine_works(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with ScriptedEngine() as engine:
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine]))
            bounds = {"silence_s_max": 1.0}
            async with running_service(
                tmp_path / "home", checkpoint, engine, deployment=file, backends=bounds
            ) as service:
                engine.steer(itl_ms=25)
                began = time.monotonic()
                assert (await ask(service, max_tokens=100)).status == 200
                assert time.monotonic() - began > 2

    async def test_an_engine_that_answers_nothing_at_all_ends_whole_answers_after_the_bound_on_silence(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        """Stopped as a process is: probes get no answer either."""
        port = free_port()
        command = [sys.executable, "-m", "tests.doubles.engine", "--port", str(port)]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        url = f"http://127.0.0.1:{port}"
        try:
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[{"url": url}]))
            bounds = {"silence_s_max": 1.0, "connect_timeout_s": 0.5}
            async with running_service(
                tmp_path / "home", checkpoint, ScriptedEngine(), deployment=file, backends=bounds
            ) as service:
                await steer(url, itl_ms=20)
                asking = asyncio.create_task(ask(service, max_tokens=1000))
                await eventually_async(lambda: runs(url), what="a running request")
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(10):
                    assert (await asking).status in {502, 504}
                await service.oracle(rows=1)
                [row] = await service.records()
                assert (row["outcome"], row["code"], row["cost_nano"]) == ("upstream_failed", "engine_timeout", 0)
        finally:
            process.kill()
            await process.wait()

    async def test_an_engine_that_fails_again_and_again_gets_no_more_after_some(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with two_replicas(tmp_path, checkpoint) as (service, one, other):
            await ask(service)
            # Of two that are idle, it goes to the one whose report came first.
            index, bad, good = (0, one, other) if one.requests else (1, other, one)
            bad.requests.clear()
            bad.steer(refuse=Refusal(500, b"broken"))
            for number in range(80):
                # Another first page each time: a known one would go where its prefix is cached, and the system message
                # is the first thing in a prompt.
                first = {"role": "system", "content": f"{number} it is"}
                await ask(service, messages=[first, {"role": "user", "content": "Hello"}])
                if standing(service, index) is Standing.TRIPPED:
                    break
            seen, rests_until = len(bad.requests), time.monotonic() + 1.0
            assert 5 <= seen <= 40
            while time.monotonic() < rests_until:
                assert (await ask(service)).status == 200
            assert len(bad.requests) == seen
            assert good.requests

    async def test_a_tenants_wrong_requests_take_no_engine_out(self, tmp_path: Path, checkpoint: Path) -> None:
        async with two_replicas(tmp_path, checkpoint) as (service, one, other):
            for engine in (one, other):
                engine.steer(refuse=Refusal(400, b"no"))
            for _ in range(12):
                assert (await ask(service)).status == 400
            assert [standing(service, index) for index in (0, 1)] == [Standing.OPEN] * 2


class TestStandingStill:
    async def test_an_engine_that_is_full_healthy_and_still_is_given_up_and_its_clients_are_told(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        gateway = {"replica_stalled_seconds_max": 0.5}
        async with two_replicas(tmp_path, checkpoint, gateway=gateway, backends={"silence_s_max": 2.0}) as (
            service,
            still,
            good,
        ):
            still.steer(hang_after=3, loads_numbers={"num_used_tokens": 62_912, "num_running_reqs": 3})
            stuck = [asyncio.create_task(ask(service, stream=True, max_tokens=64)) for _ in range(6)]
            await eventually(lambda: standing(service, 0) is Standing.STALLED, what="a replica that is given up")
            before = len(still.requests)
            assert [(await ask(service)).status for _ in range(4)] == [200] * 4
            assert len(still.requests) == before
            told = [await one for one in stuck]
            failed = [answer for answer in told if b'"error"' in answer.body]
            assert len(failed) == before, [answer.body[-200:] for answer in told]
            await eventually(lambda: not still.live and not good.live, what="idle engines")


class TestFlapping:
    async def test_one_failed_probe_changes_nothing(self, tmp_path: Path, checkpoint: Path) -> None:
        async with two_replicas(tmp_path, checkpoint) as (service, flapping, other):
            flapping.steer(loads="error")
            replica = service.services.fleet.of(MODEL).replicas[0]
            await eventually(lambda: replica.health.wavers, what="a failed probe")
            flapping.steer()
            assert standing(service, 0) is Standing.OPEN
            for engine in (flapping, other):
                engine.steer(itl_ms=5)
            answers = await asyncio.gather(*(ask(service) for _ in range(12)))
            assert [answer.status for answer in answers] == [200] * 12
            assert flapping.requests
            assert other.requests


class TestDiscretion:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    @pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
    async def test_what_an_engine_says_in_a_refusal_stays_inside(
        self, service: Service, dialect: Dialect, status: int
    ) -> None:
        service.engine.steer(refuse=Refusal(status, SECRET, {"x-engine-host": "10.1.2.3", "server": "engine/1"}))
        answer = await service.post(dialect.path(service), dialect.body(service))
        assert answer.status >= 400
        assert SECRET not in answer.body
        assert b"10.1.2.3" not in answer.body
        assert "x-engine-host" not in answer.headers
        assert answer.headers.get("server", "") != "engine/1"
        await service.oracle(rows=1)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_what_an_engine_says_in_mid_stream_stays_inside(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(error_after=3)
        answer = await service.post(dialect.path(service), dialect.body(service, stream=True))
        assert b"scripted engine" not in answer.body
        assert b"not charged" in answer.body


async def counted(service: Service, name: str) -> float:
    text = (await service.send("GET", "/metrics")).body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


class TestAborts:
    async def test_what_an_engine_produced_for_nobody_is_counted(self, service: Service) -> None:
        service.engine.steer(die_after=7)
        await ask(service, stream=True, max_tokens=60)
        await service.oracle(rows=1)
        [row] = await service.records()
        assert (row["completion_tokens"], row["cost_nano"]) == (7, 0)
        assert await counted(service, "pagegate_unbilled_tokens_total") == 7

    async def test_an_engine_without_an_abort_route_is_counted_and_its_connection_closed(
        self, service: Service
    ) -> None:
        service.engine.steer(itl_ms=10, abort_status=404)
        async with service.open_stream(CHAT.path(service), CHAT.body(service, stream=True, max_tokens=400)) as response:
            await response.content.readline()
        await eventually(lambda: not service.engine.live, what="a stopped engine")
        await service.oracle(rows=1)
        assert await counted(service, "pagegate_engine_aborts_failed_total") == 1

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    @pytest.mark.parametrize("after", [0, 5], ids=["before-the-first-token", "after-some"])
    async def test_an_engine_that_aborts_of_its_own_accord_is_a_failure_and_never_an_empty_success(
        self, service: Service, *, stream: bool, after: int
    ) -> None:
        service.engine.steer(itl_ms=5, ttft_s=0 if after else 30)
        asking = asyncio.create_task(ask(service, stream=stream, max_tokens=400))
        await eventually(
            lambda: any(generation.produced >= after for generation in service.engine.live.values()),
            what="a running request",
        )
        service.engine.abort("")
        answer = await asking
        assert answer.status >= 500 or b"not charged" in answer.body
        await service.oracle(rows=1)
        [row] = await service.records()
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)

    async def test_a_turn_that_was_left_while_it_waited_can_be_sent_again(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with (
            ScriptedEngine(running_max=1) as engine,
            running_service(tmp_path / "home", checkpoint, engine) as service,
        ):
            set_limits(service.services.database, service.account_id, concurrency=2, credit_limit_nano=None)
            engine.steer(itl_ms=10)
            running = asyncio.create_task(ask(service, max_tokens=100))
            await eventually(lambda: bool(engine.live), what="a running request")
            second_turn = {"headers": {"x-session-affinity": "one"}}
            left = asyncio.create_task(service.post(CHAT.path(service), CHAT.body(service), **second_turn))
            room = service.services.fleet.of(service.model).room
            await eventually(lambda: len(room) == 1, what="a waiting turn")
            left.cancel()
            await eventually(lambda: len(room) == 0 and len(service.services.holds.live) == 1, what="one that has left")
            again = asyncio.create_task(service.post(CHAT.path(service), CHAT.body(service), **second_turn))
            assert (await running).status == 200
            assert (await again).status == 200
            await service.oracle(rows=3)
