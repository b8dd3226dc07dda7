"""The double does what its script says; that it speaks SGLang's surface is tests/backends/test_engine_contract.py."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually_async

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [], "input_ids": [1, 2, 3], "max_tokens": 4, "rid": "r" * 36} | fields


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def read(session: aiohttp.ClientSession, engine: ScriptedEngine, **fields: Any) -> bytes:
    async with session.post(engine.url + CHAT, json=body(**fields)) as response:
        return await response.read()


@pytest.mark.load
async def test_cutting_changes_how_bytes_arrive_and_not_which(
    engine: ScriptedEngine, session: aiohttp.ClientSession
) -> None:
    engine.steer(text="北🙂", cut=tuple(range(2000)))
    whole = await read(session, engine, stream=True)
    assert whole == bytes(engine.sent["r" * 36])
    assert whole.count("北🙂".encode()) == 4


async def test_dying_drops_the_connection_after_so_many_tokens(
    engine: ScriptedEngine, session: aiohttp.ClientSession
) -> None:
    engine.steer(die_after=2)
    with pytest.raises(aiohttp.ClientPayloadError):
        await read(session, engine, stream=True)
    assert engine.produced == {"r" * 36: 2}
    assert b"w1 " in engine.sent["r" * 36]


async def test_dying_before_the_first_token_answers_nothing(
    engine: ScriptedEngine, session: aiohttp.ClientSession
) -> None:
    engine.steer(die_after=0)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await read(session, engine)


async def test_an_error_inside_a_stream_is_an_event(engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
    engine.steer(error_after=2)
    events = (await read(session, engine, stream=True)).split(b"\n\n")
    assert "error" in orjson.loads(events[-3].removeprefix(b"data: "))


async def test_a_refusal_is_given_word_for_word(engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
    engine.steer(refuse=Refusal(503, b'{"message":"The request queue is full."}', {"x-inner": "1"}))
    async with session.post(engine.url + CHAT, json=body()) as response:
        assert response.status == 503
        assert response.headers["x-inner"] == "1"


async def test_usage_and_its_absence_are_scripted(engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
    engine.steer(usage={"cached_tokens": 2})
    assert orjson.loads(await read(session, engine))["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    engine.steer(no_usage=True)
    assert "usage" not in orjson.loads(await read(session, engine))


async def test_stale_loads_keep_their_first_time_stamp(engine: ScriptedEngine, session: aiohttp.ClientSession) -> None:
    async def stamp() -> float:
        async with session.get(engine.url + "/v1/loads") as response:
            return float(orjson.loads(await response.read())["loads"][0]["timestamp"])

    engine.steer(loads="stale")
    assert await stamp() == await stamp()
    engine.steer()
    assert await stamp() < await stamp()


async def test_it_runs_as_a_process_of_its_own_steered_over_http(
    unused_tcp_port: int, session: aiohttp.ClientSession
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.doubles.engine", "--port", str(unused_tcp_port)
    )

    async def is_up() -> bool:
        try:
            async with session.get(url + "/ready") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    try:
        await eventually_async(is_up, within_s=20, what="a ready double")
        async with session.post(url + "/_script", json={"text": "hi ", "tokens": 2}) as response:
            assert response.status == 200
        async with session.post(url + CHAT, json=body()) as response:
            assert orjson.loads(await response.read())["choices"][0]["message"]["content"] == "hi hi "
        async with session.get(url + "/_state") as response:
            assert orjson.loads(await response.read())["produced"] == {"r" * 36: 2}
    finally:
        process.terminate()
        await process.wait()
