"""Gateways and engines that are killed at every point of waking and sleeping: afterwards states agree with processes,
nothing runs twice and nothing is left behind.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from api.settings import Settings
from gateway.lifecycle.orders import Order, give_order
from gateway.lifecycle.states import Record, StartLimits, State, Unit, Wish
from gateway.lifecycle.store import UnitStore
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import open_database
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.process import START_S_MAX, ServeProcess, engines_among, serve_process
from tests.e2e.service import price_deployed
from tests.engines import build_tiny_checkpoint, free_port
from tests.migrated import copy_migrated

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "go on"}], "temperature": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@dataclass
class Site:
    """A data folder with one model that may sleep, the gateways that serve from it one after another, and the truth."""

    home: Path
    file: Path
    port: int
    session: aiohttp.ClientSession
    gateway: ServeProcess

    def engines(self) -> list[psutil.Process]:
        """All processes on this machine that are the unit's engine, whoever started them."""
        return engines_among(psutil.process_iter(), port=self.port)

    @contextlib.contextmanager
    def store(self) -> Iterator[UnitStore]:
        database = open_database(f"sqlite:///{self.home}/pagegate.db")
        try:
            yield UnitStore(database, lease_s=15, clock=time.time_ns, limits=StartLimits())
        finally:
            database.close()

    @property
    def record(self) -> Record:
        """As the unit stands; one of nobody's before a gateway has named it."""
        with self.store() as store:
            return next(iter(store.all()), Record(Unit(MODEL, "r0")))

    def order(self, order: Order) -> None:
        with self.store() as store:
            give_order(store, order, MODEL, None, by=COMMAND_LINE)

    async def comes_to(self, state: State) -> None:
        await eventually(lambda: self.record.state is state, within_s=START_S_MAX, what=f"a unit {state}")

    async def serves(self) -> dict[str, str]:
        await eventually(self.gateway.is_ready, within_s=START_S_MAX, what="a ready gateway")
        return self.gateway.bootstrap()

    @contextlib.asynccontextmanager
    async def asking(self, **fields: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        base = await self.serves()
        headers = {"Authorization": f"Bearer {base['api_key']}"}
        url = base["base_url"] + "/v1/chat/completions"
        async with self.session.post(url, json=CHAT | fields, headers=headers) as response:
            yield response

    async def ask(self, **fields: Any) -> int:
        async with self.asking(max_tokens=2, **fields) as response:
            await response.read()
            return response.status

    def kill_gateway(self) -> None:
        """At once; another one comes after it, and nothing of how it starts is missed by waiting for it."""
        self.gateway.kill()
        self.gateway.start()


@pytest.fixture
async def site(tmp_path: Path, checkpoint: Path, session: aiohttp.ClientSession) -> AsyncIterator[Site]:
    port = free_port()
    extra = ["--kv-cache-bytes", str(4 << 20), "--threads", "1"]
    launch = {"program": "local", "python": sys.executable, "port": port, "extra": extra}
    engine = {"launch": launch, "weights": {"checkpoint": str(checkpoint), "precision": "bf16"}}
    deployed = model(checkpoint, replicas=[engine], serverless={"idle_seconds": 3600})
    file, home = write_deployment(tmp_path / "deployment.toml", deployed), tmp_path / "home"
    copy_migrated(home)
    price_deployed(Settings.model_validate({"home": home, "cache_dir": tmp_path, "deployment": file}))
    with serve_process(home, checkpoint, PAGEGATE_DEPLOYMENT=str(file)) as gateway:
        found = Site(home, file, port, session, gateway)
        await found.serves()
        yield found
    # Whoever stops the gateway leaves no engine behind.
    await eventually(lambda: not found.engines(), within_s=60, what="no engine")


async def test_whoever_is_killed_while_a_unit_wakes_serves_or_drains_states_agree_with_processes_afterwards(
    site: Site,
) -> None:
    await site.comes_to(State.ASLEEP)
    assert site.engines() == []

    # The engine, while it warms: the request that waits is served by its next life.
    asking = asyncio.create_task(site.ask())
    await eventually(lambda: len(site.engines()) == 1, within_s=START_S_MAX, what="an engine that starts")
    site.engines()[0].kill()
    assert await asking == 200
    assert len(site.engines()) == 1
    first = site.record
    assert (first.state, first.failures) == (State.READY, 1)
    assert "was killed by signal 9" in first.why

    # The gateway, while it is ready, and its successor while the unit warms: the engine leaves, and one other starts.
    site.kill_gateway()
    await site.comes_to(State.WARMING)
    assert site.record.fence > first.fence, "another owner"
    site.kill_gateway()
    assert await site.ask() == 200
    assert len(site.engines()) == 1
    assert site.record.state is State.READY

    # The gateway, while the unit drains: it sleeps, as was wished, and nobody but an operator wakes it.
    async with site.asking(max_tokens=1900, stream=True) as response:
        await response.content.readline()
        site.order(Order.DRAIN)
        await site.comes_to(State.DRAINING)
        site.kill_gateway()
    await site.comes_to(State.ASLEEP)
    await eventually(lambda: not site.engines(), within_s=60, what="no engine")
    assert await site.ask() == 503
    assert site.record.wish is Wish.HELD
    site.order(Order.WAKE)
    await site.comes_to(State.READY)
    assert await site.ask() == 200
    assert len(site.engines()) == 1
