"""Gateways are replaced one after the other while long streams run, and beside a newer schema: nothing is lost."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import sqlalchemy as sa

from tenancy.database import open_database
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process
from tests.stores import PostgresServer, ValkeyServer

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
STREAMS = 4
# What a newer version would do to the schema: add, and nothing else.
NEXT_SCHEMA = (
    "ALTER TABLE accounts ADD COLUMN of_a_later_version INTEGER NOT NULL DEFAULT 7",
    "ALTER TABLE usage_events ADD COLUMN of_a_later_version INTEGER",
    "CREATE TABLE of_a_later_version (id INTEGER PRIMARY KEY)",
    "UPDATE alembic_version SET version_num = '9999'",
)


@pytest.fixture
def variables(engine: ScriptedEngine, postgres: PostgresServer) -> Iterator[dict[str, str]]:
    with postgres.database() as url, ValkeyServer() as valkey:
        yield {
            "PAGEGATE_ENGINE__URL": engine.url,
            "PAGEGATE_DATABASE_URL": url,
            "PAGEGATE_METERS_URL": valkey.url,
            "PAGEGATE_PAGES_URL": valkey.url,
            "PAGEGATE_DRAIN_SECONDS_MAX": "60",
            # Streams outlast what a gateway holds for them unless it renews that, while it drains as well; and who was
            # not given a core for a second is not dead.
            "PAGEGATE_TENANCY__METERS_LEASE_S": "3",
            "PAGEGATE_GATEWAY__PAGES_LEASE_S": "2.5",
        }


async def _ready(process: ServeProcess) -> bool:
    return await asyncio.to_thread(process.is_ready)


async def ready(process: ServeProcess) -> None:
    await eventually_async(partial(_ready, process), within_s=START_S_MAX, what="a ready gateway")


async def stream(session: aiohttp.ClientSession, process: ServeProcess, key: str, tokens: int) -> bool:
    """Whether it came to its end, whole."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    url = process.base_url + "/v1/chat/completions"
    async with session.post(url, json=body | {"max_tokens": tokens}, headers=headers) as response:
        return (await response.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.stores
@pytest.mark.load
async def test_gateways_are_replaced_under_long_streams_beside_a_newer_schema(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, variables: dict[str, str]
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        with ExitStack() as stack:
            one = stack.enter_context(serve_process(tmp_path / "one", checkpoint, **variables))
            await ready(one)
            (tmp_path / "two").mkdir()
            for secret in ("pepper", "bootstrap.json"):
                shutil.copy(tmp_path / "one" / secret, tmp_path / "two" / secret)
            two = stack.enter_context(serve_process(tmp_path / "two", checkpoint, **variables))
            await ready(two)
            known = one.bootstrap()
            key = known["api_key"]
            ended = 0

            # A newer gateway has upgraded the schema: those of the version before go on with it.
            database = open_database(variables["PAGEGATE_DATABASE_URL"])
            with database.write() as connection:
                for statement in NEXT_SCHEMA:
                    connection.execute(sa.text(statement))
            database.close()

            # Each is replaced while its streams run; new requests go to the other, and none fails.
            for leaving, staying in ((one, two), (two, one)):
                engine.steer(itl_ms=10)
                long = [
                    asyncio.create_task(stream(session, leaving, key, 300), name=f"long {number}")
                    for number in range(STREAMS)
                ]
                await eventually(lambda: len(engine.live) == STREAMS, what="streams that run")
                leaving.terminate()
                while not all(one_stream.done() for one_stream in long):
                    assert await stream(session, staying, key, 5)
                    ended += 1
                assert [task.result() for task in long] == [True] * STREAMS
                ended += STREAMS
                assert await asyncio.to_thread(leaving.exit_code, 30) == 0
                leaving.start()
                await ready(leaving)

            for process in (one, two):
                assert "the schema is newer" in process.log
                state = await asyncio.to_thread(process.get, "/console/v1/invariants", known["admin_key"])
                assert (state["ok"], state["live_holds"], state["live_slots"]) == (True, 0, 0), state
            path = f"/console/v1/accounts/{known['account_id']}/usage"
            usage = await asyncio.to_thread(one.get, path, known["admin_key"])
            assert usage["totals"]["requests"] == ended
