"""`pagegate serve` that is started while PostgreSQL is down or hangs: refusals that say so, and then a service."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tenancy.keys import KeyKind, new_key_text
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually_async
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process
from tests.stores import Away, PostgresServer

pytestmark = pytest.mark.stores

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"
AWAY = "the database does not answer"


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """To be mistreated; each test leaves it running."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def variables(engine: ScriptedEngine, own_postgres: PostgresServer) -> Iterator[dict[str, str]]:
    """Of a gateway on an empty database."""
    with own_postgres.database(migrated=False) as url:
        yield {"PAGEGATE_DATABASE_URL": url, "PAGEGATE_ENGINE__URL": engine.url}


async def _refused(session: aiohttp.ClientSession, process: ServeProcess) -> bool:
    """Whether the port answers yet; what it answers is checked."""
    account = "a" * 32
    headers = {"Authorization": f"Bearer {new_key_text(KeyKind.INFERENCE)}"}
    with contextlib.suppress(aiohttp.ClientConnectionError):
        for path in (CHAT, f"/client/v4/accounts/{account}/ai/run/{MODEL}"):
            async with session.post(process.base_url + path, json=BODY, headers=headers) as answer:
                assert answer.status == 503, "a key that can't be looked up is not a wrong key"
                assert int(answer.headers["retry-after"]) >= 1
        for path, status in (("/console/v1/invariants", 503), ("/health/live", 200), ("/health/ready", 503)):
            async with session.get(process.base_url + path, headers=headers) as answer:
                assert answer.status == status, path
        return True
    return False


async def _refused_account(session: aiohttp.ClientSession, process: ServeProcess) -> bool:
    """Whether the database was asked in vain."""
    bootstrap = process.bootstrap()
    url = f"{process.base_url}/console/v1/accounts/{bootstrap['account_id']}/wallet"
    async with session.get(url, headers={"Authorization": f"Bearer {bootstrap['admin_key']}"}) as answer:
        return answer.status == 503


async def _ready(process: ServeProcess) -> bool:
    return await asyncio.to_thread(process.is_ready)


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_it_refuses_for_now_and_serves_as_soon_as_the_database_answers(
    how: Away, tmp_path: Path, checkpoint: Path, variables: dict[str, str], own_postgres: PostgresServer
) -> None:
    with own_postgres.away(how) as come_back:
        async with aiohttp.ClientSession() as session:  # it keeps connections, as clients do
            with serve_process(tmp_path / "home", checkpoint, **variables) as process:
                await eventually_async(lambda: _refused(session, process), within_s=START_S_MAX, what="a refusal")
                come_back()
                await eventually_async(lambda: _ready(process), within_s=START_S_MAX, what="a ready service")
                known = {"Authorization": f"Bearer {process.bootstrap()['api_key']}"}
                async with session.post(process.base_url + CHAT, json=BODY, headers=known) as answer:
                    assert answer.status == 200, await answer.text()
                assert process.log.count(AWAY) == 1, "one line, however often it asks"
                if how == "hanging":
                    own_postgres.hang()
                    assert await _refused_account(session, process)
                    process.terminate()
                    assert await asyncio.to_thread(process.exit_code, START_S_MAX) == 0, "it waits for no answer"
