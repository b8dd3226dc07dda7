"""Recorded once, priced once: through restarts, kills, a database that is away and a disk that is full."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.errors import BillingUnavailable, RecordDelayed
from billing.metering import Metering
from billing.price_book import PriceBook, set_price
from billing.rating import rate
from billing.records import encode_begin, encode_end, encode_progress
from billing.spool import Spool
from billing.store import UsageEvent, UsageStore
from billing.tables import usage_events
from billing.usage import TokenUsage
from tenancy.database import Database, open_database
from tests.billing.builders import ACCOUNT, MODEL, facts, price, record
from tests.billing.rows import wipe
from tests.examples import examples
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

OpenMetering = Callable[..., Metering]


@pytest.fixture
async def open_metering(
    database: Database, price_book: PriceBook, tmp_path: Path, clock: SettableClock
) -> AsyncIterator[OpenMetering]:
    """Opens the one spool again and again, as restarts do."""
    spools: list[Spool] = []

    def open_it(**options: Any) -> Metering:
        for spool in spools:
            spool.close()
        sizes = {name: options.pop(name) for name in ("segment_bytes_max", "high_water_bytes") if name in options}
        spools.append(Spool(tmp_path / "spool", **sizes))
        return Metering(spools[-1], database, price_book, clock=clock, **options)

    yield open_it
    for spool in spools:
        spool.close()


def _events(database: Database) -> dict[str, UsageEvent]:
    with database.read() as connection:
        rows = connection.execute(sa.select(usage_events)).mappings().all()
    return {row["id"]: UsageEvent(**row) for row in rows}


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for knows no events
            await asyncio.sleep(0.005)


@over_both_databases
class TestFinish:
    async def test_a_finished_request_is_priced_and_in_sql_after_a_flush(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering()
        metering.begin(facts())
        charge = await metering.finish(record(), price())
        assert charge.cost_nano == 1_010_000
        await metering.flush()
        event = UsageStore(database).request_record(ACCOUNT, "request-1")
        assert (event.cost_nano, event.neurons_micro, event.price_version) == (1_010_000, charge.neurons_micro, 1)
        assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (10, 0, 100)
        assert (event.outcome, event.charged, event.usage_source) == ("finished", True, "engine")
        assert metering.lag_records() == 0

    async def test_it_is_durable_before_it_is_over(
        self, open_metering: OpenMetering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metering = open_metering()
        copies = 0
        real = os.fdatasync

        def sync(descriptor: int) -> None:
            nonlocal copies
            real(descriptor)
            copies += 1
            shutil.copytree(tmp_path / "spool", tmp_path / f"copy{copies}")

        monkeypatch.setattr(os, "fdatasync", sync)
        metering.begin(facts())
        assert copies == 0  # a BEGIN costs no sync
        await metering.finish(record(), price())
        assert copies == 1
        durable = Spool(tmp_path / "copy1")
        assert [payload for payload, _ in durable.read(0, durable.end)] == [
            encode_begin(facts()),
            encode_end(record(), rate(record().usage, price()), 1),
        ]
        durable.close()

    async def test_our_own_failure_is_recorded_and_costs_nothing(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering()
        metering.begin(facts())
        failed = record(
            outcome="upstream_failed", usage=TokenUsage(10, 0, 7, 0), charged=False, code="generation_failed"
        )
        assert (await metering.finish(failed, price())).cost_nano == 0
        await metering.flush()
        event = _events(database)["request-1"]
        assert (event.completion_tokens, event.cost_nano, event.neurons_micro, event.code) == (
            7,
            0,
            0,
            "generation_failed",
        )

    async def test_a_refusal_costs_nothing_even_without_a_price(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering()
        refused = record(outcome="refused", usage=TokenUsage(), charged=False, code="price_unavailable")
        metering.refuse(refused, None)
        metering.refuse(record("request-2", outcome="refused", usage=TokenUsage(), charged=False), price())
        assert metering.lag_records() == 2
        await metering.flush()
        events = _events(database)
        assert events["request-1"].price_version is None
        assert events["request-2"].price_version == 1
        assert {event.cost_nano for event in events.values()} == {0}

    async def test_the_price_is_the_one_it_began_with(self, open_metering: OpenMetering, database: Database) -> None:
        metering = open_metering()
        metering.begin(facts())
        with database.write() as connection:
            set_price(connection, price(effective_from_ns=1_500, input_nano_per_m=0, output_nano_per_m=0))
        assert (await metering.finish(record(), price())).cost_nano == 1_010_000
        await metering.flush()
        assert UsageStore(database).violations() == []


@over_both_databases
class TestDrain:
    async def test_batches_are_bounded_and_nothing_is_posted_twice(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering(drain_batch_records_max=10)
        for number in range(25):
            metering.begin(facts(f"r{number}"))
            await metering.finish(record(f"r{number}"), price())
        assert metering.lag_records() == 25
        assert [await metering.drain_once() for _ in range(4)] == [10, 10, 5, 0]
        assert len(_events(database)) == 25

    async def test_posting_again_after_a_lost_checkpoint_changes_nothing(
        self, open_metering: OpenMetering, database: Database, tmp_path: Path
    ) -> None:
        metering = open_metering()
        await metering.finish(record(), price())
        await metering.flush()
        before = _events(database)
        (tmp_path / "spool" / "checkpoint").unlink()
        metering = open_metering()
        await metering.recover()
        assert metering.lag_records() == 1
        await metering.flush()
        assert _events(database) == before

    async def test_what_was_drained_is_not_read_again_after_a_restart(self, open_metering: OpenMetering) -> None:
        metering = open_metering()
        await metering.finish(record(), price())
        await metering.flush()
        metering = open_metering()
        await metering.recover()
        assert metering.lag_records() == 0
        assert await metering.drain_once() == 0

    async def test_a_long_request_keeps_its_begin_though_thousands_end_meanwhile(
        self, open_metering: OpenMetering, database: Database, tmp_path: Path
    ) -> None:
        metering = open_metering(segment_bytes_max=4096)
        metering.begin(facts("long"))
        for number in range(100):
            await metering.finish(record(f"r{number}"), price())
        await metering.flush()
        assert len(list((tmp_path / "spool").glob("*.spool"))) > 5
        metering = open_metering(segment_bytes_max=4096)
        assert await metering.recover() == 1
        await metering.flush()
        assert _events(database)["long"].outcome == "cancelled"
        assert len(list((tmp_path / "spool").glob("*.spool"))) == 1

    async def test_a_bug_in_the_drain_does_not_end_it(
        self, open_metering: OpenMetering, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metering = open_metering(drain_interval_s=0.01)
        real, failures = metering._post, 3

        def post(*args: Any) -> Any:
            nonlocal failures
            if failures:
                failures -= 1
                raise LookupError("a bug")
            return real(*args)

        monkeypatch.setattr(metering, "_post", post)
        running = asyncio.create_task(metering.run(), name="drain")
        await metering.finish(record(), price())
        await _until(lambda: metering.lag_records() == 0)
        assert len(_events(database)) == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def test_flushes_that_come_together_all_find_their_records(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering(drain_batch_records_max=3)

        async def finish_and_read(number: int) -> None:
            await metering.finish(record(f"r{number}"), price())
            await metering.flush()
            assert f"r{number}" in _events(database)

        await asyncio.gather(*(finish_and_read(number) for number in range(20)))
        assert metering.lag_records() == 0


class TestDatabaseAway:
    """Only SQLite says of a table that is away what it says of a database that is."""

    async def test_records_wait_for_the_database_and_none_is_lost(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering(drain_interval_s=0.01)
        running = asyncio.create_task(metering.run(), name="drain")
        with database.write() as connection:
            connection.exec_driver_sql("ALTER TABLE usage_events RENAME TO elsewhere")
        for number in range(50):
            await metering.finish(record(f"r{number}"), price())
        with pytest.raises(BillingUnavailable):
            await metering.flush()
        assert metering.lag_records() == 50
        with database.write() as connection:
            connection.exec_driver_sql("ALTER TABLE elsewhere RENAME TO usage_events")
        await _until(lambda: metering.lag_records() == 0)
        assert len(_events(database)) == 50
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class TestFailingDisk:
    async def test_an_end_that_the_disk_refuses_is_written_later_and_charged_once(
        self, open_metering: OpenMetering, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metering = open_metering(drain_interval_s=0.01)
        metering.begin(facts())
        real = os.write

        def full(_descriptor: int, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RecordDelayed, match="is charged once"):
            await metering.finish(record(), price())
        with pytest.raises(BillingUnavailable):
            metering.begin(facts("request-2"))
        metering.progress("request-1", TokenUsage(10, 0, 1, 0))
        metering.refuse(record("request-3", charged=False, outcome="refused", usage=TokenUsage()), price())
        assert metering.lag_records() == 1
        running = asyncio.create_task(metering.run(), name="drain")
        await asyncio.sleep(0.05)
        assert metering.lag_records() == 1
        monkeypatch.setattr(os, "write", real)
        await _until(lambda: metering.lag_records() == 0)
        metering.begin(facts("request-2"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert {name: event.cost_nano for name, event in _events(database).items()} == {"request-1": 1_010_000}

    async def test_an_end_whose_sync_failed_is_recorded_once(
        self, open_metering: OpenMetering, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metering = open_metering(drain_interval_s=0.01)
        metering.begin(facts())
        real = os.fdatasync

        def failing(_descriptor: int) -> None:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "fdatasync", failing)
        with pytest.raises(BillingUnavailable):
            await metering.finish(record(), price())
        monkeypatch.setattr(os, "fdatasync", real)
        running = asyncio.create_task(metering.run(), name="drain")
        await _until(lambda: metering.lag_records() == 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(_events(database)) == 1

    async def test_the_drain_goes_on_and_frees_a_full_disk(
        self, open_metering: OpenMetering, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metering = open_metering(drain_interval_s=0.01, segment_bytes_max=2048)
        for number in range(20):
            await metering.finish(record(f"r{number}"), price())
        real = os.write

        def full(_descriptor: int, _data: bytes) -> int:
            raise OSError(errno.ENOSPC, "no space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(BillingUnavailable):
            metering.begin(facts("x"))
        running = asyncio.create_task(metering.run(), name="drain")
        # The last one with records stays beside the one that the probes try to write to.
        await _until(lambda: len(list((tmp_path / "spool").glob("*.spool"))) == 2)
        monkeypatch.setattr(os, "write", real)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(_events(database)) == 20

    async def test_at_the_high_water_mark_work_is_refused_until_the_drain_catches_up(
        self, open_metering: OpenMetering
    ) -> None:
        metering = open_metering(segment_bytes_max=2048, high_water_bytes=8192)
        admitted = 0
        refused = False
        while not refused:
            try:
                metering.begin(facts(f"r{admitted}"))
            except BillingUnavailable:
                refused = True
            else:
                await metering.finish(record(f"r{admitted}"), price())
                admitted += 1
        assert admitted > 3
        await metering.flush()
        metering.begin(facts("after"))

    async def test_a_wait_that_is_given_up_loses_no_record(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering()
        metering.begin(facts())
        finishing = asyncio.create_task(metering.finish(record(), price()))
        await asyncio.sleep(0)
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        assert metering._begun == {}
        await metering.flush()
        assert len(_events(database)) == 1


@over_both_databases
@pytest.mark.parametrize("step_s", [-7200.0, 40 * 86_400.0])
class TestSteppedClock:
    async def test_each_request_is_counted_once_and_none_ends_before_it_began(
        self, open_metering: OpenMetering, database: Database, clock: SettableClock, step_s: float
    ) -> None:
        metering = open_metering()
        began = clock.now_ns
        for name in ("ends", "dies"):
            metering.begin(facts(name, started_at_ns=began))
        clock.advance_s(step_s)
        metering.progress("dies", TokenUsage(10, 0, 5, 0))
        await metering.finish(record("ends", started_at_ns=began, ended_at_ns=began), price())
        await metering.flush()
        metering = open_metering()
        assert await metering.recover() == 1
        await metering.flush()
        await metering.flush()
        events = _events(database)
        assert {name: event.cost_nano for name, event in events.items()} == {"ends": 1_010_000, "dies": 60_000}
        assert all(event.ended_at_ns >= event.started_at_ns for event in events.values())
        assert {event.started_at_ns for event in events.values()} == {began}
        assert UsageStore(database).violations() == []


@over_both_databases
class TestRecovery:
    async def test_a_request_cut_off_pays_for_what_it_had_surely_produced(
        self, open_metering: OpenMetering, database: Database, clock: SettableClock
    ) -> None:
        metering = open_metering()
        metering.begin(facts())
        metering.progress("request-1", TokenUsage(10, 4, 3, 1))
        clock.advance_s(0.25)
        metering.progress("request-1", TokenUsage(10, 4, 8, 2))
        seen_at_ns = clock.now_ns
        clock.advance_s(3600)
        metering = open_metering()
        assert await metering.recover() == 1
        await metering.flush()
        event = _events(database)["request-1"]
        assert (event.outcome, event.usage_source, event.charged) == ("cancelled", "recovered", True)
        assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.reasoning_tokens) == (
            10,
            4,
            8,
            2,
        )
        assert event.cost_nano == 6 * 1_000 + 4 * 100 + 8 * 10_000
        assert event.ended_at_ns == seen_at_ns
        assert UsageStore(database).violations() == []

    async def test_without_any_progress_it_pays_nothing(self, open_metering: OpenMetering, database: Database) -> None:
        open_metering().begin(facts())
        metering = open_metering()
        await metering.recover()
        await metering.flush()
        event = _events(database)["request-1"]
        assert (event.prompt_tokens, event.completion_tokens, event.cost_nano) == (0, 0, 0)

    async def test_what_ended_is_not_recovered(self, open_metering: OpenMetering, database: Database) -> None:
        metering = open_metering()
        metering.begin(facts())
        await metering.finish(record(), price())
        metering = open_metering()
        assert await metering.recover() == 0
        await metering.flush()
        assert _events(database)["request-1"].outcome == "finished"

    async def test_it_is_priced_at_the_version_it_began_with(
        self, open_metering: OpenMetering, database: Database, price_book: PriceBook
    ) -> None:
        metering = open_metering()
        metering.begin(facts())
        metering.progress("request-1", TokenUsage(10, 0, 100, 0))
        with database.write() as connection:
            set_price(connection, price(effective_from_ns=5, input_nano_per_m=0, output_nano_per_m=0))
        await price_book.refresh()
        metering = open_metering()
        await metering.recover()
        await metering.flush()
        assert (_events(database)["request-1"].cost_nano, _events(database)["request-1"].price_version) == (
            1_010_000,
            1,
        )

    async def test_a_price_that_is_gone_is_reported_and_stops_no_start(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        metering = open_metering()
        metering.begin(facts(price_version=77))
        metering.progress("request-1", TokenUsage(10, 0, 5, 0))
        metering = open_metering()
        assert await metering.recover() == 1
        await metering.flush()
        assert _events(database)["request-1"].cost_nano == 0
        assert UsageStore(database).violations() == ["request request-1: there is no price of version 77"]

    async def test_recovering_again_and_again_adds_nothing(
        self, open_metering: OpenMetering, database: Database
    ) -> None:
        open_metering().begin(facts())
        for expected in (1, 0, 0):
            assert await open_metering().recover() == expected
        metering = open_metering()
        await metering.recover()
        await metering.flush()
        assert len(_events(database)) == 1


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(step, request, tokens) in an order that a gateway can produce."""
    steps: list[tuple[str, int, int]] = []
    produced: dict[int, int] = {}
    begun = 0
    for choice in draw(st.lists(st.integers(0, 99), max_size=25)):
        if choice % 3 == 0 or not produced:
            produced[begun] = 0
            steps.append(("begin", begun, 0))
            begun += 1
            continue
        request = sorted(produced)[choice % len(produced)]
        if choice % 3 == 1:
            produced[request] += 1 + choice % 7
            steps.append(("progress", request, produced[request]))
        else:
            steps.append(("end", request, produced.pop(request) + choice % 5))
    return steps


