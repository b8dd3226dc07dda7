"""Three regions on one machine: a network namespace each, with a gateway and a local engine, and the way between them.

`async with three_regions(...) as world:` needs root. Namespaces meet in a fourth one, where relays (wan.py) add the
round trips; `cut_off` takes a region's link down there. Stores are reached the same way, in the first region. Clients
have a link of their own to each gateway, which stays.
"""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from sqlalchemy.engine import make_url

from api.cli.serve import prepare
from api.settings import Settings
from tests.doubles.waiting import eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.service import price_deployed
from tests.engines import ROOT, engine_command
from tests.stores import PostgresServer, ValkeyServer

REGIONS = ("eu-west", "eu-north", "us-east")
# Between the first and the second, the first and the third, the second and the third.
ROUND_TRIPS_S = ((0.0, 0.03, 0.06), (0.03, 0.0, 0.05), (0.06, 0.05, 0.0))
POOL_TOKENS = 1024
_ENGINE_PORT, _GATEWAY_PORT, _SQL_PORT, _METERS_PORT = 31000, 8787, 5432, 6379
_START_S_MAX = 180.0
_STOP_S_MAX = 10.0


@dataclass(frozen=True)
class Region:
    """One of them, as its clients see it."""

    name: str
    url: str
    session: aiohttp.ClientSession
    api_key: str
    admin_key: str
    account_id: str

    async def ask(
        self, *, max_tokens: int = 4, stream: bool = False, prompt: str = "Hello"
    ) -> tuple[int, dict[str, Any]]:
        """The status, and why the request went where it went, with the answer's `code` where it is a refusal."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        headers = {"authorization": f"Bearer {self.api_key}", "x-pagegate-explain": "1"}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            content = await response.read()
            decision = orjson.loads(response.headers.get("x-pagegate-decision", "{}"))
            assert response.status != 200 or not stream or content.endswith(b"data: [DONE]\n\n"), content[-400:]
            if response.status != 200:
                decision["code"] = orjson.loads(content)["error"]["code"]
            return response.status, decision

    async def first_token_s(self) -> float:
        """Of a short answer that is streamed, as its client sees it."""
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {self.api_key}"}
        began = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.read()
            await response.content.readany()
            first_s = time.perf_counter() - began
            await response.read()
            return first_s

    async def drain(self, replica: str, *, draining: bool) -> None:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        url = f"{self.url}/console/v1/replicas/{replica}/drain"
        async with self.session.post(url, json={"draining": draining}, headers=headers) as response:
            assert response.status == 200, await response.read()

    async def console(self, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        async with self.session.get(f"{self.url}/console/v1{path}", headers=headers) as response:
            content = orjson.loads(await response.read())
            assert response.status == 200, content
            assert isinstance(content, dict)
            return content

    async def standings(self) -> dict[str, str]:
        """Of each region's replica, as this gateway finds it; `unknown` where it does not answer."""
        (served,) = (await self.console("/capacity"))["models"]
        return {
            replica["region"]: replica["standing"] if replica["reported"] else "unknown"
            for replica in served["replicas"]
        }

    async def metric(self, name: str) -> float:
        """The sum over its samples."""
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@dataclass(frozen=True)
class World:
    regions: tuple[Region, ...]
    network: "_Network"
    database_url: str

    def cut_off(self, number: int) -> None:
        """Nothing passes between it and the rest, and nothing is refused."""
        self.network.link(number, up=False)

    def heal(self, number: int) -> None:
        self.network.link(number, up=True)


