"""Owners and engines that are killed while memory is given up and taken back, while a unit drains, and while one that
failed rests: states agree with processes afterwards, nothing runs twice and nothing is left behind.

Each owner and each engine is a process of its own; the engines are scripted ones, by SGLang's command line. Gateways
that are killed while an engine starts and serves are in test_units_killed.py.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from gateway.lifecycle.orders import Order, give_order
from gateway.lifecycle.states import Depth, Record, StartLimits, State, Unit, Wish
from gateway.lifecycle.store import UnitStore
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database, open_database
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.process import KILLED_S_MAX, engines_among
from tests.engines import ROOT, free_port
from tests.migrated import copy_migrated

pytestmark = [pytest.mark.load, pytest.mark.timeout(240)]
# A process that starts on a busy machine takes a while.
WITHIN_S = 60.0
# In place of SGLang's interpreter: it writes down that it was started, and starts unless it is told to fail.
STAND_IN = """#!/bin/sh
echo start >> {folder}/starts
[ ! -e {folder}/broken ] || {{ echo no GPU is free; exit 3; }}
while [ "$1" != --port ]; do shift; done
exec {python} -m tests.doubles.engine --port "$2"
"""
FAST = {
    "poll_interval_s": 0.05,
    "close_seconds": 0.1,
    "start_backoff_seconds": 0.1,
    "start_failures_max": 2,
    "failed_rest_seconds": 3600,
}


@dataclass
class Site:
    """A data folder with one unit, its owners one after another, and the truth."""

    folder: Path
    settings: dict[str, Any]
    port: int
    store: UnitStore
    session: aiohttp.ClientSession
    owner: "subprocess.Popen[bytes] | None" = None

    # Owners

    def own(self) -> None:
        """A new owner comes, in place of one that was killed."""
        with (self.folder / "owner.log").open("ab") as log:
            self.owner = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.owner", json.dumps(self.settings)],
                env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )

    def end_owner(self) -> None:
        if self.owner is not None:
            self.owner.kill()
            self.owner.wait(KILLED_S_MAX)

    async def another_owner(self) -> None:
        """The one that lives is killed at once, and the next one has taken the unit."""
        fence = self.record.fence
        self.end_owner()
        self.own()
        await self.until(lambda: self.record.fence > fence, "another owner")

    # The unit

    @property
    def record(self) -> Record:
        """As the unit stands; one of nobody's before an owner has named it."""
        return next(iter(self.store.all()), Record(Unit(MODEL, "r0")))

    def stands(self, state: State) -> bool:
        return self.record.state is state

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        def so() -> bool:
            assert self.owner is not None, "there was one"
            assert self.owner.poll() is None, (self.folder / "owner.log").read_text()
            return condition()

        await eventually(so, within_s=WITHIN_S, what=what)

    async def comes_to(self, state: State, depth: Depth = Depth.STOPPED) -> None:
        await self.until(lambda: (self.record.state, self.record.depth) == (state, depth), f"a unit {state}")

    def order(self, order: Order, depth: Depth = Depth.STOPPED) -> None:
        give_order(self.store, order, MODEL, None, by=COMMAND_LINE, depth=depth)

    async def wakes(self) -> psutil.Process:
        """Ordered awake, it is; its one engine."""
        self.order(Order.WAKE)
        await self.comes_to(State.READY)
        [engine] = self.engines()
        return engine

    async def sleeps_without_memory(self) -> None:
        """Ordered to, it keeps its process alone."""
        self.order(Order.SLEEP, Depth.RELEASED)
        await self.comes_to(State.ASLEEP, Depth.RELEASED)

    async def hangs_at_its_return(self) -> None:
        """Ordered awake, it is on its way there and does not arrive."""
        await self.steer(memory_s=600)
        self.order(Order.WAKE)
        await self.is_at("returning")

    async def sleeps_with_nothing_left(self, depth: Depth = Depth.STOPPED) -> None:
        await self.comes_to(State.ASLEEP, depth)
        await self.until(lambda: not self.engines(), "no engine")
        assert (self.record.state, self.record.depth) == (State.ASLEEP, depth)

    # Its engine

    @property
    def starts(self) -> int:
        """How often anybody has started an engine."""
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def engines(self) -> list[psutil.Process]:
        """All processes on this machine that are the unit's engine, whoever started them."""
        return engines_among(psutil.process_iter(), port=self.port, program="tests.doubles.engine")

    async def steer(self, **script: Any) -> None:
        async with self.session.post(f"http://127.0.0.1:{self.port}/_script", json=script) as response:
            assert response.status == 200

    async def is_at(self, moment: str) -> None:
        """Its engine says that it is giving up, or taking back, its memory."""

        async def so() -> bool:
            async with self.session.get(f"http://127.0.0.1:{self.port}/_state") as response:
                return bool((await response.json())["memory"] == moment)

        await eventually_async(so, within_s=WITHIN_S, what=f"an engine whose memory is {moment}")

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """Something runs there that does not end."""
        await self.steer(itl_ms=50)
        body = {"model": MODEL, "input_ids": [1], "messages": [], "max_tokens": 10_000, "stream": True}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        async with self.session.post(url, json=body) as response:
            await response.content.readline()
            yield


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    copy_migrated(tmp_path / "home")
    opened = open_database(f"sqlite:///{tmp_path}/home/pagegate.db")
    yield opened
    opened.close()


