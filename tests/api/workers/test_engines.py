"""The engines of several workers: those of a revision that has lost are not kept."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from api.settings import Settings
from api.workers.engines import WorkersEngines
from backends.connections import open_session
from gateway.rollouts import store
from tenancy.audit_log import COMMAND_LINE, SERVICE
from tenancy.database import open_database
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.engines import free_port
from tests.migrated import copy_migrated


@pytest.mark.load
async def test_a_unit_of_a_revision_that_was_taken_back_is_given_up(tmp_path: Path) -> None:
    weights = {"checkpoint": "/weights", "precision": "bf16"}
    replicas = [
        # Whatever is started ends at once: here it counts who is looked after.
        {"launch": {"program": "local", "python": "/bin/false", "port": free_port()}, "weights": weights, **revision}
        for revision in ({}, {"revision": "int4"})
    ]
    rollout = {"revision": "int4", "share_percent": 10}
    file = write_deployment(tmp_path / "d.toml", model(tmp_path, replicas=replicas, rollout=rollout))
    copy_migrated(tmp_path)
    settings = Settings.model_validate(
        {"home": tmp_path, "cache_dir": tmp_path, "deployment": file, "gateway": {"rollout_interval_s": 0.05}}
    )
    database, session = open_database(settings.database_url), open_session()
    store.begin(database, MODEL, new="int4", old="stable", share_bp=1_000, by=SERVICE, at_ns=1)
    engines = WorkersEngines(settings, session, database, "here")
    running = asyncio.create_task(engines.run())
    try:
        await eventually(lambda: names(engines) == ["r0", "r1"], within_s=20, what="both revisions' units")
        store.roll_back(database, MODEL, by=COMMAND_LINE, at_ns=2, why="worse")
        await eventually(lambda: names(engines) == ["r0"], within_s=20, what="the old revision's unit alone")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await session.close()
        database.close()


def names(engines: WorkersEngines) -> list[str]:
    return sorted(record.unit.name for record in engines.units.all())
