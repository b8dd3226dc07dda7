"""Placing by the forecast: prior, learning, shares, release, and the hints a refused client gets."""

import pytest

from backends.client import EngineClient
from backends.connections import open_session
from backends.settings import BackendSettings
from backends.wire import ServerInfo
from gateway.fleet import Ended, ModelFleet, Replica, Snapshot, Want
from gateway.settings import GatewaySettings
from gateway.waiting_room import Ahead

POOL_TOKENS = 10_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def replicas() -> list[Replica]:
    async with open_session() as session:
        return [
            Replica(f"engine-{number}", EngineClient("http://nowhere", session, BackendSettings()))
            for number in range(2)
        ]


def report(replica: Replica, *, used: int = 0, at: float = 100.0, total: int = POOL_TOKENS) -> None:
    replica.info = ServerInfo(page_tokens=1, total_tokens=total, context_tokens=8192, kv_cache_dtype="auto", epoch=None)
    replica.snapshot = Snapshot(at, total, used, 0, 0, 64)


def want(name: str, prompt: int = 1000, cap: int = 8000, tenant: str = "a", choices: int = 1) -> Want:
    return Want(name, tenant, "chat", prompt, choices, cap)


def make_fleet(replicas: list[Replica], clock: Clock | None = None) -> ModelFleet:
    return ModelFleet("m", replicas, GatewaySettings(), clock=clock or Clock())


async def place(fleet: ModelFleet, asked: Want) -> Replica:
    return await fleet.room.place(asked.request_id, asked, wait_s=0, reject_if_busy=True, turn=fleet.turn(asked))


def fill(fleet: ModelFleet, *, produced: int | None = None) -> int:
    """How many requests of 1,000 tokens enter. produced: what requests have turned out to produce before."""
    for number in range(300 if produced else 0):
        learned = want(f"before{number}")
        assert fleet._try_place(learned.request_id, learned) is not None
        for replica in fleet.replicas:
            replica.ledger.release(learned.request_id)
        fleet.ended(learned, Ended(produced or 0, 1000, 0.1, 0.01))
    return next(number for number in range(100) if fleet._try_place(f"r{number}", want(f"r{number}")) is None)


async def test_without_history_the_prompt_and_the_outputs_held_ahead_must_fit(replicas: list[Replica]) -> None:
    report(replicas[0])
    assert fill(make_fleet(replicas[:1])) == 4  # of 1,000 + 1,024 each


async def test_short_answers_make_room_for_more_and_long_ones_for_fewer(replicas: list[Replica]) -> None:
    report(replicas[0])
    report(replicas[1])
    short, long = make_fleet(replicas[:1]), make_fleet(replicas[1:])
    assert fill(short, produced=20) >= 8
    assert fill(long, produced=4000) <= 2


async def test_a_replica_without_a_report_gets_nothing(replicas: list[Replica]) -> None:
    assert make_fleet(replicas)._try_place("a", want("a")) is None


async def test_the_replica_with_the_most_room_is_taken(replicas: list[Replica]) -> None:
    report(replicas[0], used=6000)
    report(replicas[1], used=2000)
    fleet = make_fleet(replicas)
    assert fleet._try_place("a", want("a")) is replicas[1]


async def test_work_that_only_the_engine_knows_of_counts(replicas: list[Replica]) -> None:
    report(replicas[0], used=9500)
    fleet = make_fleet(replicas[:1])
    assert fleet._try_place("a", want("a", prompt=600, cap=10)) is None
    assert fleet._try_place("b", want("b", prompt=400, cap=10)) is replicas[0]


async def test_what_is_given_back_leaves_ledger_and_forecast(replicas: list[Replica]) -> None:
    report(replicas[0])
    fleet = make_fleet(replicas[:1])
    before = fill(fleet)
    for number in range(before):
        fleet.release(replicas[0], f"r{number}")
        fleet.ended(want(f"r{number}"), Ended(0, 0, None, None))
    gate = replicas[0].ledger.gate
    assert gate is not None
    assert len(gate) == 0
    assert replicas[0].ledger.held_pages == 0
    assert fleet._charged == {}
    assert fill(fleet) == before


async def test_all_choices_must_fit(replicas: list[Replica]) -> None:
    report(replicas[0])
    fleet = make_fleet(replicas[:1])
    fleet._try_place("small", want("small", prompt=100, cap=10))
    assert fleet._try_place("many", want("many", choices=5)) is None
    assert fleet._try_place("few", want("few", choices=3)) is replicas[0]


async def test_an_engine_that_comes_back_with_another_pool_gets_a_new_forecast(replicas: list[Replica]) -> None:
    report(replicas[0])
    fleet = make_fleet(replicas[:1])
    assert fill(fleet) == 4
    report(replicas[0], total=5 * POOL_TOKENS)
    assert fleet._try_place("new", want("new")) is replicas[0]
    replicas[0].ledger.release("r0")  # of the old pool: harmless


async def test_tenants_are_charged_and_corrected_by_what_they_took(replicas: list[Replica]) -> None:
    report(replicas[0])
    fleet = make_fleet(replicas[:1])
    await place(fleet, want("a1", tenant="a"))
    charged = fleet.room._queue.counter("a", 0)
    assert charged > 0
    fleet.ended(want("a1", tenant="a"), Ended(4000, 1000, 0.1, 0.02))
    assert fleet.room._queue.counter("a", 0) > charged


@pytest.fixture
def hints(replicas: list[Replica]) -> ModelFleet:
    report(replicas[0])
    return make_fleet(replicas[:1])


async def test_a_hint_is_in_whole_seconds_between_one_and_the_most(hints: ModelFleet) -> None:
    for entries in (0, 3, 10_000):
        assert 1 <= hints.retry_after_s(want("a"), Ahead("a", entries, 0.0)) <= 60


async def test_a_hint_follows_what_waits_have_been(hints: ModelFleet) -> None:
    for _ in range(400):
        hints.room.forecast.observe(1.0, 4.0)
    assert 4 <= hints.retry_after_s(want("a"), Ahead("a", 5, 1.0)) <= 6
    assert hints.retry_after_s(want("a"), Ahead("a", 50, 5.0)) >= 20


async def test_a_hint_says_when_running_requests_make_room(replicas: list[Replica]) -> None:
    report(replicas[0])
    fleet = make_fleet(replicas[:1])
    fill(fleet, produced=1500)
    hint = fleet.retry_after_s(want("late", prompt=6000), Ahead("a", 0, 0.0))
    assert 8 <= hint <= 60  # 1,500 tokens at about 10 ms