class _Network:
    """Namespaces, links, addresses: 10.N.i.0/24 to the way, 10.N.100+i.0/24 to clients, 10.N.200.x what is served."""

    def __init__(self) -> None:
        self.net = f"10.{100 + secrets.randbelow(150)}"
        self.tag = f"pg{secrets.token_hex(2)}"
        self.way = f"{self.tag}-way"
        self.spaces = [f"{self.tag}-{number}" for number in range(len(REGIONS))]

    def make(self) -> None:
        for space in (self.way, *self.spaces):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        for number, space in enumerate(self.spaces):
            self._join(f"{self.tag}w{number}", self.way, space, f"{self.net}.{number}")
            self._join(f"{self.tag}c{number}", None, space, f"{self.net}.{100 + number}")
            _ip("-n", space, "address", "add", f"{self.served(number)}/32", "dev", "lo")
            _ip("-n", space, "route", "add", f"{self.net}.200.0/24", "via", f"{self.net}.{number}.1")
        for at in (*range(len(REGIONS)), _STORES):
            _ip("-n", self.way, "address", "add", f"{self.served(at)}/32", "dev", "lo")

    def _join(self, name: str, near: str | None, space: str, net: str) -> None:
        _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
        _ip("link", "set", f"{name}b", "netns", space)
        if near is not None:
            _ip("link", "set", f"{name}a", "netns", near)
        inside = [] if near is None else ["-n", near]
        for where, link, last in ((inside, f"{name}a", 1), (["-n", space], f"{name}b", 2)):
            _ip(*where, "address", "add", f"{net}.{last}/24", "dev", link)
            _ip(*where, "link", "set", link, "up")

    def link(self, number: int, *, up: bool) -> None:
        _ip("-n", self.way, "link", "set", f"{self.tag}w{number}a", "up" if up else "down")

    def served(self, at: int) -> str:
        """The address of a region's engine, or of the stores, from everywhere."""
        return f"{self.net}.200.{at + 1}"

    def routes(self, sql_socket: str, meters_socket: str) -> str:
        """What wan.py carries."""
        engines = [
            {
                "listen": [self.served(at), _ENGINE_PORT],
                "to": [f"{self.net}.{at}.2", _ENGINE_PORT],
                "round_trip_s": self._round_trips(at),
            }
            for at in range(len(REGIONS))
        ]
        stores = [
            {"listen": [self.served(_STORES), port], "to": path, "round_trip_s": self._round_trips(0)}
            for port, path in ((_SQL_PORT, sql_socket), (_METERS_PORT, meters_socket))
        ]
        return json.dumps([*engines, *stores])

    def _round_trips(self, to: int) -> dict[str, float]:
        return {f"{self.net}.{number}.2": ROUND_TRIPS_S[number][to] for number in range(len(REGIONS))}

    def clear(self) -> None:
        """Links go with their namespaces."""
        for space in (self.way, *self.spaces):
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


_STORES = 9


async def first_tokens_s(region: Region, own: str, rounds: int) -> tuple[list[float], list[float]]:
    """Times to the first token at home and elsewhere, in turn. own: its replica, which is drained for the latter."""
    home, elsewhere = [], []
    for _ in range(rounds):
        home.append(await region.first_token_s())
        await region.drain(own, draining=True)
        elsewhere.append(await region.first_token_s())
        await region.drain(own, draining=False)
    return home, elsewhere


@contextlib.asynccontextmanager
async def three_regions(
    tmp_path: Path, checkpoint: Path, postgres: PostgresServer, valkey: ValkeyServer, **settings: Any
) -> AsyncIterator[World]:
    """All of it ready. settings: variables of each gateway."""
    network = _Network()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(network.clear)
        network.make()
        database_url = stack.enter_context(postgres.database())
        known = _prepared(tmp_path, checkpoint, network, database_url)
        sockets = (str(postgres.folder / ".s.PGSQL.5432"), str(valkey.socket))
        stack.enter_context(_running(network.way, [sys.executable, "-m", "tests.e2e.wan", network.routes(*sockets)]))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(120))
        )
        regions = []
        for number, (name, space) in enumerate(zip(REGIONS, network.spaces, strict=True)):
            engine = engine_command(
                checkpoint, port=_ENGINE_PORT, host="0.0.0.0", kv_cache_dtype="bf16", max_total_tokens=POOL_TOKENS,
                kv_cache_bytes=None, exit_with_parent=False,
            )  # fmt: skip
            stack.enter_context(_running(space, engine, log=tmp_path / f"engine-{name}.log"))
            variables = _variables(tmp_path, network, number, database_url) | settings
            gateway = [sys.executable, "-m", "api"]
            stack.enter_context(_running(space, gateway, log=tmp_path / f"gateway-{name}.log", **variables))
            url = f"http://{network.net}.{100 + number}.2:{_GATEWAY_PORT}"
            keys = {name: known[name] for name in ("api_key", "admin_key", "account_id")}
            regions.append(Region(name, url, session, **keys))
        for region in regions:
            await eventually_async(
                lambda region=region: _sees_all(region),  # type: ignore[misc]  # the loop's value
                within_s=_START_S_MAX,
                what=f"a gateway in {region.name} that sees all engines",
            )
        yield World(tuple(regions), network, database_url)


