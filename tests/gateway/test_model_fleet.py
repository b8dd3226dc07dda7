"""A model's replicas in service: reports, restarts, silence, and that pages, ledger and forecast agree."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.client import EngineClient
from backends.connections import open_session
from backends.engine_figures import EngineFigures
from backends.errors import EngineUnreachable
from backends.settings import BackendSettings
from backends.wire import Loads, ServerInfo
from gateway.errors import CapacityExceeded
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.settings import GatewaySettings
from gateway.want import Ended, Want

POOL_TOKENS = 10_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    async with open_session() as session:
        yield [
            Replica(f"engine-{number}", EngineClient("http://nowhere", session, BackendSettings()))
            for number in range(2)
        ]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(replicas: list[Replica], clock: Clock) -> ModelFleet:
    return ModelFleet("m", replicas, GatewaySettings(), clock=clock)


def report(
    fleet: ModelFleet,
    number: int,
    *,
    used: int = 0,
    at: float = 100.0,
    total: int = POOL_TOKENS,
    told_at: float | None = None,
    unplaced: int = 0,
) -> bool:
    replica = fleet.replicas[number]
    replica.info = ServerInfo(page_tokens=16, total_tokens=total, context_tokens=8192, kv_cache_dtype="auto", epoch="1")
    loads = Loads(total, used, 0, unplaced, 64, told_at=told_at, unplaced=unplaced)
    return fleet.reported(replica, loads, at)


def want(name: str, prompt: int = 1000, cap: int = 8000, *, choices: int = 1) -> Want:
    return Want(name, "a", "chat", prompt, choices, cap)


async def place(fleet: ModelFleet, asked: Want) -> Replica:
    replica, _ = await fleet.place(asked, wait_s=0, reject_if_busy=True)
    return replica


async def test_a_replica_without_a_report_gets_nothing(fleet: ModelFleet) -> None:
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("a"))
    assert not fleet.up


async def test_whole_pages_are_held_and_given_back_with_the_forecast(fleet: ModelFleet) -> None:
    report(fleet, 0)
    replica = await place(fleet, want("a", prompt=1000))
    gate = fleet.gate(replica)
    assert gate is not None
    assert replica.ledger.held_pages == 63  # 1,000 tokens and the first output
    assert len(gate) == 1
    replica.ledger.release("a")
    assert (replica.ledger.held_pages, len(gate)) == (0, 0)
    fleet.ended(want("a"), Ended(0, 0))
    assert fleet.placing.inside == {}


async def test_what_is_left_over_after_whole_pages_holds_nothing(fleet: ModelFleet) -> None:
    report(fleet, 0, total=10_007)
    gate = fleet.gate(fleet.replicas[0])
    assert gate is not None
    assert gate.total_tokens == 10_000


async def test_a_silent_replica_takes_nothing_new_and_comes_back_with_a_report(fleet: ModelFleet) -> None:
    report(fleet, 0)
    report(fleet, 1, used=9000)
    for _ in range(3):
        fleet.silent(fleet.replicas[0], EngineUnreachable("gone"))
    assert await place(fleet, want("a", prompt=500, cap=10)) is fleet.replicas[1]
    report(fleet, 0)
    assert not fleet.placing.sites["engine-0"].open  # one answer after trouble may be a flap
    report(fleet, 0)
    assert await place(fleet, want("b", prompt=500, cap=10)) is fleet.replicas[0]


async def test_a_region_that_was_away_comes_back_by_and_by_and_one_replica_at_once(
    fleet: ModelFleet, clock: Clock
) -> None:
    sites = fleet.placing.sites
    for number in (0, 1):
        report(fleet, number)
    fleet.suspect(fleet.replicas[0])
    for _ in range(2):
        report(fleet, 0)
    assert (sites["engine-0"].share, fleet.placing.ramping) == (1.0, False), "its neighbour was there"
    for replica in fleet.replicas:
        fleet.suspect(replica)
    for number in (0, 1):
        for _ in range(2):
            report(fleet, number)
    assert sites["engine-0"].share == sites["engine-1"].share == pytest.approx(0.1)
    assert fleet.placing.ramping
    clock.now += 10
    report(fleet, 0)
    assert (sites["engine-0"].share, fleet.placing.ramping) == (1.0, False)


async def test_an_engine_that_started_anew_holds_nothing_of_before(fleet: ModelFleet) -> None:
    report(fleet, 0)
    replica = await place(fleet, want("a"))
    fleet.restarted(replica)
    assert replica.ledger.held_pages == 0
    assert fleet.placing.inside == {}
    report(fleet, 0)
    gate = fleet.gate(replica)
    assert gate is not None
    assert len(gate) == 0
    fleet.ended(want("a"), Ended(5, 1000))  # its run ends later: harmless


async def test_a_first_token_lets_the_next_prefill_in(replicas: list[Replica], clock: Clock) -> None:
    fleet = ModelFleet("m", replicas[:1], GatewaySettings(prefill_tokens_ahead_max=1500), clock=clock)
    report(fleet, 0, total=100_000)
    await place(fleet, want("a"))
    second = asyncio.create_task(fleet.place(want("b"), wait_s=30, reject_if_busy=False))
    await asyncio.sleep(0)
    assert len(fleet.room) == 1
    fleet.progressed(want("a"), 1)
    async with asyncio.timeout(20):
        assert (await second)[0] is replicas[0]


async def test_an_answer_that_is_not_heard_makes_room_by_its_predicted_time(replicas: list[Replica]) -> None:
    settings = GatewaySettings(prefill_tokens_ahead_max=1500)
    fleet = ModelFleet("m", replicas[:1], settings, clock=asyncio.get_running_loop().time)
    report(fleet, 0, total=100_000, at=asyncio.get_running_loop().time())
    silent = Want("a", "a", "chat", 1000, 1, 100, heard=False)
    await fleet.place(silent, wait_s=0, reject_if_busy=True)
    async with asyncio.timeout(20):
        replica, _ = await fleet.place(want("b"), wait_s=30, reject_if_busy=False)
    assert replica is replicas[0]


async def test_a_client_that_leaves_in_the_moment_of_admission_takes_nothing_along(fleet: ModelFleet) -> None:
    report(fleet, 0, used=9900)
    leaving = asyncio.create_task(fleet.place(want("a", prompt=500, cap=10), wait_s=30, reject_if_busy=False))
    await asyncio.sleep(0)
    report(fleet, 0)
    assert len(fleet.placing.inside) == 1
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert fleet.placing.inside == {}
    assert fleet.replicas[0].ledger.held_pages == 0


async def test_requests_that_wait_inside_the_engine_are_counted(fleet: ModelFleet) -> None:
    report(fleet, 0, total=100_000)
    for name in "abcd":
        await place(fleet, want(name, cap=100))
    report(fleet, 0, total=100_000, unplaced=2)
    fleet.progressed(want("a"), 1)
    report(fleet, 0, total=100_000, unplaced=2)
    assert fleet.replicas[0].queue.joined == 2


async def test_drift_returns_to_zero_when_all_is_over(fleet: ModelFleet, clock: Clock) -> None:
    report(fleet, 0)
    replica = await place(fleet, want("a"))
    gate = fleet.gate(replica)
    assert gate is not None
    clock.now += 1
    report(fleet, 0, used=5000, at=clock.now)
    assert gate.drift_tokens > 3000
    fleet.ended(want("a"), Ended(10, 1000))
    clock.now += 1
    report(fleet, 0, used=0, at=clock.now)
    assert gate.drift_tokens == 0


async def test_a_replica_that_fails_again_and_again_rests_and_is_then_tried_with_one(
    fleet: ModelFleet, clock: Clock
) -> None:
    report(fleet, 0, total=100_000)
    replica = fleet.replicas[0]
    for _ in range(5):
        fleet.finished(replica, fault=True)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("a"))
    clock.now += 3
    report(fleet, 0, total=100_000, at=clock.now)
    await place(fleet, want("a"))
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("b"))
    fleet.ended(want("a"), Ended(5, 1000))
    fleet.finished(replica, fault=False)
    await place(fleet, want("b"))
    await place(fleet, want("c"))


async def test_a_draining_replica_gets_nothing_new_and_keeps_what_it_has(fleet: ModelFleet) -> None:
    report(fleet, 0, total=100_000)
    await place(fleet, want("a"))
    assert fleet.drain("engine-0", draining=True)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("b"))
    assert fleet.replicas[0].ledger.held_pages > 0
    assert fleet.drain("engine-0", draining=False)
    await place(fleet, want("b"))
    assert not fleet.drain("nobody", draining=True)


async def test_an_engine_whose_pool_is_full_and_does_not_move_gets_nothing_new(fleet: ModelFleet, clock: Clock) -> None:
    for _ in range(40):
        if fleet.replicas[0].info is None:
            report(fleet, 0, used=5000, at=clock.now)
        fleet.reported(fleet.replicas[0], Loads(POOL_TOKENS, 5000, 4, 0, 64), clock.now)
        clock.now += 1
    fleet.reported(fleet.replicas[0], Loads(POOL_TOKENS, 5000, 4, 0, 64), clock.now)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("a", cap=10))


async def test_work_of_nobody_is_found_and_its_known_ids_are_named(fleet: ModelFleet, clock: Clock) -> None:
    report(fleet, 0, total=100_000)
    replica = await place(fleet, want("a"))
    replica.ghosts.died("gone", clock.now)
    assert fleet.haunted(replica, 3).abort == ()
    clock.now += 3
    finding = fleet.haunted(replica, 3)
    assert finding.abort == ("gone",)
    assert finding.unknown == 1
    assert fleet.haunted(replica, 1).unknown == 0


async def test_retractions_are_counted_from_an_engines_figures_and_held_against_who_outgrew_the_forecast(
    fleet: ModelFleet,
) -> None:
    report(fleet, 0)
    engine = await place(fleet, want("a", prompt=1000))
    fleet.progressed(want("a"), 4000)
    for said in (EngineFigures(), EngineFigures(retractions=3), None, EngineFigures(retractions=5)):
        fleet.figured(engine, said)
        assert engine.figures == said
    assert engine.retractions == 3  # an engine says nothing before the first; what went on unread is not known
    assert fleet.placing.experience.doubt.of("a") > 0
    for retractions in (7, 0, 0):  # it starts anew
        fleet.figured(engine, EngineFigures(retractions=retractions))
    assert engine.retractions == 5


async def test_a_report_that_is_repeated_tells_nothing_new_and_what_has_left_since_is_free(
    fleet: ModelFleet, clock: Clock
) -> None:
    report(fleet, 0)
    for number in range(8):
        await place(fleet, want(f"r{number}", cap=100))
    assert report(fleet, 0, used=9_000, told_at=7.0)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("later", cap=100))
    for number in range(4):
        fleet.replicas[0].ledger.release(f"r{number}")
    clock.now += 1
    assert not report(fleet, 0, used=9_000, at=clock.now, told_at=7.0)
    assert fleet.replicas[0].snapshot is not None
    assert fleet.replicas[0].snapshot.taken_at == 100.0
    await place(fleet, want("later", cap=100))
    assert report(fleet, 0, used=9_500, at=clock.now, told_at=8.0)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("last", cap=100))


async def test_work_of_nobody_counts_however_often_its_report_is_repeated(fleet: ModelFleet, clock: Clock) -> None:
    report(fleet, 0)
    await place(fleet, want("ours", prompt=500, cap=10))
    report(fleet, 0, used=9_500, told_at=7.0)
    fleet.replicas[0].ledger.release("ours")
    for _ in range(20):
        clock.now += 1
        report(fleet, 0, used=9_500, at=clock.now, told_at=7.0)
    with pytest.raises(CapacityExceeded):
        await place(fleet, want("next", prompt=2_000, cap=10))


async def test_an_engine_that_does_not_say_when_it_reports_is_believed_each_time(fleet: ModelFleet) -> None:
    assert report(fleet, 0, used=9_000)
    assert report(fleet, 0, used=9_000)


def test_prompt_pages_that_were_given_back_are_free_before_the_engine_says_so(
    fleet: ModelFleet, replicas: list[Replica]
) -> None:
    half = replicas[0]
    half.ledger.take("early", 300, now=99.0)
    report(fleet, 0, used=16 * 400)  # others have 100 of these pages
    half.ledger.take("late", 50, now=101.0)
    assert half.free_pages == 625 - 450
    half.ledger.release("early")
    assert half.free_pages == 625 - 150
    half.ledger.release("late")
    assert half.free_pages == 625 - 100
