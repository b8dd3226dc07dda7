"""The vendors' JavaScript clients drive a running server: chat, streams, tools, JSON, embeddings, errors, leaving."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tenancy.claims import Meter
from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tenancy.provisioning import issue_key, set_quota
from tests.doubles.waiting import eventually_async
from tests.e2e.generating import EMBEDDING_MODEL, generating_engine, generating_service
from tests.e2e.service import Service
from tests.engines import LocalEngine
from tests.node_packages import node_folder

pytestmark = pytest.mark.engine

SCRIPT_S_MAX = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generating")


@pytest.fixture(scope="module")
def local_engine(folder: Path) -> Iterator[LocalEngine]:
    with generating_engine(folder) as engine:
        yield engine


@pytest.fixture
async def service(tmp_path: Path, folder: Path, local_engine: LocalEngine) -> AsyncIterator[Service]:
    async with generating_service(tmp_path / "home", folder, local_engine) as service:
        yield service


@pytest.mark.timeout(800)  # the first one installs the packages
@pytest.mark.parametrize("script", ["openai", "ai_sdk", "workers_ai"])
async def test_a_client_finds_what_it_expects(service: Service, script: str) -> None:
    packages = await asyncio.to_thread(node_folder)
    given = {
        "base_url": service.base_url,
        "account_id": service.account_id,
        "api_key": service.api_key,
        "limited_key": _limited(service),
        "model": service.model,
        "embedding_model": EMBEDDING_MODEL,
    }
    environment = {**os.environ, "PAGEGATE_GIVEN": json.dumps(given)}  # noqa: TID251  a child's, not ours
    process = await asyncio.create_subprocess_exec(
        "node",
        f"{script}.mjs",
        cwd=packages,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SCRIPT_S_MAX):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode(errors="replace")[-4000:]
    # Whoever was left in the middle has stopped, and everything is settled.
    await eventually_async(service.is_clean, within_s=10, what="a clean service")
    outcomes = {row["outcome"] for row in await service.records()}
    assert {"finished", "client_disconnected"} <= outcomes <= {"finished", "client_disconnected", "refused"}


def _limited(service: Service) -> str:
    """A key for which any request is larger than its limit."""
    database = service.services.database
    pepper = open_pepper(service.services.settings.pepper_path)
    issued = issue_key(database, pepper, service.account_id, name="limited", kind=KeyKind.INFERENCE, clock=time.time_ns)
    set_quota(database, service.account_id, Meter.TOKENS_PER_MINUTE, 1, key_id=issued.key.id)
    return issued.text
