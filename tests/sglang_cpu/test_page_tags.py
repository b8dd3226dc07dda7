"""Real SGLang of a model that may sleep: `pagegate serve` starts it for a request, and in the last test it is to sleep.

Between the two, the page-tag plugin in it with pages of one token. Other sizes have the servers of the other files.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from backends.sglang.attach import contradictions
from backends.sglang.probe import read_reports
from tests.backends import test_engine_contract as contract
from tests.doubles.waiting import eventually, eventually_async
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu import crowds
from tests.sglang_cpu.server import TEST_S_MAX, WokenSglang, woken_sglang

# With those of test_real_sglang.py and test_real_pair.py 5,000 in all.
REQUESTS = 2250
# Crowds of thousands take minutes on a busy machine.
pytestmark = [pytest.mark.sglang, pytest.mark.load, pytest.mark.timeout(TEST_S_MAX)]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WokenSglang]:
    with woken_sglang(build_tiny_checkpoint(tmp_path_factory.mktemp("tags") / "tiny"), page_tokens=1) as server:
        yield server


@pytest.fixture
async def engine(sglang: WokenSglang) -> AsyncIterator[contract.Engine]:
    async with crowds.own_connections() as session:
        yield contract.Engine(sglang.url, session)


async def test_a_request_has_had_it_started_once(sglang: WokenSglang) -> None:
    [unit] = await asyncio.to_thread(sglang.units)
    assert (unit["state"], unit["wish"], unit["failures"]) == ("ready", "awake", 0)
    assert len(sglang.processes()) >= 3, "a server, its scheduler, its detokenizer"


async def test_crowds_with_near_identical_prompts_are_left_alone(engine: contract.Engine, sglang: WokenSglang) -> None:
    await crowds.is_left_alone(engine, requests=REQUESTS)
    reports = await read_reports(sglang.url, within_s=60)
    assert contradictions(sglang.model, "unified", sglang.model.replicas[0], reports) == []
    assert "pagegate:page_tags_requests_aborted_total 0.0" in reports.metrics
    said = await crowds.tags_say(sglang.url)
    assert said["requests_aborted"] == said["pages_quarantined"] == 0
    assert said["pairs_checked"] > REQUESTS


async def test_a_page_freed_under_a_request_stops_it_alone_before_its_token_leaves(engine: contract.Engine) -> None:
    await crowds.a_lost_page_stops_its_request_alone(engine)
    metrics = (await read_reports(engine.url, within_s=60)).metrics
    assert "pagegate:page_tags_requests_aborted_total 2.0" in metrics
    assert "pagegate:page_tags_pages_quarantined 2.0" in metrics


async def test_put_to_sleep_nothing_of_it_runs_any_more(sglang: WokenSglang) -> None:
    async def sleeps() -> bool:
        [unit] = await asyncio.to_thread(sglang.units)
        return bool(unit["state"] == "asleep")

    await asyncio.to_thread(sglang.order, "sleep")
    await eventually_async(sleeps, within_s=90, what="a server that sleeps")
    await eventually(lambda: sglang.processes() == [], within_s=30, what="none of its processes")
