"""Two models whose engines do not fit on their machine together: who is asked for wakes, who is idle sleeps."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.lifecycle.states import State
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.deployments import model, write_deployment
from tests.e2e.dialects import CHAT, RUN
from tests.e2e.service import Service, running_service
from tests.engines import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


def sleeping(checkpoint: Path, name: str) -> dict[str, Any]:
    """On a real engine that takes most of the machine."""
    launch = {
        "program": "local",
        "python": sys.executable,
        "port": free_port(),
        "extra": ["--kv-cache-bytes", str(4 << 20), "--threads", "1"],
    }
    weights = {"checkpoint": str(checkpoint), "precision": "bf16"}
    replica = {"launch": launch, "weights": weights, "machine": "box", "memory_gib": 3}
    return model(checkpoint, id=name, replicas=[replica], serverless={"idle_seconds": 3600})


def states(service: Service) -> dict[str, State]:
    return {record.unit.model: record.state for record in service.services.lifecycle.waking.records()}


async def test_waking_one_puts_the_idle_other_to_sleep_and_a_busy_one_is_left_alone(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    file = write_deployment(tmp_path / "d.toml", sleeping(checkpoint, "one"), sleeping(checkpoint, "two"))
    file.write_text(file.read_text() + '\n[[machines]]\nname = "box"\nmemory_gib = 4\n')
    # Looked at often: one waits for memory well before the long answer of the other has ended.
    settings: dict[str, Any] = {"gateway": {"queue_wait_seconds_max": 120}, "lifecycle": {"poll_interval_s": 0.05}}
    async with running_service(tmp_path / "home", checkpoint, engine, deployment=file, **settings) as service:

        async def ask(name: str, **fields: Any) -> int:
            body = CHAT.body(service, max_tokens=2, **fields) | {"model": name}
            return (await service.post("/v1/chat/completions", body)).status

        assert await ask("one") == 200
        assert await ask("two") == 200
        assert states(service) == {"one": State.ASLEEP, "two": State.READY}
        long = CHAT.body(service, max_tokens=2000, stream=True, temperature=0) | {"model": "two"}
        async with service.open_stream("/v1/chat/completions", long) as stream:
            assert stream.status == 200
            refused = await service.post(RUN.path(service), RUN.body(service, options={"rejectIfBusy": True}))
            assert (refused.status, "retry-after" in refused.headers) == (503, True)
            await eventually(lambda: bool(waiting(service)), what="one that waits for memory")
            assert states(service) == {"one": State.ASLEEP, "two": State.READY}


def waiting(service: Service) -> bool:
    return service.services.lifecycle.waits_for_memory("one")
