"""A gateway that serves a deployment file: several models and replicas, engines that contradict it, and reloads."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT, COMPLETIONS, RUN, Dialect, dialect_name
from tests.e2e.service import Service, running_service

OTHER = "@cf/test/other"


@contextlib.asynccontextmanager
async def engines(count: int, **options: Any) -> AsyncIterator[list[ScriptedEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedEngine(**options)) for _ in range(count)]


async def ask(service: Service, name: str = MODEL, **fields: Any) -> int:
    answer = await service.post("/v1/chat/completions", CHAT.body(service, **fields) | {"model": name})
    return answer.status


class TestModels:
    async def test_each_model_is_served_by_its_own_engines_and_published_with_its_limits_and_precisions(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with engines(2) as (one, other):
            file = write_deployment(
                tmp_path / "d.toml",
                model(checkpoint, replicas=[one]),
                model(checkpoint, replicas=[other], id=OTHER, limits={"context_tokens": 512, "output_tokens_max": 64}),
            )
            async with running_service(tmp_path / "home", checkpoint, one, deployment=file) as service:
                assert await ask(service) == 200
                assert await ask(service, OTHER) == 200
                assert (len(one.requests), len(other.requests)) == (1, 1)
                listed = orjson.loads((await service.send("GET", "/v1/models")).body)["data"]
                assert [(card["id"], card["max_output_length"]) for card in listed] == [(MODEL, 2047), (OTHER, 64)]
                assert listed[0]["precisions"] == {
                    "prefill_weights": "bf16",
                    "decode_weights": "bf16",
                    "kv_cache": "bf16",
                }

    @pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS, RUN], ids=dialect_name)
    @pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["whole", "streamed"])
    async def test_load_is_spread_evenly_over_the_replicas_on_every_path(
        self, tmp_path: Path, checkpoint: Path, dialect: Dialect, stream: dict[str, Any]
    ) -> None:
        async with engines(4) as four:
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=four))
            async with running_service(tmp_path / "home", checkpoint, four[0], deployment=file) as service:
                for engine in four:
                    engine.steer(itl_ms=2)

                async def one() -> int:
                    return (await service.post(dialect.path(service), dialect.body(service, **stream))).status

                assert set(await asyncio.gather(*(one() for _ in range(80)))) == {200}
                shares = [len(engine.requests) for engine in four]
                assert sum(shares) == 80
                assert min(shares) >= 12

    async def test_an_engine_that_contradicts_the_file_gets_nothing_until_it_is_as_it_says(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with engines(1) as (good,), ScriptedEngine(kv_cache_dtype="auto") as bad:
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[bad, good]))
            async with running_service(tmp_path / "home", checkpoint, good, deployment=file) as service:
                assert [await ask(service) for _ in range(4)] == [200] * 4
                assert not bad.requests
                replica = service.services.fleet.of(MODEL).replicas[0]
                assert replica.faults == ["--kv-cache-dtype is auto, the deployment file says bf16"]
                bad.kv_cache_dtype = "bfloat16"
                await eventually(lambda: replica.known, what="a replica that is used")

    async def test_what_an_engines_own_reserve_would_queue_waits_here_instead(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        """SGLang would start two of these: each reserves all of its output, and the third finds no room for its own."""
        async with engines(1, pool_tokens=4096) as (engine,):
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine]))
            async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
                engine.steer(itl_ms=10, tokens=400)
                asked = [asyncio.create_task(ask(service, max_tokens=None, stream=True)) for _ in range(3)]
                room = service.services.fleet.of(MODEL).room
                await eventually(lambda: len(engine.live) == 2 and len(room) == 1, what="one that waits")
                write_deployment(
                    file,
                    model(checkpoint, replicas=[{"url": engine.url, "reserved_output_tokens_max": 64}]),
                )
                await service.services.reload()
                await eventually(lambda: len(engine.live) == 3, what="all three at an engine that reserves less")
                assert [await one for one in asked] == [200] * 3


class TestReload:
    async def test_a_removed_replica_gets_nothing_new_and_ends_what_runs_there(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with engines(2) as (kept, removed):
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[removed]))
            async with running_service(tmp_path / "home", checkpoint, kept, deployment=file) as service:
                removed.steer(itl_ms=20)
                running = [
                    asyncio.create_task(ask(service, max_tokens=40, stream=number % 2 == 0)) for number in range(6)
                ]
                await eventually(lambda: len(removed.live) == 6, what="running requests")
                write_deployment(file, model(checkpoint, replicas=[kept]))
                await service.services.reload()
                await eventually(lambda: service.services.fleet.of(MODEL).up, what="a known new replica")
                assert await ask(service) == 200
                assert [await one for one in running] == [200] * 6
                assert (len(kept.requests), len(removed.requests)) == (1, 6)
                await service.oracle(rows=7)

    async def test_a_replica_that_stays_keeps_its_holds_and_its_report(self, tmp_path: Path, checkpoint: Path) -> None:
        async with engines(2) as (kept, added):
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[kept]))
            async with running_service(tmp_path / "home", checkpoint, kept, deployment=file) as service:
                kept.steer(itl_ms=20)
                running = asyncio.create_task(ask(service, max_tokens=40))
                await eventually(lambda: bool(kept.live), what="a running request")
                before = service.services.fleet.of(MODEL).replicas[0]
                write_deployment(file, model(checkpoint, replicas=[kept, added]))
                await service.services.reload()
                after, new = service.services.fleet.of(MODEL).replicas
                assert after is before
                assert (len(after.ledger), after.known) == (1, True)
                await eventually(lambda: new.known, what="a report of the new one")
                assert await running == 200

    @pytest.mark.parametrize(
        ("broken", "why"),
        [
            ("[[models", "is not TOML"),
            ('[[models]]\nid = "m"\n', "models[0].price"),
            ("", "models"),
            ("{same}{same}", "is listed twice"),
        ],
    )
    async def test_a_file_that_can_not_be_used_changes_nothing_and_it_is_said_why(
        self,
        tmp_path: Path,
        checkpoint: Path,
        capsys: pytest.CaptureFixture[str],
        broken: str,
        why: str,
    ) -> None:
        async with engines(1) as (engine,):
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine]))
            async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
                before = service.services.fleet.of(MODEL)
                file.write_text(broken.replace("{same}", file.read_text()))
                await service.services.reload()
                assert service.services.fleet.of(MODEL) is before
                assert await ask(service) == 200
        said = capsys.readouterr().out
        assert "the deployment stays as it was" in said
        assert why in said

    async def test_a_tokenizer_that_is_not_there_changes_nothing(self, tmp_path: Path, checkpoint: Path) -> None:
        async with engines(1) as (engine,):
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine]))
            async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
                write_deployment(file, model(checkpoint, replicas=[engine], id=OTHER, tokenizer="/nowhere"))
                await service.services.reload()
                assert await ask(service) == 200
                assert await ask(service, OTHER) == 404

    async def test_a_model_that_goes_is_unknown_and_those_who_waited_for_it_are_told(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with engines(2) as (full, other):
            full.running_max = 1
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[full]))
            async with running_service(tmp_path / "home", checkpoint, full, deployment=file) as service:
                full.steer(itl_ms=30)
                running = asyncio.create_task(ask(service, max_tokens=60))
                await eventually(lambda: bool(full.live), what="a running request")
                waiting = asyncio.create_task(ask(service))
                fleet = service.services.fleet.of(MODEL)
                await eventually(lambda: len(fleet.room) == 1, what="a waiting request")
                write_deployment(file, model(checkpoint, replicas=[other], id=OTHER))
                await service.services.reload()
                assert await waiting == 503
                assert await ask(service) == 404
                assert await running == 200
                await eventually_async(service.is_clean, what="a clean service")

    async def test_reloads_under_load_lose_no_request(self, tmp_path: Path, checkpoint: Path) -> None:
        async with engines(3) as three:
            file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=three[:2]))
            async with running_service(tmp_path / "home", checkpoint, three[0], deployment=file) as service:
                for engine in three:
                    engine.steer(itl_ms=2)
                asked = [asyncio.create_task(ask(service, stream=True)) for _ in range(60)]
                for number in range(8):
                    write_deployment(file, model(checkpoint, replicas=three[number % 2 : number % 2 + 2]))
                    await service.services.reload()
                    await asyncio.sleep(0.02)
                assert {await one for one in asked} == {200}
                await service.oracle(rows=60)
