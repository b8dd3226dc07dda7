"""A running gateway for a test: uvicorn on a free port, the scripted engine behind it, and eyes on both.

`running_service` starts it. A `Service` sends requests in any dialect, reads the usage records, and judges with
`oracle` that nothing was left behind.
"""

import asyncio
import contextlib
import io
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from yarl import URL

from api.app import create_app
from api.cli.serve import prepare
from api.services import Services
from api.settings import Settings
from api.wiring import open_services
from backends.topology import read_deployment
from billing.price_book import seed_default_price
from tenancy.database import open_database
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import write_deployment
from tests.migrated import copy_migrated

# For what is done in a second or two where nothing else runs.
START_S_MAX = 60.0
STOP_S_MAX = 30.0
SETTLE_S_MAX = 20.0
# What uvicorn does now and then, such as the header `date`, it does at every tick.
_TICK_S = 0.1
_LEAVE_S_MAX = 2.0  # until a client's connection is cut that has not ended


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        answer = orjson.loads(self.body)
        assert isinstance(answer, dict)
        return answer

    def events(self) -> list[bytes]:
        return payloads(self.body)


def _sent(body: bytes | dict[str, Any] | None) -> io.BytesIO | None:
    """The standard library writes what orjson refuses, such as integers of more than 64 bits."""
    if body is None:
        return None
    return io.BytesIO(json.dumps(body).encode() if isinstance(body, dict) else body)


def payloads(stream: bytes) -> list[bytes]:
    """The data of each server-sent event; comments are left out, everything else must be data."""
    events = stream.split(b"\n\n")
    assert events[-1] == b"", "every event ends with a blank line"
    found = []
    for event in events[:-1]:
        if not event.startswith(b":"):
            assert event.startswith(b"data: "), event
            found.append(event.removeprefix(b"data: "))
    return found