@pytest.mark.load
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(histories(), st.data())
async def test_a_kill_at_any_byte_and_another_in_the_recovery_count_each_request_once(
    database: Database,
    price_book: PriceBook,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    data: st.DataObject,
) -> None:
    wipe(database)
    directory = tmp_path_factory.mktemp("kill")
    ends: list[int] = []
    spool = Spool(directory)
    for step, request, tokens in steps:
        ends.append(spool.append(_payload(step, f"r{request}", tokens)))
    spool.close()
    segment = next(directory.glob("*.spool"))
    cut = data.draw(st.integers(0, segment.stat().st_size), label="killed at byte")
    os.truncate(segment, cut)
    written = [step for step, end in zip(steps, ends, strict=True) if end <= cut]

    spool = Spool(directory)
    before = spool.end
    await Metering(spool, database, price_book).recover()
    spool.close()
    os.truncate(segment, data.draw(st.integers(before, segment.stat().st_size), label="killed again at byte"))

    spool = Spool(directory)
    metering = Metering(spool, database, price_book)
    await metering.recover()
    await metering.flush()
    spool.close()

    expected: dict[str, tuple[str, int]] = {}
    for step, request, tokens in written:
        expected[f"r{request}"] = ("finished" if step == "end" else "cancelled", tokens)
    found = {name: (event.outcome, event.completion_tokens) for name, event in _events(database).items()}
    assert found == expected
    assert UsageStore(database).violations() == []


