"""How units stand: workers hear it from their supervisor, and read SQL only where it says nothing."""

import asyncio
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from api import unit_news
from api.siblings import ENGINES, Siblings, answering
from api.unit_news import UNITS, UnitReader, answer_worker, ask_supervisor, told_by
from gateway.lifecycle.states import Record, StartLimits, State, Unit, Wish
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.watch import Watch
from tenancy.database import open_database
from tests.migrated import copy_migrated

A = Unit("m", "a", "here")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has at most 107 bytes
        yield Path(folder)


async def test_workers_are_told_by_the_supervisor_and_read_for_themselves_where_it_does_not_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_news, "_WAIT_S_MAX", 0.01)
    read: list[str] = []

    async def reads(name: str) -> list[Record]:
        read.append(name)
        return [Record(A)]

    watch = Watch(partial(reads, "supervisor"), heard=lambda _: None, lost=lambda _: None)
    told = told_by(ask_supervisor(Siblings(folder, "1", ["2"])), partial(reads, "worker"), 0.0)
    assert list(await told()) == [Record(A)]
    assert read == ["worker"]
    async with answering(folder, ENGINES, {UNITS: partial(answer_worker, watch)}):
        assert list(await told()) == [Record(A)]
        assert read == ["worker", "worker"], "the supervisor has not read anything yet"
        watch.learn([Record(A)])
        watch.hear(Record(A, State.WARMING, version=2))
        for _ in range(3):
            assert list(await told()) == [Record(A, State.WARMING, version=2)]
        news = asyncio.create_task(_news(watch))
        assert list(await told()) in ([Record(A, State.WARMING, version=2)], [Record(A, State.READY, version=3)])
        await news
        assert list(await told()) == [Record(A, State.READY, version=3)]
    assert read == ["worker", "worker"]


async def _news(watch: Watch) -> None:
    watch.hear(Record(A, State.READY, version=3))


async def test_units_of_another_place_are_read_only_if_the_file_names_them_and_somebody_owns_them(
    tmp_path: Path,
) -> None:
    copy_migrated(tmp_path)
    database = open_database(f"sqlite:///{tmp_path}/pagegate.db")
    now_ns = 1_000
    store = UnitStore(database, lease_s=10, clock=lambda: now_ns, limits=StartLimits())
    units = [Unit("m", name, place) for name, place in (("a", "here"), ("s", ""), ("r", "there"), ("x", "there"))]
    store.add([(unit, Wish.ASLEEP) for unit in units])
    reader = UnitReader(store, database.call, "here")
    reader.elsewhere = frozenset({("m", "r")})

    async def names() -> set[str]:
        return {record.unit.name for record in await reader.read()}

    assert await names() == {"a", "s"}
    for unit in units:
        assert store.take(unit, "owner") is not None
    assert await names() == {"a", "s", "r"}
    now_ns += 11_000_000_000
    assert await names() == {"a", "s"}
    database.close()
