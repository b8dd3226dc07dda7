"""Whatever dies and whenever, each line ends once, is charged once at most, and is never run again once it was.

The runner and its tables are real; the engine, the usage records and the deaths are of a small world. A death ends the
process's tasks wherever they are and writes nothing; the next life ends what was begun, as the durable record does.
"""

import asyncio
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.openai.batch_input import BatchInput
from billing.errors import UsageNotFound
from billing.store import UsageEvent
from billing.usage import TokenUsage
from gateway.batches.batch import ENDED, Batch, BatchState, Line
from gateway.batches.files import FileStore
from gateway.batches.form import Answered, Cut, Fruitless, Keep, Later, LineEnd
from gateway.batches.line_rows import Undone
from gateway.batches.runner import BatchRunner, RunnerParts
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tenancy.database import _THREADS as _DATABASE_THREADS
from tenancy.database import Database, open_database
from tests.doubles.waiting import eventually, eventually_async
from tests.examples import examples, time_for
from tests.gateway.batches.made import order

ACCOUNT, OTHER = "a" * 32, "b" * 32
TOKENS = 4


@dataclass
class World:
    """What outlives a process, besides its database: the durable record, and what engines were asked.

    fate: what becomes of the next attempts, in order: "busy", "fails", "fails late", "cut", or the step before which
    the process dies: "begin", "produce", "keep", "record", "end". open: attempts without an end, and their tokens by
    now.
    """

    fate: list[str] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    events: dict[str, SimpleNamespace] = field(default_factory=dict)
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    died: asyncio.Event = field(default_factory=asyncio.Event)
    most_at_once: Counter[str] = field(default_factory=Counter)
    at_once: Counter[str] = field(default_factory=Counter)
    room: bool = True
    says: bytes = b"said"
    asked: int = 0
    held: asyncio.Event | None = None

    def has_room(self, _model: str) -> bool:
        self.asked += 1
        return self.room

    async def die(self, step: str, fate: str) -> None:
        if step == fate:
            self.died.set()
            await asyncio.Event().wait()

    def record(self, request_id: str, tokens: int, *, charged: bool) -> None:
        assert request_id not in self.events, "a request has one record"
        self.events[request_id] = SimpleNamespace(
            prompt_tokens=tokens and 3,
            cached_tokens=0,
            completion_tokens=tokens,
            reasoning_tokens=0,
            cost_nano=10 * tokens if charged else 0,
            charged=charged,
        )
        self.open.pop(request_id, None)

    async def recover(self) -> None:
        """As the durable record does when a process starts again."""
        for request_id, tokens in list(self.open.items()):
            self.record(request_id, tokens, charged=True)

    def event(self, _account_id: str, request_id: str) -> UsageEvent:
        if request_id not in self.events:
            raise UsageNotFound("There is no such request.")
        return cast("UsageEvent", self.events[request_id])

    # The form of its lines

    async def run(self, batch: Batch, line: Line, keep: Keep, begun: Callable[[], None]) -> LineEnd:
        fate = self.fate.pop(0) if self.fate else ""
        await self.die("begin", fate)
        if fate == "busy":
            return Later(0.0, account_alone=False)
        self.lines[line.request_id] = (batch.id, line.number)
        self.begun.append(line.request_id)
        self.open[line.request_id] = 0
        self.at_once[batch.account_id] += 1
        self.most_at_once[batch.account_id] = max(self.most_at_once[batch.account_id], self.at_once[batch.account_id])
        begun()
        try:
            return await self._produce(line, keep, fate)
        finally:
            self.at_once[batch.account_id] -= 1

    async def _produce(self, line: Line, keep: Keep, fate: str) -> LineEnd:
        if self.held is not None:
            await self.held.wait()
        await self.die("produce", fate)
        if fate == "fails":
            self.record(line.request_id, 0, charged=False)
            return Fruitless(b"failed", 0.0)
        self.open[line.request_id] = TOKENS
        await self.die("keep", fate)
        if fate == "fails late":
            self.record(line.request_id, TOKENS, charged=False)
            return Answered(b"failed late", good=False, usage=TokenUsage())
        if fate == "cut":
            self.record(line.request_id, TOKENS, charged=False)
            return Cut()
        await keep(self.says)
        await self.die("record", fate)
        self.record(line.request_id, TOKENS, charged=True)
        await self.die("end", fate)
        return Answered(self.says, good=True, usage=TokenUsage(3, 0, TOKENS))

    def unrun(self, _batch: Batch, line: Undone) -> bytes:
        return line.state.value.encode()

    def lost(self, _batch: Batch, _line: Line) -> bytes:
        return b"lost"


