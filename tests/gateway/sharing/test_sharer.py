"""Gateways that share one engine's pages: never more than there are, nothing lost to the dead, a share when alone."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from backends.client import EngineClient
from backends.connections import open_session
from backends.settings import BackendSettings
from backends.wire import Loads, ServerInfo
from gateway.door import Refusal
from gateway.errors import CapacityExceeded
from gateway.fleet import Fleet
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.settings import GatewaySettings
from gateway.sharing.board import BoardAway, Claim, Grant, Report
from gateway.sharing.process import ProcessBoard
from gateway.sharing.sharer import Sharer
from gateway.want import Ended, Want

POOL = 10_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Away(ProcessBoard):
    """A board that can be out of reach."""

    away = False

    async def claim(self, claim: Claim) -> Grant:
        if self.away:
            raise BoardAway("gone")
        return await super().claim(claim)


class Gateway:
    """One process as far as pages go."""

    def __init__(
        self, name: str, board: ProcessBoard, client: EngineClient, clock: Clock, *, processes: int = 4
    ) -> None:
        self.replica = Replica("engine-0", client)
        self.replica.info = ServerInfo(16, POOL, 8192, "auto", "1")
        settings = GatewaySettings()
        self.fleet = ModelFleet("m", [self.replica], settings, shared=True, clock=clock)
        self.polls = Fleet([self.fleet], settings)
        self.sharer = Sharer(
            self.polls, lambda model: board, process=name, processes=processes, lease_s=3.0, clock=clock
        )
        self.clock = clock
        self.report()

    def report(self, used: int = 0) -> None:
        self.fleet.reported(self.replica, Loads(POOL, used, 0, 0, 1024), self.clock.now)

    def answer(self, used: int) -> None:
        """The engine answers a poll."""
        self.report(used)
        assert self.polls.polling.on_report is not None
        self.polls.polling.on_report(self.fleet, self.replica, Loads(POOL, used, 0, 0, 1024), self.clock.now)

    def unknown(self, *, running: int) -> int:
        """Requests of nobody, if so many run for longer than an engine needs to settle."""
        self.fleet.haunted(self.replica, running)
        self.clock.now += 3
        return self.fleet.haunted(self.replica, running).unknown

    async def share(self) -> None:
        await self.sharer.share(self.fleet)

    async def place(self, name: str, prompt: int = 500) -> bool:
        """Enters at once or not at all; asks for more when it is refused, as the running loop does."""
        want = Want(name, "a", "chat", prompt, 1, 10)
        for _ in range(3):
            try:
                await self.fleet.place(want, wait_s=0, reject_if_busy=True)
            except CapacityExceeded:
                await self.share()
            else:
                return True
        return False

    def ask_for_more(self) -> None:
        gate = self.fleet.gate(self.replica)
        assert gate is not None
        gate.short_of = POOL

    def turned_away(self, name: str, prompt: int) -> bool:
        want = Want(name, "a", "chat", prompt, 1, 10)
        return isinstance(self.fleet.door.arrive(want, self.clock.now, wait_s=0), Refusal)

    @property
    def granted(self) -> float:
        gate = self.fleet.gate(self.replica)
        assert gate is not None
        return gate.granted_tokens

    @property
    def peak(self) -> float:
        gate = self.fleet.gate(self.replica)
        assert gate is not None
        return gate.peak()


def is_away(gateway: Gateway) -> bool:
    """As a call: the type checker does not expect it to change."""
    return gateway.sharer.away


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with open_session() as session:
        yield EngineClient("http://127.0.0.1:1", session, BackendSettings(connect_timeout_s=0.1))


async def test_nothing_is_planned_with_before_it_is_granted(client: EngineClient) -> None:
    gateway = Gateway("a", ProcessBoard(), client, Clock())
    with pytest.raises(CapacityExceeded):
        await gateway.fleet.place(Want("x", "a", "chat", 100, 1, 10), wait_s=0, reject_if_busy=True)
    await gateway.share()
    assert await gateway.place("y", 100)


async def test_four_gateways_never_plan_with_more_than_the_pool_and_use_nearly_all_of_it(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    gateways = [Gateway(name, board, client, clock) for name in "abcd"]
    entered = 0
    for number in range(40):
        entered += await gateways[number % 4].place(f"r{number}")
        assert sum(gateway.granted for gateway in gateways) <= POOL
        assert sum(gateway.peak for gateway in gateways) <= POOL
    assert entered >= 14  # of 18 that would fit one gateway


async def test_what_one_gives_back_another_gets(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    first, second = Gateway("a", board, client, clock), Gateway("b", board, client, clock)
    inside = [name for name in (f"r{number}" for number in range(40)) if await first.place(name)]
    assert not await second.place("late", 2000)
    for name in inside[:8]:
        first.replica.ledger.release(name)
        first.fleet.ended(Want(name, "a", "chat", 500, 1, 10), Ended(5, 500))
    await first.share()
    assert await second.place("late again", 2000)


async def test_who_has_nothing_inside_keeps_no_more_than_what_it_claims_ahead(client: EngineClient) -> None:
    gateway = Gateway("a", ProcessBoard(), client, Clock())
    assert await gateway.place("x", 500)
    gateway.replica.ledger.release("x")
    gateway.fleet.ended(Want("x", "a", "chat", 500, 1, 10), Ended(5, 500))
    await gateway.share()
    assert 0 < gateway.granted <= POOL / 32 + 1


async def test_what_somebody_lacked_who_does_not_wait_is_asked_for_once(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    one, other = Gateway("a", board, client, clock), Gateway("b", board, client, clock)
    assert await one.place("one", 1000)
    assert await other.place("other", 3000)
    assert one.turned_away("too much", 6500)
    await one.share()
    await one.share()
    assert one.granted < 2000
    assert await other.place("other again", 4000)


async def test_many_idle_gateways_leave_nearly_all_to_the_one_that_is_busy(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    gateways = [Gateway(f"g{number}", board, client, clock, processes=64) for number in range(64)]
    for gateway in gateways:
        await gateway.share()
    assert await gateways[0].place("large", POOL * 4 // 5)


async def test_who_needs_the_whole_pool_gets_what_idle_gateways_keep(client: EngineClient) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    gateways = [Gateway(name, board, client, clock) for name in "abcd"]
    for gateway in gateways:
        await gateway.share()
    all_of_it = Want("all", "a", "chat", POOL - 100, 1, 5000)
    waiting = asyncio.create_task(gateways[0].fleet.place(all_of_it, wait_s=30, reject_if_busy=False), name="all")
    try:
        async with asyncio.timeout(10):
            while not waiting.done():
                for gateway in gateways:
                    await gateway.share()
                    await asyncio.sleep(0)
                clock.now += 0.5
    finally:
        waiting.cancel()
    assert waiting.result()[0] is gateways[0].replica
    assert sum(gateway.granted for gateway in gateways) <= POOL


async def test_a_gateway_with_a_long_queue_gives_way_to_the_account_that_was_served_less_elsewhere(
    client: EngineClient,
) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    busy, other = Gateway("busy", board, client, clock), Gateway("other", board, client, clock)

    def comes(gateway: Gateway, want: Want) -> "asyncio.Task[object]":
        return asyncio.create_task(gateway.fleet.place(want, wait_s=1000, reject_if_busy=False), name=want.request_id)

    many = [Want(f"r{number}", "greedy", "chat", 500, 1, 10) for number in range(60)]
    waiting = [comes(busy, want) for want in many]
    late = None
    for _ in range(60):
        for gateway in (other, busy):
            await gateway.share()
            await asyncio.sleep(0)
        clock.now += 0.1
        inside = [want for want in many if want.request_id in busy.fleet.placing.inside]
        for want in inside:
            busy.fleet.progressed(want, 1)
        if len(inside) < 17 and late is None:
            continue  # it does not have all yet
        late = late or comes(other, Want("late", "modest", "chat", 500, 1, 10))
        if late.done():
            break
        busy.replica.ledger.release(inside[0].request_id)
        busy.fleet.ended(inside[0], Ended(5, 500))
    assert late is not None
    assert late.done()
    assert len(busy.fleet.room) > 20  # it had not come to the end of its own queue
    assert busy.granted + other.granted <= POOL
    for _ in range(3):
        clock.now += 1.0
        for gateway in (other, busy):
            await gateway.share()
    assert busy.granted > POOL * 4 / 5  # nobody is hungrier any more
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_dead_gateways_pages_come_back_within_its_lease_and_a_living_ones_stay(client: EngineClient) -> None:
    clock = Clock()
    board = ProcessBoard(lease_s=3.0, clock=clock)
    dead, living = Gateway("dead", board, client, clock), Gateway("living", board, client, clock)
    assert await dead.place("lost", 6000)
    assert await living.place("stream", 1000)
    assert not await living.place("next", 5000)
    for _ in range(600):  # ten minutes of one stream
        clock.now += 1.0
        await living.share()
        assert living.granted >= 1000
    assert len(living.fleet.placing.inside) == 1
    assert await living.place("next again", 5000)


async def test_an_engine_that_starts_anew_voids_everybodys_claims(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    first, second = Gateway("a", board, client, clock), Gateway("b", board, client, clock)
    assert await first.place("old", 9000)
    for gateway in (second, first):
        gateway.fleet.restarted(gateway.replica)
        gateway.replica.info = ServerInfo(16, POOL, 8192, "auto", "2")
    await board.restarted("engine-0", "1", "2")
    for gateway in (second, first):
        gateway.report()
    assert await second.place("new", 8000)
    assert not await first.place("too much", 8000)


async def test_without_a_board_grants_stand_for_a_lease_and_then_each_goes_by_its_share(client: EngineClient) -> None:
    clock = Clock()
    board = Away(clock=clock)
    gateway = Gateway("a", board, client, clock)
    assert await gateway.place("large", 6000)
    board.away = True
    gateway.fleet.gate(gateway.replica).short_of = 9000  # type: ignore[union-attr]  # it was granted something
    await gateway.share()
    assert gateway.granted >= 6000
    clock.now += 4
    await gateway.share()
    assert is_away(gateway)
    assert 6000 <= gateway.granted < 6100  # what is inside goes on, and nothing new enters
    gateway.replica.ledger.release("large")
    gateway.fleet.ended(Want("large", "a", "chat", 6000, 1, 10), Ended(5, 6000))
    await gateway.share()
    assert gateway.granted == POOL // 4
    board.away = False
    await gateway.share()
    assert not is_away(gateway)
    assert await gateway.place("large again", 6000)


async def test_what_one_gateway_served_an_account_counts_at_the_other(client: EngineClient) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    first, second = Gateway("a", board, client, clock), Gateway("b", board, client, clock)
    assert await first.place("one", 500)
    assert await second.place("two", 500)
    for _ in range(3):
        clock.now += 1.1
        for gateway in (first, second):
            await gateway.share()
    before = second.fleet.door.queue.counter("a", 0)
    assert await first.place("three", 3000)
    for _ in range(2):
        clock.now += 1.1
        for gateway in (first, second):
            gateway.fleet.door.queue._charges.setdefault("a", 0.0)
            await gateway.share()
    assert second.fleet.door.queue.counter("a", 0) > before


class Slow(ProcessBoard):
    """A board whose answer to one claim is held back, with what happens meanwhile."""

    meanwhile: Callable[[], object] | None = None

    async def claim(self, claim: Claim) -> Grant:
        grant = await super().claim(claim)
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return grant


async def test_who_is_refused_while_a_claim_is_under_way_is_heard_by_the_next_one(client: EngineClient) -> None:
    board = Slow()
    gateway = Gateway("a", board, client, Clock())
    await gateway.share()
    gate = gateway.fleet.gate(gateway.replica)
    assert gate is not None
    gate.granted_tokens = 0.0
    refused = []
    board.meanwhile = lambda: refused.append(gateway.turned_away("x", 5000))
    await gateway.share()
    assert refused == [True]
    assert gate.short_of >= 5000
    await gateway.share()
    assert gateway.granted >= 5000


async def test_who_waits_is_let_in_when_more_is_granted(client: EngineClient) -> None:
    board, clock = ProcessBoard(), Clock()
    gateway = Gateway("a", board, client, clock)
    running = asyncio.create_task(gateway.sharer.run(), name="sharer")
    try:
        waiting = asyncio.create_task(
            gateway.fleet.place(Want("x", "a", "chat", 5000, 1, 10), wait_s=20, reject_if_busy=False), name="a request"
        )
        async with asyncio.timeout(10):
            replica, _ = await waiting
        assert replica is gateway.replica
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def told(one: Gateway, other: Gateway) -> None:
    """What the first has told, the other hears: as the running loops do."""
    await one.sharer.tell()
    await other.sharer.hear(other.fleet)


async def test_what_one_is_told_by_an_engine_the_others_hear_as_old_as_it_is(client: EngineClient) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    one, other = Gateway("one", board, client, clock), Gateway("other", board, client, clock)
    for gateway in (one, other):
        await gateway.share()
    clock.now += 5
    one.answer(used=1600)
    clock.now += 0.5
    await told(one, other)
    assert other.replica.snapshot is not None
    assert (other.replica.snapshot.used_pages, other.replica.snapshot.taken_at) == (100, 105.0)
    assert other.sharer.reports_heard == 1
    await told(one, other)  # nothing is newer
    assert other.sharer.reports_heard == 1


async def test_a_model_may_come_while_a_report_is_under_way(client: EngineClient) -> None:
    clock = Clock()
    under_way, there = asyncio.Event(), asyncio.Event()

    class Far(ProcessBoard):
        async def report(self, report: Report) -> None:
            under_way.set()
            await there.wait()
            await super().report(report)

    one = Gateway("one", Far(clock=clock), client, clock)
    await one.share()
    one.answer(used=1600)
    telling = asyncio.create_task(one.sharer.tell(), name="tell")
    await under_way.wait()
    await one.sharer.share(ModelFleet("new", [], GatewaySettings(), shared=True, clock=clock))
    there.set()
    await telling


async def test_who_is_not_to_ask_for_all_tells_nothing(client: EngineClient) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    one, other = Gateway("one", board, client, clock), Gateway("other", board, client, clock)
    for gateway in (one, other):
        await gateway.share()
    clock.now += 5
    other.answer(used=1600)
    await told(other, one)
    assert one.sharer.reports_heard == 0


async def test_a_report_of_another_epoch_or_of_an_engine_that_does_not_answer_here_is_not_believed(
    client: EngineClient,
) -> None:
    clock = Clock()
    board = ProcessBoard(clock=clock)
    one, other = Gateway("one", board, client, clock), Gateway("other", board, client, clock)
    for gateway in (one, other):
        await gateway.share()
    clock.now += 1
    one.replica.info = ServerInfo(16, POOL, 8192, "auto", "2")
    one.answer(used=1600)
    await told(one, other)
    assert other.sharer.reports_heard == 0
    one.replica.info = ServerInfo(16, POOL, 8192, "auto", "1")
    one.answer(used=1600)
    other.fleet.suspect(other.replica)
    await told(one, other)
    assert other.replica.snapshot is None


async def test_requests_of_other_gateways_are_no_ghosts_and_without_a_board_nobody_is_blamed(
    client: EngineClient,
) -> None:
    clock = Clock()
    board = Away(clock=clock)
    one, other = Gateway("one", board, client, clock), Gateway("other", board, client, clock)
    assert one.unknown(running=3) == 0  # it has not been told yet what others have
    for gateway in (one, other):
        await gateway.share()
    assert await one.place("a")
    assert await other.place("b")
    clock.now += 3
    for gateway in (other, one):
        await gateway.share()
    assert one.unknown(running=2) == 0
    assert one.unknown(running=3) == 1
    board.away = True
    clock.now += 3
    one.ask_for_more()
    await one.share()
    assert is_away(one)
    assert one.unknown(running=3) == 0
