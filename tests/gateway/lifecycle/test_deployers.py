"""Who has a unit that several gateways share: dropped by one it is the others', and the last one is told so."""

from concurrent.futures import ThreadPoolExecutor

import sqlalchemy as sa

from gateway.lifecycle.deployers import Deployers
from gateway.lifecycle.states import Unit
from gateway.lifecycle.tables import unit_deployers
from tenancy.database import Database
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

A, B = Unit("m", "a"), Unit("m", "b")


def test_the_last_one_that_drops_it_is_told_so(database: Database, clock: SettableClock) -> None:
    deployers = Deployers(database, lease_s=10, clock=clock)
    deployers.declare("one", [(A, "x"), (B, "x")])
    deployers.declare("other", [(A, "x"), (B, "another driver")])
    assert not deployers.drop("one", A, "x")
    assert deployers.drop("other", A, "x")
    assert deployers.drop("one", B, "x"), "the other drives it by something else"


def test_one_that_is_silent_for_a_lease_has_nothing_any_more_and_one_that_leaves_has_not(
    database: Database, clock: SettableClock
) -> None:
    deployers = Deployers(database, lease_s=10, clock=clock)
    deployers.declare("killed", [(A, "x")])
    clock.advance_s(9)
    deployers.declare("alive", [(A, "x")])
    assert not deployers.drop("one", A, "x")
    clock.advance_s(2)
    assert not deployers.drop("one", A, "x"), "one is alive"
    deployers.leave("alive")
    assert deployers.drop("one", A, "x")


def test_nothing_is_kept_of_keepers_that_were_killed(database: Database, clock: SettableClock) -> None:
    deployers = Deployers(database, lease_s=10, clock=clock)
    for life in range(3):
        deployers.declare(f"killed {life}", [(A, "x")])
    clock.advance_s(11)
    deployers.declare("alive", [(B, "x")])
    with database.read() as connection:
        assert list(connection.scalars(sa.select(unit_deployers.c.keeper))) == ["alive"]


def test_of_many_that_drop_it_at_once_exactly_one_is_the_last(database: Database, clock: SettableClock) -> None:
    deployers = Deployers(database, lease_s=10, clock=clock)
    keepers = [f"k{number}" for number in range(8)]
    for keeper in keepers:
        deployers.declare(keeper, [(A, "x")])
    with ThreadPoolExecutor(4) as threads:
        last = list(threads.map(lambda keeper: deployers.drop(keeper, A, "x"), keepers))
    assert last.count(True) == 1
