"""The latest use of a unit stands, whoever tells it and in whatever order."""

from concurrent.futures import ThreadPoolExecutor

from gateway.lifecycle.states import Unit
from gateway.lifecycle.uses import UseStore
from tenancy.database import Database
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

A, B, THERE = Unit("m", "a", "here"), Unit("m", "b", "here"), Unit("m", "a", "there")


def test_the_latest_use_stands(database: Database) -> None:
    store = UseStore(database)
    store.note({A: 20, B: 5})
    store.note({A: 10, B: 7, THERE: 1})
    store.note({})
    assert store.of(["here"]) == {A: 20, B: 7}
    assert store.of(["there", ""]) == {THERE: 1}


def test_uses_that_are_told_at_once_are_not_lost(database: Database) -> None:
    store = UseStore(database)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(store.note, [{A: at, B: 100 - at} for at in range(40)]))
    assert store.of(["here"]) == {A: 39, B: 100}
