"""Where an account's prompts may go, through the whole gateway: no engine elsewhere ever sees one, on any path."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.lifecycle.states import Answered, Begun, State, Unit, Wish, advance
from tenancy import provisioning
from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT, COMPLETIONS, RUN, Dialect, dialect_name
from tests.e2e.service import Service, running_service

OTHER = "@cf/test/other"
HOME, ELSEWHERE = "eu-west", "us-east"


@pytest.fixture
async def home() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(pool_tokens=1024) as engine:
        yield engine


@pytest.fixture
async def elsewhere() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def service(
    tmp_path: Path, checkpoint: Path, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> AsyncIterator[Service]:
    """A gateway in one region with an engine there and one in another; a second model is served in the other alone."""
    async with ScriptedEngine() as foreign:
        file = write_deployment(
            tmp_path / "d.toml",
            model(checkpoint, replicas=[{"url": home.url}, {"url": elsewhere.url, "region": ELSEWHERE}]),
            model(checkpoint, replicas=[{"url": foreign.url, "region": ELSEWHERE}], id=OTHER),
        )
        trips = f'round_trips = [{{ between = ["{HOME}", "{ELSEWHERE}"], milliseconds = 80 }}]\n'
        file.write_text(trips + file.read_text())
        async with running_service(
            tmp_path / "home", checkpoint, home, deployment=file, region=HOME, embedding_model_id=""
        ) as running:
            await eventually(
                lambda: all(replica.known for replica in running.services.fleet.of(MODEL).replicas), what="both engines"
            )
            yield running


async def bind(service: Service, *regions: str) -> None:
    """And wait as long as it may take until it holds."""
    database = service.services.database
    await database.call(provisioning.set_regions, database, service.account_id, regions or None)

    async def holds() -> bool:
        answer = await service.send("GET", f"/console/v1/accounts/{service.account_id}/limits")
        return bool(answer.json()["regions"] == (sorted(regions) or None))

    await eventually_async(holds, what="what holds within a second where nothing else runs")


async def ask(service: Service, dialect: Dialect = CHAT, **fields: object) -> tuple[int, dict[str, str]]:
    answer = await service.post(
        dialect.path(service), dialect.body(service, **fields), headers={"x-pagegate-explain": "1"}
    )
    return answer.status, answer.headers


async def test_home_serves_until_it_is_full_and_the_other_region_then(
    service: Service, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> None:
    for _ in range(4):
        status, headers = await ask(service)
        assert status == 200
        assert f'"region":"{HOME}"' in headers["x-pagegate-decision"]
    assert (len(home.requests), len(elsewhere.requests)) == (4, 0)
    for engine in (home, elsewhere):
        engine.steer(itl_ms=1)
    answers = await asyncio.gather(*(ask(service, max_tokens=300) for _ in range(12)))
    assert {status for status, _ in answers} == {200}
    assert 1 <= len(elsewhere.requests) < 12
    metrics = (await service.send("GET", "/metrics")).body.decode()
    spilled = f'pagegate_admitted_elsewhere_total{{model="{MODEL}",region="{ELSEWHERE}"}}'
    assert f"{spilled} {len(elsewhere.requests)}.0" in metrics
    assert f'pagegate_region_round_trip_seconds{{model="{MODEL}",region="{ELSEWHERE}"}} 0.08' in metrics
    await service.oracle(rows=16)
    recorded = Counter(row["region"] for row in await service.records())
    assert recorded == {HOME: len(home.requests), ELSEWHERE: len(elsewhere.requests)}


@pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS, RUN], ids=dialect_name)
async def test_a_model_that_is_not_served_there_is_refused_with_a_code_of_its_own(
    service: Service, home: ScriptedEngine, dialect: Dialect
) -> None:
    await bind(service, "eu-north")
    answer = await service.post(dialect.path(service), dialect.body(service))
    assert answer.status == 403
    if dialect is RUN:
        assert answer.json()["errors"][0]["code"] == 5018
    else:
        assert answer.json()["error"]["code"] == "region_not_served"
    assert "eu-north" in answer.body.decode()
    assert answer.headers["x-should-retry"] == "false"
    assert not home.requests
    await service.oracle(rows=0)


async def test_a_bound_account_wakes_the_engine_of_its_region_although_one_elsewhere_is_awake(
    service: Service, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> None:
    lifecycle = service.services.lifecycle
    store, limits = lifecycle.store, service.services.settings.lifecycle.start_limits()
    awake, sleeping = Unit(MODEL, "r0"), Unit(MODEL, "r1")
    store.add([(awake, Wish.AWAKE), (sleeping, Wish.ASLEEP)])

    def starts(unit: Unit) -> None:
        """As its owner has it."""
        for event in (Begun(), Answered()):
            record = store.take(unit, "owner")
            assert record is not None
            assert store.save(record, advance(record, event, record.lease_until_ns, limits)) is not None

    def states() -> dict[str, State]:
        return {record.unit.name: record.state for record in lifecycle.waking.records(MODEL)}

    starts(awake)
    await eventually(lambda: states() == {"r0": State.READY, "r1": State.ASLEEP}, what="how the units stand")
    await bind(service, ELSEWHERE)
    asked = asyncio.create_task(ask(service))
    await eventually(lambda: store.of([sleeping])[0].wish is Wish.AWAKE, what="a wish for the one that may serve")
    starts(sleeping)
    assert (await asked)[0] == 200
    assert (len(home.requests), len(elsewhere.requests)) == (0, 1)


async def test_nothing_spills_over_for_a_bound_account_and_nobody_else_waits_for_it(
    service: Service, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> None:
    await bind(service, HOME)
    for engine in (home, elsewhere):
        engine.steer(itl_ms=1)
    answers = await asyncio.gather(*(ask(service, max_tokens=300) for _ in range(12)))
    assert {status for status, _ in answers} == {200}
    assert (len(home.requests), len(elsewhere.requests)) == (12, 0)
    assert home.peak_used_tokens <= home.pool_tokens


async def test_a_fallback_leads_nowhere_else_either(
    service: Service, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> None:
    await bind(service, HOME)
    home.steer(refuse=Refusal(500))
    answer = await service.post(CHAT.path(service), CHAT.body(service) | {"models": [OTHER]})
    assert (answer.status, answer.json()["error"]["code"]) == (403, "region_not_served")
    assert not elsewhere.requests


async def test_a_bound_account_whose_engines_are_down_is_told_when_to_come_again(
    service: Service, home: ScriptedEngine, elsewhere: ScriptedEngine
) -> None:
    await bind(service, HOME)
    await home.__aexit__()
    fleet = service.services.fleet.of(MODEL)
    await eventually(lambda: not fleet.up_in(frozenset({HOME})), within_s=10, what="an engine that is down")
    answer = await service.post(CHAT.path(service), CHAT.body(service) | {"options": {"rejectIfBusy": True}})
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "retry-after" in answer.headers
    assert fleet.up
    assert not elsewhere.requests


async def test_a_changed_binding_holds_within_a_second_and_can_be_lifted(
    service: Service, elsewhere: ScriptedEngine
) -> None:
    await bind(service, ELSEWHERE)
    assert (await ask(service))[0] == 200
    assert len(elsewhere.requests) == 1
    await bind(service)
    assert (await ask(service))[0] == 200
    assert len(elsewhere.requests) == 1
