"""Budgets of lineages and projects: what rotated keys and a project's keys spend together, however many processes."""

import pytest

from billing.budgets import BudgetPeriod, Budgets
from billing.credit.process import ProcessCredit
from billing.errors import BudgetExceeded, LedgerConflict
from tenancy.database import Database
from tenancy.key_groups import KeyGroups
from tests.billing.builders import ACCOUNT, KEY
from tests.billing.credit import test_shared as shared
from tests.billing.credit.test_process import spending
from tests.billing.credit.test_shared import Start, clock, start
from tests.billing.rows import add_key, event_row, post_rows
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

__all__ = ["clock", "start"]

pytestmark = over_both_databases

COST = 1_010_000
PROJECT = "d" * 32
SUCCESSOR, IN_PROJECT, ALSO_IN_PROJECT = "1" * 32, "2" * 32, "3" * 32
_GROUPS = {
    KEY: KeyGroups(KEY, ACCOUNT),
    SUCCESSOR: KeyGroups(KEY, ACCOUNT),
    IN_PROJECT: KeyGroups(IN_PROJECT, PROJECT),
    ALSO_IN_PROJECT: KeyGroups(ALSO_IN_PROJECT, PROJECT),
    "playground": KeyGroups("playground", ACCOUNT),
}


@pytest.fixture
def budgets(database: Database, clock: SettableClock) -> Budgets:
    add_key(database, KEY)
    add_key(database, SUCCESSOR, lineage_id=KEY)
    add_key(database, IN_PROJECT, project_id=PROJECT)
    add_key(database, ALSO_IN_PROJECT, project_id=PROJECT)
    return Budgets(database, clock=clock)


def _spend(database: Database, *key_ids: str) -> None:
    post_rows(
        database, *(event_row(id=f"of {key_id}", key_id=key_id, started_at_ns=shared.NOW_NS) for key_id in key_ids)
    )


def test_a_budget_of_any_key_of_a_lineage_counts_what_all_of_it_spent(budgets: Budgets, database: Database) -> None:
    _spend(database, *_GROUPS)
    of_successor = budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.MONTH, key_id=SUCCESSOR)
    assert (of_successor.budget.key_id, of_successor.spent_nano) == (KEY, 2 * COST)
    assert budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.MONTH, key_id=KEY).spent_nano == 2 * COST
    assert budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.MONTH, key_id=IN_PROJECT).spent_nano == COST


def test_a_budget_of_a_project_counts_what_its_keys_spent(budgets: Budgets, database: Database) -> None:
    _spend(database, *_GROUPS)
    assert budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.DAY, project_id=PROJECT).spent_nano == 2 * COST
    default = budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.DAY, project_id=ACCOUNT)
    assert default.spent_nano == 3 * COST
    assert budgets.add(ACCOUNT, 9 * COST, BudgetPeriod.DAY, project_id=ACCOUNT, model="other").spent_nano == 0


def test_a_key_is_in_one_project_already(budgets: Budgets) -> None:
    with pytest.raises(LedgerConflict, match="one project already"):
        budgets.add(ACCOUNT, COST, BudgetPeriod.DAY, key_id=KEY, project_id=ACCOUNT)


@pytest.mark.parametrize(
    ("of", "spenders", "bystander"),
    [
        ({"key_id": SUCCESSOR}, (KEY, SUCCESSOR), IN_PROJECT),
        ({"project_id": PROJECT}, (IN_PROJECT, ALSO_IN_PROJECT), KEY),
        ({"project_id": ACCOUNT}, ("playground", SUCCESSOR), IN_PROJECT),
    ],
)
async def test_two_keys_that_share_a_hard_budget_spend_it_once(
    budgets: Budgets, database: Database, of: dict[str, str], spenders: tuple[str, str], bystander: str
) -> None:
    async def nothing_to_flush() -> None:
        pass

    _spend(database, spenders[0])
    budgets.add(ACCOUNT, 3 * COST, BudgetPeriod.MONTH, **of)  # type: ignore[arg-type]  # names that it has
    credit = ProcessCredit(database, nothing_to_flush)
    await credit.hold(spending(None, groups=_GROUPS[spenders[0]]), "a", COST)
    await credit.hold(spending(None, groups=_GROUPS[spenders[1]]), "b", COST)
    with pytest.raises(BudgetExceeded):
        await credit.hold(spending(None, groups=_GROUPS[spenders[1]]), "c", 1)
    await credit.hold(spending(None, groups=_GROUPS[bystander]), "d", COST)


async def test_processes_share_the_budget_of_a_lineage_and_of_a_project(
    budgets: Budgets,
    database: Database,
    start: Start,
) -> None:
    budgets.add(ACCOUNT, 4 * COST, BudgetPeriod.MONTH, key_id=KEY)
    budgets.add(ACCOUNT, 2 * COST, BudgetPeriod.MONTH, project_id=PROJECT)
    first, second = start("p1"), start("p2")
    for process, key_id in ((first, KEY), (second, SUCCESSOR), (first, IN_PROJECT), (second, ALSO_IN_PROJECT)):
        await process.hold(key_id, COST, groups=_GROUPS[key_id])
        process.ended.append(event_row(id=key_id, key_id=key_id, started_at_ns=shared.NOW_NS, cost_nano=COST))
        process.credit.settle(key_id, COST)
    for process in (first, second):
        await process.post()
    # What was posted was taken off what each process had of the budget: nothing is counted twice, nothing forgotten.
    with pytest.raises(BudgetExceeded):
        await first.hold("more of the project", 1, groups=_GROUPS[ALSO_IN_PROJECT])
    await second.hold("more of the lineage", COST, groups=_GROUPS[SUCCESSOR])
    assert [standing.spent_nano for standing in budgets.standings(ACCOUNT)] == [2 * COST, 2 * COST]
