"""Every charge of a simulated service is the one that was foretold, whatever fails and whoever leaves."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from billing.tables import usage_events
from tests.e2e.simulation import simulated_service


async def test_no_charge_differs_from_what_was_foretold(tmp_path: Path) -> None:
    requests = 200
    async with simulated_service(tmp_path, seed=7) as simulation:
        report = await simulation.run(requests, prepaid_nano=3_000 * requests, budget_nano=1_000 * requests)
    assert report.differences == []
    assert report.requests == sum(report.outcomes.values()) == requests
    assert {"finished", "refused", "client_disconnected", "upstream_failed"} <= report.outcomes.keys()


@pytest.mark.load
@pytest.mark.timeout(700)
async def test_of_a_hundred_thousand_charges_none_differs_from_what_was_foretold() -> None:
    """Two services at once, one a core, that share nothing: half of the requests each, drawn from other seeds."""
    command = (sys.executable, "-m", "benchmarks.whole_service", "100000", "11", "--processes", "2")
    run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, process_group=0)
    try:
        told, _ = await run.communicate()
    finally:
        if run.returncode is None:
            os.killpg(run.pid, signal.SIGKILL)  # the services' processes too
            await run.wait()
    assert run.returncode == 0, told.decode()
    assert "100,000 requests, seeds [11, 12]: 0 differences" in told.decode()


async def test_a_charge_that_is_wrong_by_a_nano_dollar_is_found(tmp_path: Path) -> None:
    async with simulated_service(tmp_path, seed=3) as simulation:
        assert (await simulation.run(60, prepaid_nano=10**9, budget_nano=10**9)).differences == []
        with simulation.database.write() as connection:
            costly = sa.select(sa.func.min(usage_events.c.id)).where(usage_events.c.cost_nano > 0).scalar_subquery()
            dearer = usage_events.c.cost_nano + 1
            connection.execute(usage_events.update().where(usage_events.c.id == costly).values(cost_nano=dearer))
        assert any("foretold were" in wrong for wrong in (await simulation.audit()).differences)
