"""A group whose halves systemd runs: each side is woken for the first request, grows by its own demand, and sleeps."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.lifecycle.states import State
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, ScriptedGroup, model, scripted_group, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service

LONG = [{"role": "user", "content": "the pages are the scarce thing " * 40}]
IDLE_S = 1


@dataclass
class Scaled:
    service: Service
    group: ScriptedGroup
    calls: Path

    def started(self) -> Counter[str]:
        """How often each unit was."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return Counter(line.removeprefix("start ") for line in lines if line.startswith("start "))

    def ready(self, side: str) -> int:
        records = self.service.services.lifecycle.waking.records(MODEL)
        return sum(record.state is State.READY for record in records if record.unit.name.startswith(side))

    async def asks(self, count: int, **fields: Any) -> list[int]:
        body = CHAT.body(self.service, **({"max_tokens": 4} | fields)) | {"model": MODEL}
        answers = (self.service.post(CHAT.path(self.service), body) for _ in range(count))
        return [answer.status for answer in await asyncio.gather(*answers)]


@contextlib.asynccontextmanager
async def scaling(
    tmp_path: Path, checkpoint: Path, systemctl: Path, serverless: dict[str, Any], **decode: Any
) -> AsyncIterator[Scaled]:
    async with scripted_group(prefill=3, decode=3, **decode) as group:
        table = group.table()
        for side in ("prefill", "decode"):
            for half in table[side]:
                half["managed"] = {"systemd": f"engine-{half['name']}.service"}
        deployed = model(checkpoint, groups=[table], serverless=serverless)
        file = write_deployment(tmp_path / "deployment.toml", deployed)
        intervals = {"poll_interval_s": 0.05, "scaling_interval_s": 0.1, "rest_interval_s": 0.1, "close_seconds": 0}
        async with running_service(
            tmp_path / "home", checkpoint, group.decode[0], deployment=file, lifecycle=intervals
        ) as service:
            yield Scaled(service, group, systemctl.parent / "calls")


async def test_the_first_requests_wake_one_half_of_each_side_and_both_sleep_when_nobody_comes(
    tmp_path: Path, checkpoint: Path, systemctl: Path
) -> None:
    async with scaling(tmp_path, checkpoint, systemctl, {"idle_seconds": IDLE_S}) as scaled:
        assert not scaled.started()
        assert await scaled.asks(20) == [200] * 20
        assert sorted(name[:8] for name in scaled.started()) == ["engine-d", "engine-p"]
        assert set(scaled.started().values()) == {1}
        await eventually(lambda: scaled.ready("") == 0, within_s=100, what="a model that sleeps again")
        assert await scaled.asks(3) == [200] * 3
        await scaled.service.oracle(rows=23)


@pytest.mark.parametrize("short", ["p", "d"], ids=["prompts", "outputs"])
async def test_a_side_that_is_short_grows_and_the_other_does_not(
    tmp_path: Path, checkpoint: Path, systemctl: Path, short: str
) -> None:
    """Long prompts that wait for prefill halves, or long outputs that fill the decode halves."""
    pools = {} if short == "p" else {"pool_tokens": 1024}
    least = {"replicas_min": 1, "idle_seconds": 3600}
    async with scaling(tmp_path, checkpoint, systemctl, least, **pools) as scaled:
        for prefill in scaled.group.prefill if short == "p" else ():
            prefill.pool_tokens = 512  # one such prompt
            prefill.steer(ttft_s=0.5)
        for decode in scaled.group.decode if short == "d" else ():
            decode.steer(itl_ms=2)
        await eventually(lambda: scaled.ready("p") == scaled.ready("d") == 1, within_s=30, what="one half of each")
        wanted: dict[str, Any] = {"messages": LONG} if short == "p" else {"max_tokens": 520}
        asked = asyncio.create_task(scaled.asks(5, **wanted))
        await eventually(lambda: scaled.ready(short) > 1, within_s=100, what="another half of the side that is short")
        assert await asked == [200] * 5
        assert scaled.ready("d" if short == "p" else "p") == 1
        grown = scaled.group.prefill if short == "p" else scaled.group.decode
        assert sum(bool(engine.requests) for engine in grown) > 1, "what was started for it serves"
        await scaled.service.oracle(rows=5)
