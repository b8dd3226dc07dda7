"""A spool that an orphaned worker has still is waited for."""

import asyncio
from pathlib import Path

import pytest

from api import recording
from api.recording import open_spool
from api.settings import Settings
from billing.spool import Spool, SpoolInUse


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"home": tmp_path, "cache_dir": tmp_path})


async def test_a_spool_is_taken_once_whoever_had_it_has_left(settings: Settings) -> None:
    orphans = Spool(settings.spool_dir(2))
    owner = orphans.owner
    opening = asyncio.create_task(open_spool(settings, 2), name="open")
    await asyncio.sleep(0)
    assert not opening.done()
    orphans.close()
    async with asyncio.timeout(10):
        spool = await opening
    assert spool.owner == owner
    spool.close()


async def test_one_that_is_never_left_is_said_to_be_in_use(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_LEAVES_S_MAX", 0.0)
    orphans = Spool(settings.spool_dir(2))
    with pytest.raises(SpoolInUse):
        await open_spool(settings, 2)
    orphans.close()
