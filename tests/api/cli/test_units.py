"""`pagegate engine ls|wake|sleep|drain`."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.lifecycle.states import Begun, Failed, StartLimits, Unit, Wish, advance
from gateway.lifecycle.store import UnitStore
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate

A, B, OTHER = Unit("m", "a", "here"), Unit("m", "b", "here"), Unit("other", "a")


@pytest.fixture
def store(home: Path) -> Iterator[UnitStore]:
    database = open_database(f"sqlite:///{home}/pagegate.db")
    store = UnitStore(database, lease_s=15, clock=time.time_ns, limits=StartLimits())
    store.add([(A, Wish.AWAKE), (B, Wish.ASLEEP), (OTHER, Wish.ASLEEP)])
    yield store
    database.close()


def test_units_are_listed_with_their_states_and_why_one_failed(
    answer: Callable[..., Any], pagegate: Pagegate, store: UnitStore
) -> None:
    record = store.take(A, "me")
    assert record is not None
    now_ns = time.time_ns()
    failed = advance(advance(record, Begun(), now_ns, StartLimits()), Failed("no GPU is free"), now_ns, StartLimits(1))
    store.save(record, failed)
    a, b = answer("engine", "ls", "m")
    assert (a["unit"], a["state"], a["wish"], a["why"], a["failures"]) == ("a", "failed", "awake", "no GPU is free", 1)
    assert 200 < a["again_in_s"] <= 300
    assert (b["state"], b["depth"], b["wish"], b["wished_by"]) == ("asleep", "stopped", "asleep", "deployment")
    assert len(answer("engine", "ls")) == 3
    assert (a["kept"], b["kept"]) == (True, False)
    _, out, _ = pagegate("engine", "ls")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["m", "a", "b", "other", "a"]
    assert lines[1].startswith("  a  failed for ")
    assert lines[1].endswith("until `engine wake`; last failure: no GPU is free")
    assert lines[2].startswith("  b  no gateway looks after it; when it was left: asleep for ")


def test_where_there_is_none_that_is_said(pagegate: Pagegate) -> None:
    assert pagegate("engine", "ls")[:2] == (0, "There is no unit: no gateway has started one of its deployment here.\n")


def test_an_operators_orders_are_wishes_and_in_the_audit_log(
    answer: Callable[..., Any], pagegate: Pagegate, store: UnitStore
) -> None:
    assert [row["wish"] for row in answer("engine", "wake", "m")] == ["awake", "awake"]
    [slept] = answer("engine", "sleep", "m", "b", "--release")
    assert (slept["unit"], slept["wish"], slept["wished_by"]) == ("b", "asleep", "operator")
    assert [record.wish_depth.value for record in store.of([B])] == ["released"]
    assert {row["wish"] for row in answer("engine", "drain", "m")} == {"held"}
    entries = answer("audit", "list")
    said = [(entry["action"], entry["subject"]) for entry in entries]
    assert said == [
        ("unit.held", "m b"),
        ("unit.held", "m a"),
        ("unit.asleep", "m b"),
        ("unit.awake", "m b"),
        ("unit.awake", "m a"),
    ]
    code, _, err = pagegate("engine", "wake", "m", "nobody")
    assert (code, "there is no unit nobody of m" in err) == (2, True)
