"""Every charge of a simulated service is the one that was foretold, whatever fails and whoever leaves."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from billing.tables import usage_events
from tests.e2e.simulation import simulated_service


@pytest.mark.parametrize(
    ("requests", "seed"),
    [(200, 7), pytest.param(3_000, 11, marks=[pytest.mark.load, pytest.mark.timeout(300)])],
)
async def test_no_charge_differs_from_what_was_foretold(tmp_path: Path, requests: int, seed: int) -> None:
    async with simulated_service(tmp_path, seed=seed) as simulation:
        report = await simulation.run(requests, prepaid_nano=3_000 * requests, budget_nano=1_000 * requests)
    assert report.differences == []
    assert report.requests == sum(report.outcomes.values()) == requests
    assert {"finished", "refused", "client_disconnected", "upstream_failed"} <= report.outcomes.keys()


async def test_a_charge_that_is_wrong_by_a_nano_dollar_is_found(tmp_path: Path) -> None:
    async with simulated_service(tmp_path, seed=3) as simulation:
        assert (await simulation.run(60, prepaid_nano=10**9, budget_nano=10**9)).differences == []
        with simulation.database.write() as connection:
            costly = sa.select(sa.func.min(usage_events.c.id)).where(usage_events.c.cost_nano > 0).scalar_subquery()
            dearer = usage_events.c.cost_nano + 1
            connection.execute(usage_events.update().where(usage_events.c.id == costly).values(cost_nano=dearer))
        assert any("foretold were" in wrong for wrong in (await simulation.audit()).differences)