@dataclass(frozen=True)
class Service:
    """The gateway under test and what a client, an operator and an engine's owner know of it."""

    base_url: str
    account_id: str
    api_key: str
    admin_key: str
    model: str
    engine: ScriptedEngine
    services: Services
    session: aiohttp.ClientSession

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        *,
        key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One exchange, read to its end. key: the account's inference key unless said otherwise."""
        async with self.session.request(
            method,
            URL(self.base_url + path, encoded=True),
            data=_sent(body),
            headers=self.authorization(key) | {"content-type": "application/json"} | (headers or {}),
        ) as response:
            lower = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, lower, await response.read())

    async def post(self, path: str, body: bytes | dict[str, Any], **options: Any) -> Answer:
        return await self.send("POST", path, body, **options)

    @contextlib.asynccontextmanager
    async def open_stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A running answer; leaving the context closes the socket, as a client that goes away does."""
        response = await self.session.post(
            self.base_url + path, data=orjson.dumps(body), headers=self.authorization(None)
        )
        try:
            yield response
        finally:
            response.close()

    def authorization(self, key: str | None) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key if key is None else key}"}

    async def console(self, path: str) -> dict[str, Any]:
        answer = await self.send("GET", "/console/v1" + path, key=self.admin_key)
        assert answer.status == 200, answer.body
        return answer.json()

    async def record(self, request_id: str) -> dict[str, Any]:
        """The usage record of one request."""
        return await self.console(f"/accounts/{self.account_id}/requests/{request_id}")

    async def records(self) -> list[dict[str, Any]]:
        """The newest usage records of the account, newest first."""
        answer = await self.console(f"/accounts/{self.account_id}/requests?limit=200")
        rows = answer["requests"]
        assert isinstance(rows, list)
        return rows

    async def oracle(self, *, rows: int) -> None:
        """Nothing is left behind: no hold, slot, money or stream, no violation, and `rows` usage records in all."""
        await eventually_async(self.is_clean, within_s=SETTLE_S_MAX, what="a clean service")
        found = await self.records()
        assert len(found) == rows, [(row["id"], row["outcome"]) for row in found]
        assert len({row["id"] for row in found}) == rows

    async def is_clean(self) -> bool:
        """Is nothing held and nothing running?"""
        state = await self.console("/invariants")
        assert state["violations"] == []
        held = [state[name] for name in ("live_holds", "live_slots", "held_nano", "kv_pages_held")]
        return not any(held) and not self.engine.live


@contextlib.asynccontextmanager
async def running_service(
    home: Path, checkpoint: Path, engine: ScriptedEngine, *, backends: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Service]:
    """A gateway in front of the engine, or of what the setting `deployment` names; settings add to the defaults."""
    engine_settings: dict[str, Any] = {"connect_timeout_s": 2.0}
    if "deployment" not in settings:
        engine_settings |= {"url": engine.url, "checkpoint": checkpoint}
    engine_settings |= backends or {}
    merged: dict[str, Any] = {"home": home, "cache_dir": home / "cache", "engine": engine_settings} | settings
    chosen = Settings(**merged)
    if chosen.database_url.startswith("sqlite"):
        copy_migrated(home)
    prepare(chosen, base_url="http://127.0.0.1")
    price_deployed(chosen)
    async with (
        open_services(chosen) as services,
        _listening(services) as base_url,
        aiohttp.ClientSession(connector=_unlimited()) as session,
    ):
        bootstrap = json.loads((home / "bootstrap.json").read_text())
        service = Service(
            base_url=base_url,
            account_id=bootstrap["account_id"],
            api_key=bootstrap["api_key"],
            admin_key=bootstrap["admin_key"],
            model=services.catalogue.all()[0].id,
            engine=engine,
            services=services,
            session=session,
        )
        await eventually_async(lambda: _is_ready(service), within_s=START_S_MAX, what="a ready gateway")
        yield service


@contextlib.asynccontextmanager
async def deployed_service(
    folder: Path, checkpoint: Path, engine: ScriptedEngine, *models: dict[str, Any], **settings: Any
) -> AsyncIterator[Service]:
    """A gateway of a deployment of these models; the deployment's file and the gateway's home lie in the folder."""
    file = write_deployment(folder / "deployment.toml", *models)
    async with running_service(folder / "home", checkpoint, engine, deployment=file, **settings) as service:
        yield service


def price_deployed(settings: Settings) -> None:
    """As an operator does who deploys a model: gives each price of the file, in the database, some figures."""
    if settings.deployment is None:
        return
    database = open_database(settings.database_url)
    try:
        for model in read_deployment(settings.deployment).models:
            seed_default_price(
                database,
                model.price,
                input_nano_per_m=10_000_000,
                cached_input_nano_per_m=2_500_000,
                output_nano_per_m=40_000_000,
                now_ns=time.time_ns(),
            )
    finally:
        database.close()


def _unlimited() -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(limit=0, force_close=True)


async def _is_ready(service: Service) -> bool:
    return (await service.send("GET", "/health/ready")).status == 200


@contextlib.asynccontextmanager
async def _listening(services: Services) -> AsyncIterator[str]:
    """uvicorn in this process, in a task of its own; the URL that it listens on."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(services),
        log_config=None,
        access_log=False,
        lifespan="off",
        http="httptools",
        ws="none",
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
    try:
        await eventually_async(lambda: _started(server, serving), within_s=START_S_MAX, what="a listening gateway")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stop()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await serving
        finally:
            listener.close()


class _Server(uvicorn.Server):
    """uvicorn, but it stops as soon as nothing keeps it: by itself it looks every tenth of a second whether it is to,
    and waits as long again. Hundreds of tests end one.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that still run are given a while, as by uvicorn itself."""
        state = self.server_state
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await eventually(lambda: not (state.connections or state.tasks), within_s=_LEAVE_S_MAX)
        except AssertionError:
            for task in list(state.tasks):
                task.cancel()


async def _started(server: uvicorn.Server, serving: asyncio.Task[None]) -> bool:
    if serving.done():
        serving.result()
    return server.started
