"""Several workers on one port: limits hold across all of them, and one that dies takes nothing along."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from api.settings import Settings
from billing.ledger.payers import AccountMode
from billing.ledger.wallet import Wallets
from tenancy.claims import Meter
from tenancy.database import Database, open_database
from tenancy.provisioning import set_limits, set_quota
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import model, write_deployment
from tests.e2e.process import START_S_MAX, ServeProcess, lives, serve_process
from tests.e2e.service import price_deployed
from tests.stores import PostgresServer, ValkeyServer

pytestmark = pytest.mark.stores

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
CACHES_END_S = 1.0  # a key is believed for less than a second


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    database = open_database(url)
    yield database
    database.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with _client() as session:
        yield session


def _client() -> aiohttp.ClientSession:
    """A connection a request: any worker may take it."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


@pytest.fixture
def variables(engine: ScriptedEngine, url: str, valkey: ValkeyServer) -> dict[str, str]:
    """Of two workers in front of the scripted engine."""
    return {
        "PAGEGATE_WORKERS": "2",
        "PAGEGATE_ENGINE__URL": engine.url,
        "PAGEGATE_DATABASE_URL": url,
        "PAGEGATE_METERS_URL": valkey.url,
        "PAGEGATE_PAGES_URL": valkey.url,
        # The most that may be set, and ten times the default: who was not given a core for a while is neither in
        # trouble nor dead here.
        "PAGEGATE_TENANCY__METERS_TIMEOUT_S": "1",
        "PAGEGATE_GATEWAY__PAGES_LEASE_S": "30",
    }


def workers_of(process: ServeProcess) -> list[psutil.Process]:
    """Those that serve requests, in no order."""
    return [child for child in psutil.Process(process.pid).children() if "api.workers.worker" in child.cmdline()]


def _clients(process: ServeProcess) -> list[int]:
    """How many clients each worker serves."""
    port = int(process.base_url.rpartition(":")[2])
    return [
        sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in worker.net_connections("tcp"))
        for worker in workers_of(process)
    ]


async def ready(process: ServeProcess) -> dict[str, str]:
    await eventually_async(partial(_ready, process), within_s=START_S_MAX, what="a ready service")
    return process.bootstrap()


async def _ready(process: ServeProcess) -> bool:
    return await asyncio.to_thread(process.is_ready)


async def text(session: aiohttp.ClientSession, process: ServeProcess, path: str) -> str:
    async with session.get(process.base_url + path) as response:
        return await response.text()


def total(metrics: str, name: str) -> float:
    """Over all workers and labels."""
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE))


def _are_posted(database: Database, ended: int) -> bool:
    with database.read() as connection:
        query = "SELECT count(*) FROM usage_events WHERE outcome = 'finished'"
        return connection.exec_driver_sql(query).scalar() == ended


async def chat(
    session: aiohttp.ClientSession, process: ServeProcess, key: str, **fields: Any
) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8} | fields
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(process.base_url + "/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def statuses(
    session: aiohttp.ClientSession, processes: list[ServeProcess], key: str, count: int, **fields: Any
) -> list[int]:
    asked = (chat(session, processes[number % len(processes)], key, **fields) for number in range(count))
    return [status for status, _ in await asyncio.gather(*asked)]


@pytest.mark.load
@pytest.mark.timeout(240)
async def test_limits_hold_across_two_gateways_of_four_workers_each(
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    variables: dict[str, str],
    database: Database,
) -> None:
    settings = variables | {"PAGEGATE_WORKERS": "4", "PAGEGATE_TENANCY__METERS_PROCESSES": "8"}
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(_client())
        one = stack.enter_context(serve_process(tmp_path / "one", checkpoint, **settings))
        known = await ready(one)
        (tmp_path / "two").mkdir()
        for secret in ("pepper", "bootstrap.json"):
            shutil.copy(tmp_path / "one" / secret, tmp_path / "two" / secret)
        two = stack.enter_context(serve_process(tmp_path / "two", checkpoint, **settings))
        await ready(two)
        account, key, both = known["account_id"], known["api_key"], [one, two]

        # Ten a minute are ten.
        set_quota(database, account, Meter.REQUESTS_PER_MINUTE, 10)
        await asyncio.sleep(CACHES_END_S)
        answered = await statuses(session, both, key, 40)
        assert (answered.count(200), answered.count(429)) == (10, 30)
        set_quota(database, account, Meter.REQUESTS_PER_MINUTE, 10_000)

        # So many at once as may run are at the engine, whoever took them.
        set_limits(database, account, concurrency=4, credit_limit_nano=None)
        await asyncio.sleep(CACHES_END_S)
        engine.steer(itl_ms=20)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(engine.live))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch(), name="watch")
        answered = await statuses(session, both, key, 40)
        watching.cancel()
        assert most <= 4
        assert set(answered) == {200, 429}
        assert answered.count(200) >= 4  # not all at one moment where the engine was not given a core
        engine.steer()

        # A wallet with room for five answers five.
        set_limits(database, account, concurrency=100, credit_limit_nano=None)
        _, first = await chat(session, one, key)
        record = await asyncio.to_thread(
            one.get, f"/console/v1/accounts/{account}/requests/{first['id']}", known["admin_key"]
        )
        # What is posted later is paid as the account pays then.
        ended = 10 + answered.count(200) + 1
        await eventually(partial(_are_posted, database, ended), within_s=15, what="records of all that was answered")
        wallets = Wallets(database, clock=time.time_ns)
        wallets.set_mode(account, AccountMode.PREPAID)
        wallets.top_up(account, 5 * record["cost_nano"], idempotency_key="five")
        await asyncio.sleep(2 * CACHES_END_S)
        answered = await statuses(session, both, key, 40)
        assert (answered.count(200), answered.count(402)) == (5, 35)
        wallets.set_mode(account, AccountMode.POSTPAID)

        for process in both:
            state = await asyncio.to_thread(process.get, "/console/v1/invariants", known["admin_key"])
            assert (state["ok"], state["live_holds"], state["live_slots"]) == (True, 0, 0), state