@asynccontextmanager
async def life(
    world: World, store: BatchStore, database: Database, owner: str = "me", files: FileStore | None = None
) -> AsyncIterator[BatchRunner]:
    """One process, until the block ends."""
    await world.recover()
    world.died.clear()
    world.at_once.clear()
    runner = BatchRunner(
        RunnerParts(
            database=database,
            store=store,
            files=cast("FileStore", files),
            forms=lambda _batch: world,
            reader=BatchInput,
            settings=BatchSettings(at_once_max=3),
            owner=owner,
            room=world.has_room,
            recorded=_nothing,
            event=world.event,
        )
    )
    running = asyncio.create_task(runner.run(), name="runner")
    try:
        yield runner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        # Threads die with a process: here, what the database was doing ends before the next life.
        together = threading.Barrier(_DATABASE_THREADS)
        await asyncio.gather(*(database.call(together.wait, 10) for _ in range(_DATABASE_THREADS)))


async def _nothing() -> None:
    """Everything is in SQL already."""


def opened(folder: Path, migrated_file: Path) -> tuple[Database, BatchStore]:
    shutil.copy(migrated_file, folder / "pagegate.db")
    database = open_database(f"sqlite:///{folder}/pagegate.db")
    return database, BatchStore(database, BatchSettings(), clock=time.time_ns, told=lambda *_: None)


async def over(store: BatchStore, batch: Batch, world: World, *, within_s: float = 20) -> bool:
    """True at the batch's end, False if the process died before it."""

    async def ended_or_dead() -> bool:
        return world.died.is_set() or store.get(batch.account_id, batch.id).state in ENDED

    await eventually_async(ended_or_dead, within_s=within_s, what="the end of the batch, or of the process")
    return not world.died.is_set()


FATES = st.sampled_from(["", "busy", "fails", "fails late", "cut", "begin", "produce", "keep", "record", "end"])


