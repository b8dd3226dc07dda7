"""Memory that the engine's process gives up and takes back, over HTTP: what falls, what is refused, what survives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import aiohttp
import psutil
import pytest

from backends.client import EngineClient
from backends.connections import open_session
from backends.errors import EngineRefused
from backends.settings import BackendSettings
from tests.backends.local.test_server import ENDLESS, PROMPT, Client
from tests.engines import LocalEngine, build_tiny_checkpoint, start_local_engine

pytestmark = pytest.mark.engine

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
MIB = 1 << 20
LONG = list(range(3, 300)) * 3


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """Some 60 MiB of weights, which the process can be seen to have and not to have."""
    folder = tmp_path_factory.mktemp("release") / "model"
    build_tiny_checkpoint(folder, hidden_size=768, intermediate_size=2048, head_dim=64, num_attention_heads=12)
    with start_local_engine(folder, kv_cache_bytes=16 * MIB) as engine:
        yield engine


@pytest.fixture
async def client(process: LocalEngine) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(process.url, session)


@contextlib.asynccontextmanager
async def gateway_s(url: str) -> AsyncIterator[EngineClient]:
    """The client that the gateway has."""
    async with open_session() as session:
        yield EngineClient(url, session, BackendSettings())


async def test_memory_falls_and_nothing_of_the_old_pool_comes_back(process: LocalEngine, client: Client) -> None:
    resident = psutil.Process(process.process.pid).memory_info
    said = await client.text(input_ids=LONG, max_tokens=8)
    before, held = await client.get("/server_info"), resident().rss
    weight_bytes = (await client.load())["memory"]["weight_gb"] * 1024 * MIB

    assert (await client.post(RELEASE))[0] == 200
    assert resident().rss < held - 0.9 * weight_bytes
    load, info = await client.load(), await client.get("/server_info")
    assert (load["max_total_num_tokens"], load["token_usage"], load["memory"]["weight_gb"]) == (0, 0, 0)
    assert (info["max_total_num_tokens"], info["memory_released"]) == (0, True)
    async with client.session.get(client.url + "/metrics") as metrics:
        assert 'sglang:max_total_num_tokens{model_name="model"} 0.0' in await metrics.text()
    for path in ("/health", "/model_info", "/v1/models"):
        async with client.session.get(client.url + path) as response:
            assert response.status == 200

    assert (await client.post(RESUME))[0] == 200
    after = await client.get("/server_info")
    assert after["max_total_num_tokens"] == before["max_total_num_tokens"]
    assert after["epoch"] not in {before["epoch"], ""}
    assert set(after["start_seconds"]) == {"kernels", "weights", "pool", "warm_up", "total"}
    answer = await client.ask(input_ids=LONG, max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == said
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_request_meanwhile_is_told_so_and_so_is_who_asks_for_readiness(client: Client) -> None:
    await client.post(RELEASE)
    try:
        status, answer = await client.post("/v1/completions", prompt=PROMPT)
        assert (status, answer["message"]) == (
            503,
            "The engine has given up its memory, and has not been told to take it back.",
        )
        async with client.session.get(client.url + "/ready") as response:
            assert response.status == 503
    finally:
        await client.post(RESUME)
    assert (await client.get("/ready"))["status"] == "ready"


async def test_nothing_is_given_up_while_a_request_runs(process: LocalEngine, client: Client) -> None:
    async with gateway_s(process.url) as gateway, client.stream(max_tokens=ENDLESS, ignore_eos=True) as events:
        await anext(events)
        with pytest.raises(EngineRefused) as refused:
            await gateway.release(within_s=10)
        assert refused.value.status == 409
        assert b"choices" in await anext(events)
    await client.wait_for(num_running_reqs=0, num_waiting_reqs=0)


async def test_orders_that_are_repeated_or_come_at_once_do_no_harm(process: LocalEngine, client: Client) -> None:
    async with gateway_s(process.url) as gateway:
        await gateway.resume(within_s=10)
        await asyncio.gather(*(gateway.release(within_s=10) for _ in range(5)))
        await asyncio.gather(*(gateway.resume(within_s=30) for _ in range(5)))
        await gateway.ready()
    assert await client.ask(max_tokens=2)


async def test_weights_and_pages_go_together(client: Client) -> None:
    status, answer = await client.post(RELEASE, tags=["weights"])
    assert status == 400
    assert "weights and kv_cache are released and resumed together" in answer["message"]
    assert (await client.post(RELEASE, tags=["kv_cache", "weights"]))[0] == 200
    assert (await client.post(RESUME, tags=[]))[0] == 200
