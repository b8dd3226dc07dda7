"""A supervisor of workers that is killed while its unit wakes and while it drains: the next one finds states that agree
with processes, nothing runs twice, and nothing of the dead one is left.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from api.settings import Settings
from gateway.lifecycle.orders import Order, give_order
from gateway.lifecycle.states import Record, StartLimits, State, Unit, Wish
from gateway.lifecycle.store import UnitStore
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database, open_database
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.process import START_S_MAX, ServeProcess, engines_among, lives, serve_process
from tests.e2e.service import price_deployed
from tests.engines import build_tiny_checkpoint, free_port
from tests.stores import PostgresServer, ValkeyServer

pytestmark = [pytest.mark.stores, pytest.mark.engine, pytest.mark.timeout(300)]


@dataclass
class Site:
    """A data folder, the supervisors that serve from it one after another, and the truth."""

    gateway: ServeProcess
    database: Database
    port: int

    @property
    def store(self) -> UnitStore:
        return UnitStore(self.database, lease_s=15, clock=time.time_ns, limits=StartLimits())

    @property
    def record(self) -> Record:
        """As the unit stands; one of nobody's before a supervisor has named it."""
        return next(iter(self.store.all()), Record(Unit(MODEL, "r0")))

    async def comes_to(self, state: State) -> None:
        await eventually(lambda: self.record.state is state, within_s=START_S_MAX, what=f"a unit {state}")

    def order(self, order: Order) -> None:
        give_order(self.store, order, MODEL, None, by=COMMAND_LINE)

    def engines(self) -> list[psutil.Process]:
        """All processes on this machine that are the unit's engine, whoever started them."""
        return engines_among(psutil.process_iter(), port=self.port)

    def kill_supervisor(self) -> list[psutil.Process]:
        """At once, and another one comes after it; all that the first one had started."""
        started = psutil.Process(self.gateway.pid).children(recursive=True)
        self.gateway.kill()
        self.gateway.start()
        return started

    async def is_ready(self) -> bool:
        return await asyncio.to_thread(self.gateway.is_ready)


@pytest.fixture
async def site(tmp_path: Path, postgres: PostgresServer, valkey: ValkeyServer) -> AsyncIterator[Site]:
    checkpoint, port, home = build_tiny_checkpoint(tmp_path / "tiny"), free_port(), tmp_path / "home"
    extra = ["--kv-cache-bytes", str(4 << 20), "--threads", "1"]
    launch = {"program": "local", "python": sys.executable, "port": port, "extra": extra}
    engine = {"launch": launch, "weights": {"checkpoint": str(checkpoint), "precision": "bf16"}}
    deployed = model(checkpoint, replicas=[engine], serverless={"idle_seconds": 3600})
    file = write_deployment(tmp_path / "deployment.toml", deployed)
    with postgres.database() as url:
        price_deployed(
            Settings.model_validate({"home": home, "cache_dir": tmp_path, "deployment": file, "database_url": url})
        )
        variables = {
            "PAGEGATE_WORKERS": "2",
            "PAGEGATE_DEPLOYMENT": str(file),
            "PAGEGATE_DATABASE_URL": url,
            "PAGEGATE_METERS_URL": valkey.url,
            "PAGEGATE_PAGES_URL": valkey.url,
            "PAGEGATE_DRAIN_SECONDS_MAX": "2",
        }
        database = open_database(url)
        try:
            with serve_process(home, checkpoint, **variables) as gateway:
                found = Site(gateway, database, port)
                yield found
            await eventually(lambda: not found.engines(), within_s=60, what="no engine")
        finally:
            database.close()


async def test_a_supervisor_that_is_killed_while_its_unit_wakes_and_drains_leaves_nothing_behind_or_twice(
    site: Site,
) -> None:
    await eventually(lambda: bool(site.store.all()), within_s=START_S_MAX, what="a unit that is named")
    assert site.engines() == []
    site.order(Order.WAKE)
    await eventually(lambda: len(site.engines()) == 1, within_s=START_S_MAX, what="an engine that starts")
    first = site.record
    assert first.state is State.WARMING
    dead = site.kill_supervisor()

    await eventually(lambda: site.record.fence > first.fence, within_s=START_S_MAX, what="another owner")
    await site.comes_to(State.READY)
    await eventually(lambda: not any(lives(one) for one in dead), within_s=60, what="an end of what the dead one had")
    assert len(site.engines()) == 1

    await eventually_async(site.is_ready, within_s=START_S_MAX, what="a ready gateway")
    known = site.gateway.bootstrap()
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "go on"}],
        "temperature": 0,
        "max_tokens": 1900,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {known['api_key']}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{known['base_url']}/v1/chat/completions", json=asked, headers=headers) as response,
    ):
        assert response.status == 200
        await response.content.readline()
        site.order(Order.DRAIN)
        await site.comes_to(State.DRAINING)
        dead = site.kill_supervisor()
    await site.comes_to(State.ASLEEP)
    await eventually(lambda: not any(lives(one) for one in dead), within_s=60, what="an end of what the dead one had")
    assert site.engines() == []
    assert site.record.wish is Wish.HELD