@pytest.mark.load
@pytest.mark.timeout(time_for(300))  # half a minute on a quiet machine: each life has an end to wait for
@settings(max_examples=examples(15))
@given(fate=st.lists(FATES, max_size=14), lines=st.integers(1, 6))
def test_each_line_ends_once_and_is_charged_once_whatever_dies(
    migrated_file: Path, fate: list[str], lines: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database, store = opened(Path(folder), migrated_file)
        try:
            asyncio.run(_live_through(database, store, World(list(fate)), lines))
        finally:
            database.close()


async def _live_through(database: Database, store: BatchStore, world: World, lines: int) -> None:
    batch = store.create(ACCOUNT, order(lines))
    for _ in range(16):
        async with life(world, store, database):
            if await over(store, batch, world):
                break
    found = store.get(ACCOUNT, batch.id)
    assert found.state is BatchState.COMPLETED
    assert found.succeeded + found.failed == lines
    said = Counter(store.answers(ACCOUNT, batch.id)[0])
    assert sum(said.values()) == lines
    assert said[b"said"] == found.succeeded
    assert store.left_running("me") == []
    attempts: dict[tuple[str, int], list[SimpleNamespace]] = {}
    for request_id in world.begun:
        attempts.setdefault(world.lines[request_id], []).append(world.events[request_id])
    for of_line in attempts.values():
        assert sum(event.cost_nano > 0 for event in of_line) <= 1, "charged once"
        assert all(event.cost_nano == 0 for event in of_line[:-1]), "never run again once it was charged"
    charged = sum(event.cost_nano > 0 for event in world.events.values())
    assert charged >= found.succeeded, "nothing is given away"
    assert len(world.begun) == len(set(world.begun)), "an attempt has an id of its own"


@pytest.fixture
async def database(migrated_file: Path, tmp_path: Path) -> AsyncIterator[Database]:
    shutil.copy(migrated_file, tmp_path / "pagegate.db")
    database = open_database(f"sqlite:///{tmp_path}/pagegate.db")
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> BatchStore:
    return BatchStore(database, BatchSettings(), clock=time.time_ns, told=lambda *_: None)


async def test_a_line_is_given_up_after_three_engines_that_failed_it(database: Database, store: BatchStore) -> None:
    world = World(["fails"] * 9)
    batch = store.create(ACCOUNT, order(1))
    async with life(world, store, database):
        assert await over(store, batch, world)
    assert len(world.begun) == 3
    assert store.answers(ACCOUNT, batch.id)[0] == [b"failed"]
    assert store.get(ACCOUNT, batch.id).failed == 1


async def test_a_line_that_is_cut_off_runs_again_and_ends_as_lost_the_third_time(
    database: Database, store: BatchStore
) -> None:
    world = World(["cut"] * 2)
    two = [store.create(ACCOUNT, order(1)), store.create(ACCOUNT, order(1))]
    async with life(world, store, database):
        assert await over(store, two[0], world)
        assert await over(store, two[1], world)
    assert {store.answers(ACCOUNT, batch.id)[0][0] for batch in two} == {b"said"}
    assert sum(event.cost_nano > 0 for event in world.events.values()) == 2
    world = World(["cut"] * 9)
    batch = store.create(ACCOUNT, order(1))
    async with life(world, store, database):
        assert await over(store, batch, world)
    assert store.answers(ACCOUNT, batch.id)[0] == [b"lost"]
    assert len(world.begun) == 3


async def test_nothing_begins_while_there_is_no_room(database: Database, store: BatchStore) -> None:
    world = World(room=False)
    batch = store.create(ACCOUNT, order(2))
    async with life(world, store, database) as runner:
        await eventually(lambda: runner.figures.undone == 2, what="a look at the batch")
        assert world.begun == []
        world.room = True
        runner.wake()
        assert await over(store, batch, world)
    assert len(world.begun) == 2


async def test_lines_for_whose_answers_there_is_no_room_end_unrun(database: Database) -> None:
    bounds = BatchSettings(account_batch_bytes_max=1_024)
    store = BatchStore(database, bounds, clock=time.time_ns, told=lambda *_: None)
    world = World()
    large, small = (store.create(ACCOUNT, order(lines, body=b"x" * 20)) for lines in (40, 1))
    other = store.create(OTHER, order(3))
    world.says = b"said" * 100
    async with life(world, store, database):
        for batch in (large, small, other):
            assert await over(store, batch, world)
    found = store.get(ACCOUNT, large.id)
    assert (found.state, found.succeeded + found.failed) == (BatchState.COMPLETED, 40)
    assert 1 <= found.succeeded <= 5
    assert sum(batch_id == large.id for batch_id, _ in world.lines.values()) == found.succeeded
    assert store.get(OTHER, other.id).succeeded == 3
    assert sum(event.cost_nano > 0 for event in world.events.values()) == len(world.begun)


async def test_sql_is_not_asked_again_and_again_while_batches_wait_for_room(
    database: Database, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.runner._ROOM_S", 0.005)
    looks, look = Counter[str](), store.open_batches

    def looked() -> list[Batch]:
        looks["open"] += 1
        return look()

    monkeypatch.setattr(store, "open_batches", looked)
    world = World(room=False)
    batch = store.create(ACCOUNT, order(2))
    async with life(world, store, database):
        await eventually(lambda: world.asked >= 20, what="many looks for room")
        assert looks["open"] == 1
        world.room = True
        assert await over(store, batch, world)


async def test_a_batch_whose_lines_have_all_ended_is_over_although_there_is_no_room(
    database: Database, store: BatchStore
) -> None:
    world = World(held=asyncio.Event())
    batch = store.create(ACCOUNT, order(2))
    async with life(world, store, database) as runner:
        await eventually(lambda: runner.figures.running == 2, what="both lines running")
        world.room = False
        assert world.held is not None
        world.held.set()
        assert await over(store, batch, world)


async def test_a_file_that_is_deleted_while_it_is_read_is_no_shorter_batch(
    database: Database, store: BatchStore
) -> None:
    files = FileStore(database, clock=time.time_ns, account_bytes_max=1 << 30)
    line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n'
    file = files.begin(ACCOUNT, "a", "batch", 2 * len(line), 3_600)
    files.add_part(file.id, 0, line)  # the second one went
    files.finish(ACCOUNT, file.id)
    batch = store.create(ACCOUNT, replace(order(0), lines=None, input_file_id=file.id))
    world = World()
    async with life(world, store, database, files=files):
        assert await over(store, batch, world)
    found = store.get(ACCOUNT, batch.id)
    assert (found.state, found.errors[0]["code"]) == (BatchState.FAILED, "invalid_input_file")
    assert world.begun == []


async def test_accounts_run_side_by_side_however_many_lines_one_has(database: Database, store: BatchStore) -> None:
    world = World(held=asyncio.Event())
    large = store.create(ACCOUNT, order(30))
    async with life(world, store, database) as runner:
        await eventually(lambda: runner.figures.running == 3, what="all places taken")
        small = store.create(OTHER, order(2))
        runner.wake()  # as the route does that makes one
        assert world.held is not None
        world.held.set()
        assert await over(store, small, world)
        assert await over(store, large, world)
    begun = [world.lines[request_id][0] for request_id in world.begun]
    # Of the 32 lines those of the small one were among the next to begin once it was there.
    assert max(at for at, batch_id in enumerate(begun) if batch_id == small.id) < 12


async def test_two_processes_share_the_batches_and_run_each_line_once(database: Database, store: BatchStore) -> None:
    world = World()
    made = [store.create(ACCOUNT, order(10)) for _ in range(3)]
    async with life(world, store, database, "one"), life(world, store, database, "two"):
        for batch in made:
            assert await over(store, batch, world)
    assert len(world.begun) == 30
    assert Counter(world.lines.values()).most_common(1)[0][1] == 1


@pytest.mark.load
async def test_a_bug_in_a_line_ends_that_line_and_nothing_else(
    database: Database, store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    run = world.run

    async def broken(batch: Batch, line: Line, keep: Keep, begun: Callable[[], None]) -> LineEnd:
        if line.number == 1:
            raise RuntimeError("a bug")
        return await run(batch, line, keep, begun)

    monkeypatch.setattr(world, "run", broken)
    batch = store.create(ACCOUNT, order(3))
    async with life(world, store, database):
        assert await over(store, batch, world)
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said", b"lost", b"said"]
    assert store.left_running("me") == []
