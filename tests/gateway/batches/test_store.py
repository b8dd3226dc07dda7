"""A line has one owner and one end; batches move as they should; what was kept long enough goes."""

from dataclasses import replace

import pytest
import sqlalchemy as sa

from billing.usage import TokenUsage
from gateway.batches.batch import Batch, BatchState, FormName, Line, LineState
from gateway.batches.desk import Batching
from gateway.batches.files import FileStore
from gateway.batches.judging import Figures
from gateway.batches.line_rows import Undone, leave_to_anybody
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from gateway.batches.tables import batch_lines
from gateway.errors import BatchesFull, BatchNotCancellable, BatchNotFound, StoredFileNotFound, StoredFilesFull
from tenancy.database import Database
from tests.gateway.batches.made import order
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

ACCOUNT, OTHER = "a" * 32, "b" * 32
LEASE_S = BatchSettings().lease_seconds
BYTES_MAX = 32_000


@pytest.fixture
def store(database: Database, clock: SettableClock) -> BatchStore:
    settings = BatchSettings(account_batches_max=3, account_lines_max=2_000, account_batch_bytes_max=BYTES_MAX)
    return BatchStore(database, settings, clock=clock, told=lambda *_: None)


@pytest.fixture
def files(database: Database, clock: SettableClock) -> FileStore:
    return FileStore(database, clock=clock, account_bytes_max=2_048)


def say(_batch: Batch, line: Undone) -> bytes:
    return f"{line.number} {line.state.value}".encode()


def claimed(store: BatchStore, batch: Batch, owner: str = "me") -> Line:
    line = store.claim(batch.id, owner)
    assert line is not None
    return line


def run(store: BatchStore, batch: Batch, state: LineState = LineState.SUCCEEDED) -> None:
    line = claimed(store, batch)
    assert store.end(line, state, b"said", TokenUsage(3, 1, 2))


def advanced(store: BatchStore, batch: Batch) -> BatchState:
    store.advance(batch.id, say)
    return store.get(batch.account_id, batch.id).state


def test_a_batch_is_one_processs_until_its_lease_ends(store: BatchStore, clock: SettableClock) -> None:
    batch = store.create(ACCOUNT, order(3))
    assert claimed(store, batch, "me").number == 0
    assert store.claim(batch.id, "other") is None
    clock.advance_s(LEASE_S - 1)
    assert claimed(store, batch, "me").number == 1
    clock.advance_s(LEASE_S - 1)
    assert store.claim(batch.id, "other") is None
    clock.advance_s(2)
    assert claimed(store, batch, "other").number == 2
    assert store.claim(batch.id, "me") is None
    assert [line.number for line in store.left_running("me")] == [0, 1]
    assert [line.number for line in store.left_by_others([batch.id], "other")] == [0, 1]