@pytest.fixture
async def site(tmp_path: Path, checkpoint: Path, database: Database) -> AsyncIterator[Site]:
    stand_in, port = tmp_path / "python", free_port()
    stand_in.write_text(STAND_IN.format(python=sys.executable, folder=tmp_path))
    stand_in.chmod(0o755)
    launch = {"python": str(stand_in), "port": port, "environment": {"PYTHONPATH": str(ROOT)}}
    engine = {"launch": launch, "weights": {"checkpoint": "/weights", "precision": "bf16"}}
    file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine], serverless={"depth": "released"}))
    settings = {"home": f"{tmp_path}/home", "cache_dir": f"{tmp_path}", "deployment": f"{file}", "lifecycle": FAST}
    store = UnitStore(database, lease_s=15, clock=time.time_ns, limits=StartLimits())
    async with aiohttp.ClientSession() as session:
        found = Site(tmp_path, settings, port, store, session)
        with ExitStack() as stack:
            stack.callback(found.end_owner)
            found.own()
            await found.until(lambda: found.record.owner is not None, "an owner")
            yield found
        # Whoever kills the last owner leaves no engine behind.
        await eventually(lambda: not found.engines(), within_s=WITHIN_S, what="no engine")


async def test_owners_that_are_killed_while_memory_is_given_up_and_taken_back_leave_nothing_behind_or_twice(
    site: Site,
) -> None:
    # While the engine gives its memory up: it is asleep, and stopped.
    await site.wakes()
    await site.steer(memory_s=600)
    site.order(Order.SLEEP, Depth.RELEASED)
    await site.is_at("leaving")
    assert site.stands(State.DRAINING)
    await site.another_owner()
    await site.sleeps_with_nothing_left()

    # While it sleeps without its memory: the same, since its process went with its owner.
    await site.wakes()
    await site.sleeps_without_memory()
    assert len(site.engines()) == 1
    await site.another_owner()
    await site.sleeps_with_nothing_left()

    # While it takes its memory back: it is wished awake, and another engine starts, once.
    first = await site.wakes()
    await site.sleeps_without_memory()
    await site.hangs_at_its_return()
    assert site.stands(State.WARMING)
    await site.another_owner()
    await site.comes_to(State.READY)
    [second] = site.engines()
    assert second.pid != first.pid
    assert (site.starts, site.record.failures) == (4, 0)


async def test_engines_that_are_killed_while_they_drain_and_change_their_memory_leave_states_that_are_true(
    site: Site,
) -> None:
    # While what runs there ends: it is asleep as was wished, without blame, and is not started again.
    engine = await site.wakes()
    with suppress(aiohttp.ClientError):
        async with site.streaming():
            site.order(Order.DRAIN)
            await site.comes_to(State.DRAINING)
            engine.kill()
            await site.sleeps_with_nothing_left()
    assert (site.record.wish, site.record.failures, site.starts) == (Wish.HELD, 0, 1)

    # While it gives its memory up.
    engine = await site.wakes()
    await site.steer(memory_s=600)
    site.order(Order.SLEEP, Depth.RELEASED)
    await site.is_at("leaving")
    engine.kill()
    await site.sleeps_with_nothing_left()
    assert (site.record.failures, site.starts) == (0, 2)

    # While it sleeps without it: the next wake is a start.
    engine = await site.wakes()
    await site.sleeps_without_memory()
    engine.kill()
    await site.sleeps_with_nothing_left()
    engine = await site.wakes()

    # While it takes it back: that is a failure, said with its reason, and another one starts.
    await site.sleeps_without_memory()
    await site.hangs_at_its_return()
    engine.kill()
    await site.comes_to(State.READY)
    assert (len(site.engines()), site.starts) == (1, 5)
    assert (site.record.failures, bool(site.record.why)) == (1, True)


async def test_a_unit_that_failed_rests_on_when_its_owner_is_killed_and_starts_once_when_an_operator_says_so(
    site: Site,
) -> None:
    engine = await site.wakes()
    (site.folder / "broken").touch()
    engine.kill()
    await site.comes_to(State.FAILED)
    rests = site.record
    assert (rests.failures, "no GPU is free" in rests.why) == (2, True)
    starts = site.starts
    await site.another_owner()
    found = site.record
    assert (found.state, found.retry_at_ns, found.why) == (rests.state, rests.retry_at_ns, rests.why)
    assert (site.starts, site.engines()) == (starts, [])
    (site.folder / "broken").unlink()
    await site.wakes()
    assert site.starts == starts + 1