async def test_workers_answer_for_each_other_and_one_that_is_killed_takes_nothing_along(
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    variables: dict[str, str],
    session: aiohttp.ClientSession,
) -> None:
    home = tmp_path / "home"
    with serve_process(home, checkpoint, **variables) as process:
        known = await ready(process)
        key, admin = known["api_key"], known["admin_key"]
        await eventually(lambda: "Pagegate is ready at" in process.log, what="the printed lines")

        # Whoever is asked speaks for both.
        assert await statuses(session, [process], key, 30) == [200] * 30
        metrics = await text(session, process, "/metrics")
        assert total(metrics, "pagegate_requests_total") == 30
        assert set(re.findall(r'worker="(\w+)"', metrics)) == {"1", "2", "billing", "engines"}
        health = await text(session, process, "/health/ready")
        assert '"workers":{"serving":2,"of":2}' in health

        # Streams run at both when one is killed: the other's go on, and what was open is settled when it is back.
        engine.steer(itl_ms=10)
        streams: list[asyncio.Task[bool]] = []
        while len(streams) < 4 or (0 in _clients(process) and len(streams) < 60):  # whichever worker is free takes one
            streams.append(asyncio.create_task(_stream(session, process, key), name="a stream"))
            await eventually(lambda: len(engine.live) == len(streams), what="streams that run")
        state = await asyncio.to_thread(process.get, "/console/v1/invariants", admin)
        assert state["live_holds"] == len(streams)
        victim = workers_of(process)[0]
        os.kill(victim.pid, signal.SIGKILL)
        ended = await asyncio.gather(*streams)
        assert 0 < ended.count(True) < len(streams)
        await eventually(lambda: len(workers_of(process)) == 2 and victim not in workers_of(process), within_s=30)

        async def both_serve() -> bool:
            return '"serving":2' in await text(session, process, "/health/ready")

        await eventually_async(both_serve, within_s=START_S_MAX, what="the worker that was started again")

        async def all_recorded() -> bool:
            usage = await asyncio.to_thread(
                process.get, f"/console/v1/accounts/{known['account_id']}/requests?limit=200", admin
            )
            outcomes = [row["outcome"] for row in usage["requests"]]
            return len(outcomes) == 30 + len(streams) and outcomes.count("finished") == 30 + ended.count(True)

        await eventually_async(all_recorded, within_s=10, what="a record of every request")
        state = await asyncio.to_thread(process.get, "/console/v1/invariants", admin)
        assert (state["ok"], state["live_holds"]) == (True, 0)

        # A stop lets running answers end at every worker.
        last = [asyncio.create_task(_stream(session, process, key), name=f"last {number}") for number in range(6)]
        await eventually(lambda: len(engine.live) == 6, what="streams that run")
        process.terminate()
        assert await asyncio.gather(*last) == [True] * 6
        assert await asyncio.to_thread(process.exit_code, 40) == 0


