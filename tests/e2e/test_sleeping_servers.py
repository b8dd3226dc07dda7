"""SGLang's processes of a model that may sleep: `serve` itself starts them when a request comes, and stops them again.

In SGLang's place runs a scripted engine, by SGLang's own command line.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.lifecycle.states import By, State
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.process import engines_among
from tests.e2e.service import running_service
from tests.engines import ROOT, free_port

# In place of SGLang's interpreter: it takes the port from SGLang's flags.
STAND_IN = """#!/bin/sh
while [ "$1" != --port ]; do shift; done
exec {python} -m tests.doubles.engine --port "$2"
"""


def launched(folder: Path, checkpoint: Path, **serverless: Any) -> dict[str, Any]:
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    launch = {"python": str(stand_in), "port": free_port(), "environment": {"PYTHONPATH": str(ROOT)}}
    engine = {"launch": launch, "weights": {"checkpoint": str(checkpoint), "precision": "bf16"}}
    return model(checkpoint, replicas=[engine], serverless=serverless)


def servers() -> list[psutil.Process]:
    """Those that this process has started."""
    return engines_among(psutil.Process().children(recursive=True), program="tests.doubles.engine")


@pytest.mark.load
async def test_a_launched_server_wakes_once_for_all_who_ask_sleeps_when_nobody_does_and_wakes_again(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    file = write_deployment(tmp_path / "deployment.toml", launched(tmp_path, checkpoint, idle_seconds=1))
    lifecycle = {"poll_interval_s": 0.05, "rest_interval_s": 0.2, "close_seconds": 0.2}
    gateway = {"queue_wait_seconds_max": 100}
    async with running_service(
        tmp_path / "home", checkpoint, engine, deployment=file, lifecycle=lifecycle, gateway=gateway
    ) as service:
        store = service.services.lifecycle.store

        async def ask() -> int:
            return (await service.post(CHAT.path(service), CHAT.body(service, max_tokens=2))).status

        def asleep() -> bool:
            [record] = store.all()
            return record.state is State.ASLEEP and record.wish_by is By.IDLE

        async def one_server() -> psutil.Process:
            """While requests wait for it: a busy machine may take a second from their end to our next step."""
            await eventually(lambda: len(servers()) == 1, within_s=60, what="one server")
            return servers()[0]

        assert servers() == []
        first, answers = await asyncio.gather(one_server(), asyncio.gather(*(ask() for _ in range(20))))
        assert answers == [200] * 20
        text = (await service.send("GET", "/metrics")).body.decode()
        assert f'pagegate_unit_starts_total{{model="{MODEL}"}} 1.0' in text
        await eventually(asleep, within_s=60, what="a server that sleeps")
        assert not first.is_running()
        second, answer = await asyncio.gather(one_server(), ask())
        assert answer == 200
        assert second != first
        await service.oracle(rows=21)
    assert servers() == []