def _payload(step: str, request_id: str, tokens: int) -> bytes:
    if step == "begin":
        return encode_begin(facts(request_id))
    usage = TokenUsage(10, 0, tokens, 0)
    if step == "progress":
        return encode_progress(request_id, usage, 1)
    return encode_end(record(request_id, usage), rate(usage, price()), 1)


_GATEWAY = """
import asyncio, sys
from pathlib import Path
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.usage import TokenUsage
from tenancy.database import open_database
from tests.billing.builders import MODEL, facts, record

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

async def main():
    database = open_database(sys.argv[1])
    book = PriceBook(database)
    await book.refresh()
    metering = Metering(Spool(Path(sys.argv[2]), segment_bytes_max=65536), database, book, drain_interval_s=0.01)
    await metering.recover()
    price = book.price_in_force(MODEL, 1_000)
    async def client(worker):
        number = 0
        while True:
            name = f"{sys.argv[3]}-{worker}-{number}"
            metering.begin(facts(name))
            say("begun", name)
            for tokens in (2, 4):
                metering.progress(name, TokenUsage(10, 0, tokens, 0))
                say("progress", name, tokens)
                await asyncio.sleep(0)
            await metering.finish(record(name, TokenUsage(10, 0, 5, 0)), price)
            say("finished", name)
            number += 1
    async with asyncio.TaskGroup() as group:
        group.create_task(metering.run())
        for worker in range(4):
            group.create_task(client(worker))

asyncio.run(main())
"""