async def _stream(session: aiohttp.ClientSession, process: ServeProcess, key: str) -> bool:
    """Whether it came to its end."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "max_tokens": 400, "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    try:
        async with session.post(process.base_url + "/v1/chat/completions", json=body, headers=headers) as response:
            return (await response.read()).endswith(b"data: [DONE]\n\n")
    except aiohttp.ClientError:
        return False


async def test_a_reload_reaches_every_worker_and_no_stream_ends_for_it(
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    variables: dict[str, str],
    session: aiohttp.ClientSession,
) -> None:
    file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[engine], id=MODEL, price=MODEL))
    url = variables["PAGEGATE_DATABASE_URL"]
    folders = {"home": tmp_path, "cache_dir": tmp_path}
    price_deployed(Settings.model_validate({**folders, "database_url": url, "deployment": file}))
    deployed = {name: value for name, value in variables.items() if name != "PAGEGATE_ENGINE__URL"}
    async with contextlib.AsyncExitStack() as stack:
        second = await stack.enter_async_context(ScriptedEngine())
        process = stack.enter_context(
            serve_process(tmp_path / "home", checkpoint, **deployed, PAGEGATE_DEPLOYMENT=str(file))
        )
        known = await ready(process)
        key = known["api_key"]
        engine.steer(itl_ms=10)
        streams: list[asyncio.Task[bool]] = []
        while len(streams) < 4 or (0 in _clients(process) and len(streams) < 60):  # whichever worker is free takes one
            streams.append(asyncio.create_task(_stream(session, process, key), name="a stream"))
            await eventually(lambda: len(engine.live) == len(streams), what="streams that run")
        workers = {worker.pid for worker in workers_of(process)}
        other = "@cf/test/other"
        both = {MODEL: engine, other: second}
        write_deployment(file, *(model(checkpoint, replicas=[one], id=name, price=MODEL) for name, one in both.items()))
        process.hang_up()

        async def every_worker_serves_both() -> bool:
            answered = [chat(session, process, key, model=other, max_tokens=1) for _ in range(12)]
            return {status for status, _ in await asyncio.gather(*answered)} == {200}

        await eventually_async(every_worker_serves_both, within_s=20, what="the new model at every worker")
        assert await asyncio.gather(*streams) == [True] * len(streams)
        file.write_text("nonsense")
        process.hang_up()  # what can't be used changes nothing
        kept = "the deployment stays as it was"
        await eventually(lambda: process.log.count(kept) >= len(workers), within_s=20, what="what every worker says")
        assert await every_worker_serves_both()
        assert {worker.pid for worker in workers_of(process)} == workers


def _nobody_left(family: list[psutil.Process]) -> bool:
    return not any(lives(one) for one in family)


@pytest.mark.timeout(240)
async def test_the_next_supervisor_serves_at_once_whenever_the_last_one_was_killed(
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    variables: dict[str, str],
    session: aiohttp.ClientSession,
) -> None:
    """While answers run that may take ten minutes more, first in service and then in a drain."""
    with serve_process(tmp_path / "home", checkpoint, **variables, PAGEGATE_DRAIN_SECONDS_MAX="600") as process:
        known = await ready(process)
        key, admin = known["api_key"], known["admin_key"]
        engine.steer(itl_ms=2_000)
        for drains in (False, True):
            streams = [asyncio.create_task(_stream(session, process, key), name="a stream") for _ in range(4)]
            await eventually(lambda: len(engine.live) == 4, what="streams that run")
            if drains:
                process.terminate()

                async def takes_nothing_new() -> bool:
                    return (await chat(session, process, key, max_tokens=1))[0] == 503

                await eventually_async(takes_nothing_new, within_s=20, what="a drain")
            family = psutil.Process(process.pid).children()
            process.kill()
            process.start()
            assert await asyncio.gather(*streams) == [False] * 4
            await ready(process)
            # The last thing that it does is to end; port and spools were free before.
            await eventually(partial(_nobody_left, family), within_s=20, what="nobody left")

            async def all_recorded(count: int) -> bool:
                path = f"/console/v1/accounts/{known['account_id']}/requests?limit=200"
                usage = await asyncio.to_thread(process.get, path, admin)
                return [row["outcome"] for row in usage["requests"]].count("cancelled") == count

            await eventually_async(partial(all_recorded, 8 if drains else 4), within_s=20, what="records of all")
        state = await asyncio.to_thread(process.get, "/console/v1/invariants", admin)
        assert (state["ok"], state["live_holds"], state["live_slots"]) == (True, 0, 0), state


@pytest.mark.engine
async def test_workers_share_the_embedded_engine_and_a_killed_supervisor_leaves_nothing(
    tmp_path: Path, checkpoint: Path, variables: dict[str, str], session: aiohttp.ClientSession
) -> None:
    embedded = {name: value for name, value in variables.items() if name != "PAGEGATE_ENGINE__URL"}
    with serve_process(tmp_path / "home", checkpoint, **embedded, PAGEGATE_EMBEDDING_MODEL_ID="") as process:
        known = await ready(process)
        assert await statuses(session, [process], known["api_key"], 8, max_tokens=3) == [200] * 8
        (engine,) = process.engines()
        family = [engine, *psutil.Process(process.pid).children()]
        assert len(workers_of(process)) == 2
        process.kill()
        await eventually(partial(_nobody_left, family), within_s=20, what="nobody left")