def _prepared(tmp_path: Path, checkpoint: Path, network: _Network, database_url: str) -> dict[str, str]:
    """Data folders that know one pepper, one deployment file, and the account that all gateways serve."""
    replicas = [
        {"url": f"http://{network.served(number)}:{_ENGINE_PORT}", "region": name}
        for number, name in enumerate(REGIONS)
    ]
    file = write_deployment(tmp_path / "deployment.toml", model(checkpoint, replicas=replicas, page_tags=True))
    homes = [tmp_path / name for name in REGIONS]
    settings = Settings(home=homes[0], cache_dir=tmp_path / "cache", database_url=database_url, deployment=file)
    known = prepare(settings, base_url="http://127.0.0.1")
    assert known is not None, "the database is new"
    price_deployed(settings)
    for home in homes[1:]:
        home.mkdir()
        shutil.copy(homes[0] / "pepper", home / "pepper")
    return known


def _variables(tmp_path: Path, network: _Network, number: int, database_url: str) -> dict[str, str]:
    stores = network.served(_STORES)
    return {
        "PAGEGATE_HOME": str(tmp_path / REGIONS[number]),
        "PAGEGATE_CACHE_DIR": str(tmp_path / "cache"),
        "PAGEGATE_HOST": "0.0.0.0",
        "PAGEGATE_PORT": str(_GATEWAY_PORT),
        "PAGEGATE_REGION": REGIONS[number],
        "PAGEGATE_DEPLOYMENT": str(tmp_path / "deployment.toml"),
        "PAGEGATE_DATABASE_URL": f"postgresql+psycopg://postgres@{stores}:{_SQL_PORT}/{make_url(database_url).database}",
        "PAGEGATE_METERS_URL": f"redis://{stores}:{_METERS_PORT}",
        "PAGEGATE_PAGES_URL": f"redis://{stores}:{_METERS_PORT}",
        "PAGEGATE_TENANCY__METERS_PROCESSES": str(len(REGIONS)),
        # Between two regions an answer of the meters takes a round trip, and more on a busy machine.
        "PAGEGATE_TENANCY__METERS_TIMEOUT_S": "1",
        # As long as a slow machine takes for what a test asks of a gateway that its database is cut off from.
        "PAGEGATE_TENANCY__KEY_CACHE_STALE_S_MAX": "120",
        "PAGEGATE_LOG_FORMAT": "json",
    }


async def _sees_all(region: Region) -> bool:
    try:
        return list((await region.standings()).values()) == ["open"] * len(REGIONS)
    except (aiohttp.ClientError, TimeoutError, AssertionError):
        return False


@contextlib.contextmanager
def _running(space: str, command: list[str], *, log: Path | None = None, **variables: str) -> Iterator[None]:
    """A process in a namespace; ended at the end."""
    environment = {"PATH": os.defpath, "HOME": str(Path.home()), "OMP_WAIT_POLICY": "passive", **variables}
    with contextlib.ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            ["ip", "netns", "exec", space, *command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S_MAX)


def _ip(*words: str) -> None:
    """Fails the test with what `ip` says: it can't be shown without namespaces, and that is no reason to be silent."""
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"regions need root and network namespaces: ip {' '.join(words)}: {done.stderr.strip()}"
    )
