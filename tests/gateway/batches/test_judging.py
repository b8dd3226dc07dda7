"""Lines of a process that is silent: ended by what SQL knows of them, never run twice, and not waited for all day."""

from types import SimpleNamespace
from typing import cast

import pytest

from billing.errors import UsageNotFound
from billing.store import UsageEvent
from gateway.batches.batch import Batch, Line
from gateway.batches.form import Form
from gateway.batches.judging import Judge
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tenancy.database import Database
from tests.gateway.batches.made import order
from tests.tenancy.clock import SettableClock

ACCOUNT = "a" * 32
SETTINGS = BatchSettings()


class Lost:
    """The dialect's word for a line that is lost."""

    def lost(self, _batch: Batch, _line: Line) -> bytes:
        return b"lost"


class Records(dict[str, SimpleNamespace]):
    """Usage records by request."""

    def add(self, line: Line, *, tokens: int, charged: bool = True) -> None:
        self[line.request_id] = SimpleNamespace(
            prompt_tokens=3,
            cached_tokens=0,
            completion_tokens=tokens,
            reasoning_tokens=0,
            cost_nano=tokens if charged else 0,
            charged=charged,
        )

    def event(self, _account_id: str, request_id: str) -> UsageEvent:
        if request_id not in self:
            raise UsageNotFound("There is no such request.")
        return cast("UsageEvent", self[request_id])


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def store(database: Database, clock: SettableClock) -> BatchStore:
    return BatchStore(database, SETTINGS, clock=clock, told=lambda *_: None)


@pytest.fixture
def judge(database: Database, store: BatchStore, clock: SettableClock, records: Records) -> Judge:
    return Judge(
        database=database,
        store=store,
        forms=lambda _: cast("Form", Lost()),
        settings=SETTINGS,
        owner="me",
        event=records.event,
        clock=lambda: clock.now_ns / 1e9,
    )


def begun_by_another(store: BatchStore, clock: SettableClock, lines: int = 1) -> tuple[Batch, list[Line]]:
    """All lines of a batch run at a process whose lease has ended."""
    batch = store.create(ACCOUNT, order(lines))
    begun = [store.claim(batch.id, "gone") for _ in range(lines)]
    clock.advance_s(SETTINGS.lease_seconds + 1)
    return batch, [line for line in begun if line is not None]


async def test_a_line_that_kept_its_answer_has_succeeded(
    judge: Judge, store: BatchStore, clock: SettableClock, records: Records
) -> None:
    batch, [line, unrecorded] = begun_by_another(store, clock, 2)
    for one in (line, unrecorded):
        store.keep(one, b"said")
    records.add(line, tokens=4)
    await judge.take_over(store.open_batches())
    found = store.get(ACCOUNT, batch.id)
    assert (found.succeeded, found.completion_tokens) == (2, 4)
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said", b"said"]
    assert judge.figures.ended == {"succeeded": 2}


async def test_a_line_whose_record_knows_of_tokens_is_lost_and_never_run_again(
    judge: Judge, store: BatchStore, clock: SettableClock, records: Records
) -> None:
    batch, [line] = begun_by_another(store, clock)
    records.add(line, tokens=4)
    await judge.take_over(store.open_batches())
    assert store.claim(batch.id, "me") is None
    assert store.answers(ACCOUNT, batch.id)[0] == [b"lost"]
    assert store.get(ACCOUNT, batch.id).completion_tokens == 4


@pytest.mark.parametrize(("tokens", "charged"), [(0, True), (4, False)])
async def test_a_line_for_which_nobody_pays_is_run_again_under_another_id(  # noqa: PLR0917 - a table's columns
    judge: Judge,
    store: BatchStore,
    clock: SettableClock,
    records: Records,
    tokens: int,
    charged: bool,  # noqa: FBT001 - a table's column
) -> None:
    batch, [line] = begun_by_another(store, clock)
    records.add(line, tokens=tokens, charged=charged)
    await judge.take_over(store.open_batches())
    clock.advance_s(2)
    again = store.claim(batch.id, "me")
    assert again is not None
    assert again.request_id != line.request_id
    assert again.attempts == 1


async def test_a_line_without_a_record_is_waited_for_and_then_given_up_but_never_run_again(
    judge: Judge, store: BatchStore, clock: SettableClock
) -> None:
    batch, _ = begun_by_another(store, clock)
    await judge.take_over(store.open_batches())
    clock.advance_s(SETTINGS.missing_seconds_max - 1)
    await judge.take_over(store.open_batches())
    assert store.get(ACCOUNT, batch.id).failed == 0
    clock.advance_s(1)
    await judge.take_over(store.open_batches())
    assert store.answers(ACCOUNT, batch.id)[0] == [b"lost"]
    assert store.claim(batch.id, "me") is None


async def test_a_process_that_came_back_meanwhile_keeps_its_lines(
    judge: Judge, store: BatchStore, clock: SettableClock, records: Records
) -> None:
    batch, [line] = begun_by_another(store, clock)
    silent = store.open_batches()
    assert store.lease(batch.id, "gone")
    records.add(line, tokens=4)
    await judge.take_over(silent)
    assert store.get(ACCOUNT, batch.id).failed == 0
    assert [one.request_id for one in store.left_running("gone")] == [line.request_id]


async def test_an_answer_that_is_kept_while_its_record_is_looked_up_is_not_lost(
    judge: Judge, store: BatchStore, clock: SettableClock, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is late, not dead: it keeps and records in the moment in which it is judged."""
    batch, [line] = begun_by_another(store, clock)
    look = store.left_by_others

    def look_and_end(batch_ids: list[str], owner: str) -> list[Line]:
        found = look(batch_ids, owner)
        store.keep(line, b"said")
        records.add(line, tokens=4)
        return found

    monkeypatch.setattr(store, "left_by_others", look_and_end)
    await judge.take_over(store.open_batches())
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said"]
