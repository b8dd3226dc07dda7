"""Very many streams that say nothing: the gateway stays alive, says so at once, and forgets them when they are left."""

import asyncio
import contextlib
import time
from functools import partial
from pathlib import Path

import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Script
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT
from tests.e2e.service import running_service

STREAMS, WAVE = 2_000, 100


def _has(engine: ScriptedEngine, streams: int) -> bool:
    return len(engine.live) == streams


@pytest.mark.load
async def test_two_thousand_silent_streams_hold_up_neither_health_nor_the_next_request(
    tmp_path: Path, checkpoint: Path
) -> None:
    gateway = {"queue_entries_max": STREAMS}
    async with (
        ScriptedEngine(Script(itl_ms=600_000), pool_tokens=1 << 20, running_max=STREAMS + 10) as engine,
        running_service(tmp_path / "home", checkpoint, engine, gateway=gateway) as service,
    ):

        async def ask() -> None:
            body = CHAT.body(service, stream=True)
            async with service.open_stream(CHAT.path(service), body) as response:
                await response.read()

        silent: list[asyncio.Task[None]] = []
        try:
            for wave in range(WAVE, STREAMS + 1, WAVE):
                silent += [asyncio.create_task(ask()) for _ in range(WAVE)]
                await eventually(partial(_has, engine, wave), within_s=30, what="all streams at the engine")
            began = time.monotonic()
            for path in ("/health/live", "/health/ready", "/metrics"):
                assert (await service.send("GET", path)).status == 200
            engine.steer(itl_ms=0)
            assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
            assert time.monotonic() - began < 5
        finally:
            for task in silent:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*silent, return_exceptions=True)
        await eventually_async(service.is_clean, within_s=60, what="a clean service")