def test_a_line_ends_once_and_only_as_the_attempt_that_runs(store: BatchStore) -> None:
    batch = store.create(ACCOUNT, order(1))
    first = claimed(store, batch)
    store.put_back(first, attempts=1, after_s=0)
    assert not store.end(first, LineState.SUCCEEDED, b"late", TokenUsage())
    second = claimed(store, batch)
    assert (second.attempts, second.request_id != first.request_id) == (1, True)
    assert store.end(second, LineState.SUCCEEDED, b"said", TokenUsage(3, 1, 2))
    assert not store.end(second, LineState.FAILED, b"again", TokenUsage(9, 9, 9))
    found = store.get(ACCOUNT, batch.id)
    assert (found.succeeded, found.failed, found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (
        1,
        0,
        3,
        1,
        2,
    )
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said"]


def test_a_line_that_was_put_back_waits_as_long_as_it_was_told(store: BatchStore, clock: SettableClock) -> None:
    batch = store.create(ACCOUNT, order(1))
    line = claimed(store, batch)
    store.put_back(line, attempts=0, after_s=5)
    assert store.claim(batch.id, "me") is None
    clock.advance_s(5)
    assert claimed(store, batch).number == line.number


def test_lines_of_a_process_that_is_no_more_are_anybodys(store: BatchStore, database: Database) -> None:
    batch = store.create(ACCOUNT, order(2))
    line = claimed(store, batch, "gone")
    assert store.left_running("other") == []
    with database.write() as connection:
        leave_to_anybody(connection, "gone")
    assert store.left_running("other") == store.left_running("another") == [line]
    store.put_back(line, attempts=1, after_s=0)
    assert store.left_running("other") == []
    assert not store.end(line, LineState.FAILED, b"judged late", TokenUsage()), "another was first"


def test_an_operator_sees_the_batches_of_all(store: BatchStore, clock: SettableClock) -> None:
    made = []
    for account in (ACCOUNT, OTHER, ACCOUNT):
        made.append(store.create(account, order(1)))
        clock.advance_s(1)
    run(store, made[0])
    while store.advance(made[0].id, say):
        pass
    assert [batch.id for batch in store.newest(None, ended=False, limit=9)] == [made[2].id, made[1].id]
    assert [batch.id for batch in store.newest(ACCOUNT, ended=True, limit=9)] == [made[2].id, made[0].id]
    assert store.find(made[1].id).account_id == OTHER
    with pytest.raises(BatchNotFound):
        store.find("batch_none")


def test_a_batch_whose_lines_have_ended_is_finalized_and_complete(store: BatchStore, files: FileStore) -> None:
    batch = store.create(ACCOUNT, order(2))
    run(store, batch)
    assert advanced(store, batch) is BatchState.IN_PROGRESS
    run(store, batch, LineState.FAILED)
    assert advanced(store, batch) is BatchState.FINALIZING
    assert advanced(store, batch) is BatchState.COMPLETED
    found = store.get(ACCOUNT, batch.id)
    assert found.output_file_id is not None
    assert found.error_file_id is not None
    output = files.get(ACCOUNT, found.output_file_id)
    assert (output.bytes, files.answers(output, -1)) == (5, (b"said\n", 0))
    files.delete(ACCOUNT, output.id)
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said"]  # of the other file


def test_only_some_megabytes_of_answers_are_read_at_once(
    store: BatchStore, files: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.line_rows.ANSWERS_BYTES_AT_ONCE", 10)
    batch = store.create(ACCOUNT, order(4))
    for said in (b"four", b"fours", b"more than is read at once", b"last"):
        assert store.end(claimed(store, batch), LineState.SUCCEEDED, said, TokenUsage())
    while store.advance(batch.id, say):
        pass
    file = files.get(ACCOUNT, store.get(ACCOUNT, batch.id).output_file_id or "")
    pieces, after = [], -1
    while (found := store.answers(ACCOUNT, batch.id, after))[0]:
        pieces.append((found[0], files.answers(file, after)))
        after = found[1]
    assert pieces == [
        ([b"four", b"fours"], (b"four\nfours\n", 1)),
        ([b"more than is read at once"], (b"more than is read at once\n", 2)),
        ([b"last"], (b"last\n", 3)),
    ]
    assert files.answers(file, after) == (b"", 3)


def test_what_has_not_begun_in_time_expires(store: BatchStore, clock: SettableClock) -> None:
    batch = store.create(ACCOUNT, order(3, window_s=60))
    line = claimed(store, batch)
    clock.advance_s(60)
    assert store.claim(batch.id, "me") is None
    assert advanced(store, batch) is BatchState.IN_PROGRESS  # one still runs
    assert store.end(line, LineState.SUCCEEDED, b"said", TokenUsage())
    assert advanced(store, batch) is BatchState.EXPIRED
    assert store.answers(ACCOUNT, batch.id)[0] == [b"said", b"1 expired", b"2 expired"]


def test_a_cancelled_batch_ends_when_nothing_runs(store: BatchStore) -> None:
    batch = store.create(ACCOUNT, order(3))
    line = claimed(store, batch)
    assert store.cancel(ACCOUNT, batch.id).state is BatchState.CANCELLING
    assert store.cancel(ACCOUNT, batch.id).state is BatchState.CANCELLING
    assert store.claim(batch.id, "me") is None
    assert advanced(store, batch) is BatchState.CANCELLING
    store.put_back(line, attempts=1, after_s=0)
    assert advanced(store, batch) is BatchState.CANCELLED
    assert store.answers(ACCOUNT, batch.id)[0] == [b"0 cancelled", b"1 cancelled", b"2 cancelled"]
    with pytest.raises(BatchNotCancellable):
        store.cancel(ACCOUNT, batch.id)


def test_another_accounts_batch_is_unknown(store: BatchStore) -> None:
    batch = store.create(ACCOUNT, order(1))
    for deed in (store.get, store.cancel):
        with pytest.raises(BatchNotFound):
            deed(OTHER, batch.id)
    assert store.answers(OTHER, batch.id)[0] == []
    assert store.page(OTHER, tuple(FormName), after=None, limit=9) == ([], False)


def test_an_account_has_a_bounded_number_of_open_batches(store: BatchStore) -> None:
    made = [store.create(ACCOUNT, order(1)) for _ in range(3)]
    with pytest.raises(BatchesFull):
        store.create(ACCOUNT, order(1))
    store.create(OTHER, order(1))
    run(store, made[0])
    while store.advance(made[0].id, say):
        pass
    store.create(ACCOUNT, order(1))


def test_an_account_keeps_a_bounded_number_of_requests_whatever_became_of_their_batches(
    store: BatchStore, clock: SettableClock
) -> None:
    batch = store.create(ACCOUNT, order(1_200))
    store.cancel(ACCOUNT, batch.id)
    while store.advance(batch.id, say):
        pass
    with pytest.raises(BatchesFull, match="at most 2000 requests"):
        store.create(ACCOUNT, order(801))
    store.create(OTHER, order(801))
    clock.advance_s(3_600)
    while store.sweep():
        pass
    store.create(ACCOUNT, order(801))


class TestBytes:
    """What an account's batches take has a bound, whatever their lines ask and say."""

    def test_are_those_of_what_is_asked_and_then_of_what_is_said(
        self, store: BatchStore, files: FileStore, database: Database
    ) -> None:
        batch = store.create(ACCOUNT, order(5, body=b"x" * 100))
        assert stored(store, batch) == 500
        store.keep(claimed(store, batch), b"kept by a line that runs")
        assert stored(store, batch) == 500
        run(store, batch)
        run(store, batch, LineState.FAILED)
        assert stored(store, batch) == 308
        store.cancel(ACCOUNT, batch.id)
        store.advance(batch.id, say)
        assert stored(store, batch) == 100 + 2 * len("said") + 2 * len("0 cancelled")
        left = store.left_running("me")[0]
        assert store.end(left, LineState.SUCCEEDED, b"at last", TokenUsage())
        while store.advance(batch.id, say):
            pass
        assert stored(store, batch) == _in_lines(database) == len("at last") + 2 * len("said") + 2 * len("0 cancelled")
        files.delete(ACCOUNT, str(store.get(ACCOUNT, batch.id).output_file_id))
        assert stored(store, batch) == _in_lines(database) == len("said") + 2 * len("0 cancelled")

    def test_of_a_file_count_before_it_is_read(self, store: BatchStore) -> None:
        from_file = replace(order(0), lines=None, input_file_id="file-1", input_bytes=20_000)
        first = store.create(ACCOUNT, from_file)
        with pytest.raises(BatchesFull, match=f"at most {BYTES_MAX} bytes"):
            store.create(ACCOUNT, from_file)
        store.create(OTHER, from_file)
        lines = order(3, body=b"x" * 1_000).lines or ()
        assert store.add_lines(first, lines)
        store.begin(first, "model", lines)
        assert stored(store, first) == 3_000
        second = store.create(ACCOUNT, from_file)
        store.fail(second, [])
        assert stored(store, second) == 0

    def test_that_are_all_taken_end_what_waits_and_cost_nothing(self, store: BatchStore, files: FileStore) -> None:
        batch, other = store.create(ACCOUNT, order(1_003)), store.create(OTHER, order(1))
        assert store.end(claimed(store, batch), LineState.SUCCEEDED, b"x" * BYTES_MAX, TokenUsage(3, 1, 2))
        assert store.claim(batch.id, "me") is None
        claimed(store, other)
        while store.advance(batch.id, say):
            pass
        found = store.get(ACCOUNT, batch.id)
        assert (found.state, found.succeeded, found.failed) == (BatchState.COMPLETED, 1, 1_002)
        assert found.errors[0]["code"] == "batches_full"
        assert store.answers(ACCOUNT, batch.id, 0)[0][:2] == [b"1 failed", b"2 failed"]
        with pytest.raises(BatchesFull):
            store.create(ACCOUNT, order(1))
        files.delete(ACCOUNT, str(found.output_file_id))
        store.create(ACCOUNT, order(1))

    def test_of_a_message_to_a_webhook_count_too(self, store: BatchStore) -> None:
        batch = store.create(ACCOUNT, replace(order(1, form=FormName.BACKGROUND), webhook="endpoint"))
        run(store, batch)
        while store.advance(batch.id, say):
            pass
        assert stored(store, batch) == 2 * len("said")


def stored(store: BatchStore, batch: Batch) -> int:
    return store.get(batch.account_id, batch.id).stored_bytes


def _in_lines(database: Database) -> int:
    taken = [sa.func.coalesce(sa.func.length(column), 0) for column in (batch_lines.c.body, batch_lines.c.answer)]
    with database.read() as connection:
        return int(connection.execute(sa.select(sa.func.sum(taken[0] + taken[1]))).scalar_one())


def test_batches_are_deleted_when_their_time_is_over(store: BatchStore, clock: SettableClock) -> None:
    batch = store.create(ACCOUNT, order(1_200))
    store.cancel(ACCOUNT, batch.id)
    while store.advance(batch.id, say):
        pass
    clock.advance_s(3_599)
    assert store.sweep() == 0
    clock.advance_s(1)
    gone = 0
    while some := store.sweep():
        gone += some
    assert gone == 1_201
    with pytest.raises(BatchNotFound):
        store.get(ACCOUNT, batch.id)


def test_a_batch_whose_time_is_over_is_gone_before_its_lines_are(store: BatchStore, clock: SettableClock) -> None:
    batch = store.create(ACCOUNT, order(600))
    store.cancel(ACCOUNT, batch.id)
    while store.advance(batch.id, say):
        pass
    clock.advance_s(3_600)
    store.sweep()
    with pytest.raises(BatchNotFound):
        store.get(ACCOUNT, batch.id)
    assert store.page(ACCOUNT, list(FormName), after=None, limit=10) == ([], False)


@pytest.mark.load
def test_one_sweep_takes_all_that_is_due(store: BatchStore, files: FileStore, clock: SettableClock) -> None:
    made = []
    for _ in range(45):
        made.append(store.create(ACCOUNT, order(1)).id)
        store.cancel(ACCOUNT, made[-1])
        while store.advance(made[-1], say):
            pass
    clock.advance_s(3_600)
    Batching(store, files, wake=lambda: None, figures=Figures(), run=_never).sweep()
    for batch_id in made:
        with pytest.raises(BatchNotFound):
            store.find(batch_id)


async def _never() -> None:
    """Nothing runs."""


def test_lines_that_are_added_again_are_the_same_lines(store: BatchStore) -> None:
    made = order(0)
    batch = store.create(ACCOUNT, made)
    assert batch.state is BatchState.IN_PROGRESS
    lines = order(4).lines
    assert lines is not None
    assert not store.add_lines(batch, lines), "it is not validated any more"


class TestFiles:
    def test_an_account_can_not_fill_the_database(self, files: FileStore) -> None:
        files.begin(ACCOUNT, "a", "batch", 2_000, 3_600)
        with pytest.raises(StoredFilesFull):
            files.begin(ACCOUNT, "b", "batch", 49, 3_600)
        files.begin(OTHER, "c", "batch", 2_048, 3_600)

    def test_an_account_has_a_bounded_number_of_files(self, database: Database, clock: SettableClock) -> None:
        files = FileStore(database, clock=clock, account_bytes_max=2_048, account_files_max=2)
        made = [files.begin(ACCOUNT, "a", "batch", 1, 3_600) for _ in range(2)]
        with pytest.raises(StoredFilesFull, match="at most 2 files"):
            files.begin(ACCOUNT, "b", "batch", 1, 3_600)
        files.begin(OTHER, "c", "batch", 1, 3_600)
        files.drop(ACCOUNT, made[0].id)
        files.begin(ACCOUNT, "b", "batch", 1, 3_600)

    def test_are_swept_when_due_and_when_their_upload_broke_off(self, files: FileStore, clock: SettableClock) -> None:
        short, long, broken = (files.begin(ACCOUNT, "a", "batch", 1, kept) for kept in (10, 10_000, 20_000))
        for file in (short, long):
            files.add_part(file.id, 0, b"x")
            files.finish(ACCOUNT, file.id)
        clock.advance_s(10)
        assert files.sweep() == 1
        with pytest.raises(StoredFileNotFound):
            files.get(ACCOUNT, short.id)
        clock.advance_s(3_600)
        assert files.sweep() == 1
        assert files.part(long, 0) == b"x"
        assert files.part(broken, 0) == b""
        with pytest.raises(StoredFileNotFound):
            files.get(OTHER, long.id)
