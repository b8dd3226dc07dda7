"""Fixtures of the end-to-end tests: a checkpoint's tokenizer, a scripted engine, a gateway in front of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real tokenizer and chat template; its weights are never read here."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("e2e") / "tiny")


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with running_service(tmp_path / "home", checkpoint, engine) as service:
        yield service