def _run_and_kill(arguments: list[str], lines: int) -> list[list[str]]:
    """Every whole line that the gateway said, of which `lines` before it was killed."""
    gateway = subprocess.Popen([sys.executable, "-c", _GATEWAY, *arguments], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    heard = [gateway.stdout.readline() for _ in range(lines)]
    gateway.send_signal(signal.SIGKILL)
    heard += [line for line in gateway.stdout if line.endswith("\n")]
    gateway.wait()
    gateway.stdout.close()
    return [line.split() for line in heard]


@pytest.mark.load
@pytest.mark.timeout(60)
async def test_after_real_kills_every_request_is_counted_once_and_never_above_what_it_produced(
    database: Database, database_url: str, price_book: PriceBook, tmp_path: Path
) -> None:
    said: list[list[str]] = []
    for life, lines in enumerate((1, 7, 60, 300)):
        said += _run_and_kill([database_url, str(tmp_path / "spool"), str(life)], lines)

    spool = Spool(tmp_path / "spool")
    metering = Metering(spool, database, price_book)
    await metering.recover()
    await metering.flush()
    spool.close()

    events = _events(database)
    begun = {words[1] for words in said if words[0] == "begun"}
    finished = {words[1] for words in said if words[0] == "finished"}
    progress: dict[str, int] = {}
    for words in said:
        if words[0] == "progress":
            progress[words[1]] = int(words[2])
    assert len(begun) > 20
    assert begun <= events.keys()
    assert len(events) <= len(begun) + 4 * 4  # what began just before a kill may not have been heard of
    for name in finished:
        assert (events[name].outcome, events[name].completion_tokens, events[name].cost_nano) == ("finished", 5, 60_000)
    for name, event in events.items():
        assert progress.get(name, 0) <= event.completion_tokens <= 5
    assert UsageStore(database).violations() == []


async def test_a_second_database_of_the_same_records_ends_up_the_same(
    open_metering: OpenMetering, database: Database, price_book: PriceBook, tmp_path: Path, migrated_file: Path
) -> None:
    metering = open_metering()
    for number in range(10):
        metering.begin(facts(f"r{number}"))
        await metering.finish(record(f"r{number}"), price())
    await metering.flush()
    shutil.copytree(tmp_path / "spool", tmp_path / "replayed")
    (tmp_path / "replayed" / "checkpoint").unlink()
    shutil.copy(migrated_file, tmp_path / "second.db")
    second = open_database(f"sqlite:///{tmp_path}/second.db")
    spool = Spool(tmp_path / "replayed")
    replaying = Metering(spool, second, price_book)
    await replaying.recover()
    await replaying.flush()
    assert _events(second) == _events(database)
    assert _events(second)["r0"].model == MODEL
    spool.close()
    second.close()
