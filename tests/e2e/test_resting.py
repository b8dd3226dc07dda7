"""A real engine that nobody uses goes to sleep by itself, as deep as the file says, and the next request wakes it."""

from pathlib import Path

import psutil
import pytest

from gateway.lifecycle.states import By, Depth, State
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.process import engines_among
from tests.e2e.service import running_service
from tests.e2e.test_waking import launched

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


def engines() -> set[int]:
    """The processes of local engines that this one has started, those of other tests' fixtures too."""
    return {engine.pid for engine in engines_among(psutil.Process().children(recursive=True))}


@pytest.mark.parametrize("depth", list(Depth))
async def test_an_engine_that_nobody_uses_sleeps_and_wakes_for_the_next_request(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, depth: Depth
) -> None:
    others = engines()
    file = write_deployment(tmp_path / "deployment.toml", launched(checkpoint, idle_seconds=1, depth=depth.value))
    settings = {"lifecycle": {"poll_interval_s": 0.05, "rest_interval_s": 0.2, "close_seconds": 0.2}}
    gateway = {"queue_wait_seconds_max": 150}
    async with running_service(
        tmp_path / "home", checkpoint, engine, deployment=file, gateway=gateway, **settings
    ) as service:
        store = service.services.lifecycle.store

        def asleep() -> bool:
            [record] = store.all()
            return record.state is State.ASLEEP and record.wish_by is By.IDLE

        asked = CHAT.body(service, max_tokens=4, temperature=0)
        first = await service.post(CHAT.path(service), asked)
        assert first.status == 200
        woken = engines() - others
        await eventually(asleep, within_s=60, what="an engine that sleeps")
        [record] = store.all()
        assert (record.unit.model, record.depth) == (MODEL, depth)
        assert engines() - others == (woken if depth is Depth.RELEASED else set())
        second = await service.post(CHAT.path(service), asked)
        assert second.status == 200
        assert second.json()["choices"] == first.json()["choices"]
        assert len(engines() - others) == 1
        await service.oracle(rows=2)
    assert engines() - others == set()
