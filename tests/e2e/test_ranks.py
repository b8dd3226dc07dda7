"""Engines with several data-parallel ranks: each rank's pages count, and a request goes to the rank that holds them."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, model, scripted_pair, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service

RANK_TOKENS = 1024
# With its prompt, one of these fills a rank.
WHOLE_RANK = 640


def at(engine: ScriptedEngine, ranks: int) -> dict[str, Any]:
    return {"url": engine.url, "data_parallel": ranks}


async def ask(service: Service, **fields: Any) -> int:
    return (await service.post("/v1/chat/completions", CHAT.body(service, **fields) | {"model": MODEL})).status


def ranks_of(engine: ScriptedEngine, field: str = "routed_dp_rank") -> Counter[int | None]:
    return Counter(received.body.get(field) for received in engine.requests)


async def test_the_pages_of_all_ranks_are_filled_and_no_rank_gets_more_than_it_holds(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with ScriptedEngine(pool_tokens=RANK_TOKENS, ranks=4) as engine:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[at(engine, 4)]))
        async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
            fleet = service.services.fleet.of(MODEL)
            assert [replica.id for replica in fleet.replicas] == ["r0.0", "r0.1", "r0.2", "r0.3"]
            await eventually(lambda: all(replica.known for replica in fleet.replicas), what="four known ranks")
            engine.steer(itl_ms=2)
            asked = [asyncio.create_task(ask(service, max_tokens=WHOLE_RANK)) for _ in range(6)]
            await eventually(lambda: len(engine.live) == 4 and len(fleet.room) == 2, what="four full ranks")
            assert ranks_of(engine) == {0: 1, 1: 1, 2: 1, 3: 1}
            assert all(0 < engine.used_tokens(rank) <= RANK_TOKENS for rank in range(4))
            assert [await one for one in asked] == [200] * 6
            await service.oracle(rows=6)


async def test_a_prompt_that_no_single_rank_can_hold_is_refused_at_once(tmp_path: Path, checkpoint: Path) -> None:
    async with ScriptedEngine(pool_tokens=64, ranks=4) as engine:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[at(engine, 4)]))
        async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
            fleet = service.services.fleet.of(MODEL)
            await eventually(lambda: all(replica.known for replica in fleet.replicas), what="four known ranks")
            assert await ask(service, messages=[{"role": "user", "content": "page " * 120}]) == 400
            assert not engine.requests


async def test_an_engine_with_another_number_of_ranks_than_the_file_says_is_not_used(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with ScriptedEngine(ranks=2) as two, ScriptedEngine() as one:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[two, one]))
        async with running_service(tmp_path / "home", checkpoint, one, deployment=file) as service:
            wrong, _ = service.services.fleet.of(MODEL).replicas
            await eventually(lambda: bool(wrong.faults), what="a found contradiction")
            assert wrong.faults == ["--dp-size is 2, the deployment file says 1"]
            assert [await ask(service) for _ in range(4)] == [200] * 4
            assert not two.requests
            # Once the file knows the second rank, it serves as well.
            write_deployment(file, model(checkpoint, replicas=[at(two, 2)]))
            await service.services.reload()
            fleet = service.services.fleet.of(MODEL)
            await eventually(lambda: [r.known for r in fleet.replicas] == [True, True], what="two known ranks")
            two.steer(itl_ms=5)
            assert await asyncio.gather(*(ask(service) for _ in range(8))) == [200] * 8
            assert set(ranks_of(two)) == {0, 1}


async def test_a_drained_engine_gets_nothing_at_any_rank(tmp_path: Path, checkpoint: Path) -> None:
    async with ScriptedEngine(ranks=2) as drained, ScriptedEngine() as other:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[at(drained, 2), other]))
        async with running_service(tmp_path / "home", checkpoint, other, deployment=file) as service:
            fleet = service.services.fleet.of(MODEL)
            await eventually(lambda: all(replica.known for replica in fleet.replicas), what="all known")
            assert fleet.drain("r0", draining=True)
            assert [await ask(service) for _ in range(6)] == [200] * 6
            assert not drained.requests


async def test_each_rank_of_decode_gets_its_pages_from_one_rank_of_prefill(tmp_path: Path, checkpoint: Path) -> None:
    async with scripted_pair(prefill_ranks=2, ranks=4) as pair:
        fields = model(checkpoint, pairs=[pair])
        fields["pairs"][0]["prefill"]["data_parallel"] = 2
        fields["pairs"][0]["decode"]["data_parallel"] = 4
        file = write_deployment(tmp_path / "d.toml", fields)
        async with running_service(tmp_path / "home", checkpoint, pair.decode, deployment=file) as service:
            fleet = service.services.fleet.of(MODEL)
            await eventually(lambda: all(replica.known for replica in fleet.replicas), what="four known pairs")
            assert len(set(fleet.engines())) == 6
            pair.decode.steer(itl_ms=2)
            asked = [asyncio.create_task(ask(service, stream=number % 2 == 0)) for number in range(32)]
            assert [await one for one in asked] == [200] * 32
            await service.oracle(rows=32)
        assert set(ranks_of(pair.decode)) == {0, 1, 2, 3}
        prompts = {received.body["rid"]: received.body for received in pair.prefill.requests}
        for received in pair.decode.requests:
            decoded, prefilled = received.body, prompts[received.body["rid"]]
            assert prefilled["routed_dp_rank"] == decoded["routed_dp_rank"] % 2
            assert prefilled["disagg_prefill_dp_rank"] == prefilled["routed_dp_rank"]
            assert decoded["disagg_prefill_dp_rank"] == prefilled["routed_dp_rank"]
            assert decoded["bootstrap_room"] == prefilled["bootstrap_room"]


async def test_an_engine_of_one_rank_is_told_no_rank(tmp_path: Path, checkpoint: Path) -> None:
    async with ScriptedEngine() as engine:
        file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine]))
        async with running_service(tmp_path / "home", checkpoint, engine, deployment=file) as service:
            assert await ask(service) == 200
            assert ranks_of(engine) == {None: 1}
