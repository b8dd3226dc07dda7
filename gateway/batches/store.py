"""Batches and their lines in SQL: every change of state is one transaction, decided by batch.py.

Synchronous, as all stores. The account's methods take its id first; those below are the runner's, for every account.
A line belongs to whoever moved it from waiting to running; what it says and that it has ended are written once.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import sqlalchemy as sa
import uuid_utils

from billing.tables import usage_events
from billing.usage import TokenUsage
from billing.webhooks.outbox import forget_one
from gateway.batches.batch import (
    CANCELLABLE,
    ENDED,
    STOPPED,
    Batch,
    BatchState,
    FormName,
    Line,
    LineState,
    NewLine,
    end_of_waiting,
    state_after,
)
from gateway.batches.files import answers_file
from gateway.batches.line_rows import (
    LINE,
    LINES_AT_ONCE,
    NOBODY,
    Undone,
    end_waiting,
    has_any,
    insert_lines,
    next_answers,
    of_this_attempt,
    recount,
)
from gateway.batches.settings import BatchSettings
from gateway.batches.tables import batch_lines, batches
from gateway.errors import BatchesFull, BatchNotCancellable, BatchNotFound
from tenancy.database import Database, take_turn

_SECOND_NS: Final = 1_000_000_000
_BATCHES_SWEPT_AT_ONCE: Final = 20
_NAMES: Final = tuple(Batch.__dataclass_fields__)
_TURN: Final = 0x7067_6262  # "pgbb": one process at a time counts an account's batches
_STAMPS: Final = {
    BatchState.IN_PROGRESS: "in_progress_at_ns",
    BatchState.FINALIZING: "finalizing_at_ns",
    BatchState.COMPLETED: "completed_at_ns",
    BatchState.FAILED: "failed_at_ns",
    BatchState.EXPIRED: "expired_at_ns",
    BatchState.CANCELLING: "cancelling_at_ns",
    BatchState.CANCELLED: "cancelled_at_ns",
}


@dataclass(frozen=True, slots=True)
class Order:
    """What a new batch is made of; where lines is None they are read from the file, of input_bytes, later. id: None to
    be given one.
    """

    key_id: str
    form: FormName
    endpoint: str
    model: str
    completion_window: str
    window_s: int
    answers_kept_s: int
    input_file_id: str | None = None
    input_bytes: int = 0
    lines: Sequence[NewLine] | None = None
    metadata: dict[str, str] | None = None
    webhook: str | None = None
    id: str | None = None


class BatchStore:
    """told: in the transaction in which a batch with a webhook ends, of it and of what its line says."""

    def __init__(
        self,
        database: Database,
        settings: BatchSettings,
        *,
        clock: Callable[[], int],
        told: Callable[[sa.Connection, Batch, bytes], None],
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._told = told

    # An account's

    def create(self, account_id: str, order: Order) -> Batch:
        """A batch that begins as soon as its lines are known. Raises BatchesFull."""
        now_ns = self._clock()
        batch = Batch(
            id=order.id or "batch_" + secrets.token_hex(16),
            account_id=account_id,
            key_id=order.key_id,
            form=order.form,
            endpoint=order.endpoint,
            model=order.model,
            input_file_id=order.input_file_id,
            state=BatchState.VALIDATING if order.lines is None else BatchState.IN_PROGRESS,
            completion_window=order.completion_window,
            created_at_ns=now_ns,
            expires_at_ns=now_ns + order.window_s * _SECOND_NS,
            answers_kept_s=order.answers_kept_s,
            in_progress_at_ns=None if order.lines is None else now_ns,
            metadata=order.metadata,
            webhook=order.webhook,
            lines=len(order.lines or ()),
            stored_bytes=order.input_bytes if order.lines is None else _asked_bytes(order.lines),
        )
        open_ones = sa.and_(batches.c.account_id == account_id, batches.c.state.not_in(ENDED))
        with self._database.write() as connection:
            take_turn(connection, _TURN)
            count = connection.scalar(sa.select(sa.func.count()).select_from(batches).where(open_ones)) or 0
            if count >= self._settings.account_batches_max:
                raise BatchesFull(
                    f"An account has at most {self._settings.account_batches_max} batches that have not ended.",
                    retry_after_s=60,
                )
            lines, stored_bytes = _kept(connection, account_id)
            if lines + batch.lines > self._settings.account_lines_max:
                raise BatchesFull(
                    f"The batches of an account that are kept have at most {self._settings.account_lines_max} requests"
                    " together: those that have ended are deleted after their time.",
                    retry_after_s=3_600,
                )
            if stored_bytes + batch.stored_bytes > self._settings.account_batch_bytes_max:
                raise BatchesFull(
                    "What the batches of an account ask and say has at most "
                    f"{self._settings.account_batch_bytes_max} bytes together: delete files of answers that were read, "
                    "or wait until their time is over.",
                    retry_after_s=3_600,
                )
            connection.execute(batches.insert().values({name: getattr(batch, name) for name in _NAMES}))
            insert_lines(connection, batch, order.lines or ())
        return batch

    def get(self, account_id: str, batch_id: str) -> Batch:
        """Raises BatchNotFound."""
        with self._database.read() as connection:
            return _found(connection, account_id, batch_id, self._clock())

    def page(
        self, account_id: str, forms: Sequence[FormName], *, after: str | None, limit: int
    ) -> tuple[list[Batch], bool]:
        """The account's batches, newest first, behind `after`; and whether there are more. Raises BatchNotFound."""
        now_ns = self._clock()
        mine = sa.and_(batches.c.account_id == account_id, batches.c.form.in_(forms), _is_kept(now_ns))
        query = sa.select(batches).where(mine)
        with self._database.read() as connection:
            if after is not None:
                last = _found(connection, account_id, after, now_ns)
                place = sa.tuple_(sa.literal(last.created_at_ns), sa.literal(last.id))
                query = query.where(sa.tuple_(batches.c.created_at_ns, batches.c.id) < place)
            query = query.order_by(batches.c.created_at_ns.desc(), batches.c.id.desc()).limit(limit + 1)
            found = [_batch(row) for row in connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def cancel(self, account_id: str, batch_id: str) -> Batch:
        """What waits will not run; what runs ends. Raises BatchNotFound, and BatchNotCancellable where it has ended."""
        now_ns = self._clock()
        with self._database.write() as connection:
            batch = _found(connection, account_id, batch_id, now_ns)
            if batch.state is BatchState.CANCELLING:
                return batch
            values = {"state": BatchState.CANCELLING, "cancelling_at_ns": now_ns}
            may = sa.and_(batches.c.id == batch_id, batches.c.state.in_(CANCELLABLE))
            if connection.execute(batches.update().where(may).values(values)).rowcount == 0:
                raise BatchNotCancellable(
                    f"The batch {batch_id} is {batch.state.value}: it can't be cancelled any more."
                )
            return _found(connection, account_id, batch_id, now_ns)

    def answers(self, account_id: str, batch_id: str, after: int = -1) -> tuple[list[bytes], int]:
        """The next ones, of lines behind number `after` that have one, and the last one's number; none at the end."""
        lines = batch_lines.c
        mine = sa.and_(lines.account_id == account_id, lines.batch_id == batch_id, lines.answer.is_not(None))
        with self._database.read() as connection:
            return next_answers(connection, mine, after)

    def costs_nano(self, account_id: str, batch_ids: Collection[str]) -> dict[str, int]:
        """What the lines of these batches have cost, by batch; without those that cost nothing.

        By each line's last attempt: those before it failed, and were free.
        """
        lines = batch_lines.c
        query = (
            sa.select(lines.batch_id, sa.func.sum(usage_events.c.cost_nano))
            .join(usage_events, usage_events.c.id == lines.request_id)
            .where(lines.account_id == account_id, lines.batch_id.in_(list(batch_ids)), usage_events.c.cost_nano > 0)
            .group_by(lines.batch_id)
        )
        with self._database.read() as connection:
            return {batch_id: int(cost) for batch_id, cost in connection.execute(query)}

    # An operator's

    def newest(self, account_id: str | None, *, ended: bool, limit: int) -> list[Batch]:
        """Of one account or of all, the newest first. ended: those too that are over."""
        query = sa.select(batches).order_by(batches.c.created_at_ns.desc(), batches.c.id.desc()).limit(limit)
        if account_id is not None:
            query = query.where(batches.c.account_id == account_id)
        if not ended:
            query = query.where(batches.c.state.not_in(ENDED))
        with self._database.read() as connection:
            return [_batch(row) for row in connection.execute(query).mappings()]

    def find(self, batch_id: str) -> Batch:
        """Whosever it is. Raises BatchNotFound."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(batches).where(batches.c.id == batch_id)).mappings().first()
        if row is None:
            raise BatchNotFound(batch_id)
        return _batch(row)

    # The runner's

    def open_batches(self) -> list[Batch]:
        """All that have not ended, oldest first."""
        query = sa.select(batches).where(batches.c.state.not_in(ENDED)).order_by(batches.c.created_at_ns, batches.c.id)
        with self._database.read() as connection:
            return [_batch(row) for row in connection.execute(query).mappings()]

    def lease(self, batch_id: str, owner: str) -> bool:
        """Take or renew the batch. False: another process has it, and has given a sign of life lately."""
        with self._database.write() as connection:
            return self._lease(connection, batch_id, owner)

    def add_lines(self, batch: Batch, lines: Sequence[NewLine]) -> bool:
        """Of a batch that is being validated; again is harmless. False: it is not validated any more."""
        with self._database.write() as connection:
            if _found(connection, batch.account_id, batch.id, self._clock()).state is not BatchState.VALIDATING:
                return False
            insert_lines(connection, batch, lines)
            return True

    def begin(self, batch: Batch, model: str, lines: Sequence[NewLine]) -> None:
        """Its lines are all known, and added."""
        self._move(batch, BatchState.IN_PROGRESS, model=model, lines=len(lines), stored_bytes=_asked_bytes(lines))

    def fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        """Its file can't be read."""
        kept_until_ns = self._clock() + self._settings.file_kept_seconds * _SECOND_NS
        self._move(batch, BatchState.FAILED, errors=errors, kept_until_ns=kept_until_ns, stored_bytes=0)

    def claim(self, batch_id: str, owner: str) -> Line | None:
        """The next line that may run now, which is then this process's; None if there is none, it is another's, or
        there is no room for what it will say. `advance` then ends those that wait.
        """
        now_ns = self._clock()
        lines = batch_lines.c
        waiting = sa.and_(lines.batch_id == batch_id, lines.state == LineState.WAITING)
        due = sa.and_(waiting, lines.not_before_ns <= now_ns)
        with self._database.write() as connection:
            if not self._lease(connection, batch_id, owner, BatchState.IN_PROGRESS, now_ns):
                return None
            row = connection.execute(sa.select(*LINE).where(due).order_by(lines.number).limit(1)).mappings().first()
            if row is None or self._is_full(connection, row["account_id"]):
                return None
            mine = batch_lines.update().where(waiting, lines.number == row["number"])
            taken = connection.execute(mine.values(state=LineState.RUNNING, owner=owner)).rowcount
            return Line(**row) if taken else None

    def keep(self, line: Line, answer: bytes) -> None:
        """What it will say, before its usage record ends."""
        with self._database.write() as connection:
            connection.execute(batch_lines.update().where(of_this_attempt(line)).values(answer=answer))

    def end(self, line: Line, state: LineState, answer: bytes, usage: TokenUsage) -> bool:
        """It has ended; what was asked is forgotten. False if that was known already."""
        with self._database.write() as connection:
            values = {"state": state, "answer": answer, "body": None}
            if connection.execute(batch_lines.update().where(of_this_attempt(line)).values(values)).rowcount == 0:
                return False
            counted = batches.c.succeeded if state is LineState.SUCCEEDED else batches.c.failed
            counts = {
                counted: counted + 1,
                batches.c.stored_bytes: batches.c.stored_bytes + len(answer) - len(line.body),
                batches.c.prompt_tokens: batches.c.prompt_tokens + usage.prompt,
                batches.c.cached_tokens: batches.c.cached_tokens + usage.cached,
                batches.c.completion_tokens: batches.c.completion_tokens + usage.completion,
            }
            connection.execute(batches.update().where(batches.c.id == line.batch_id).values(counts))
            return True

    def put_back(self, line: Line, *, attempts: int, after_s: float) -> None:
        """It may run again after a while, under an id that stands in no usage record yet."""
        values: dict[str, Any] = {
            "state": LineState.WAITING,
            "attempts": attempts,
            "answer": None,
            "not_before_ns": self._clock() + round(after_s * _SECOND_NS),
            "request_id": str(uuid_utils.uuid7()),
        }
        with self._database.write() as connection:
            connection.execute(batch_lines.update().where(of_this_attempt(line)).values(values))

    def left_running(self, owner: str) -> list[Line]:
        """What an earlier life of this process was running when it died; and of processes that are no more."""
        owned = batch_lines.c.owner.in_((owner, NOBODY))
        query = sa.select(*LINE).where(batch_lines.c.state == LineState.RUNNING, owned)
        with self._database.read() as connection:
            return [Line(**row) for row in connection.execute(query).mappings()]

    def left_by_others(self, batch_ids: Collection[str], owner: str) -> list[Line]:
        """What other processes have begun of these batches and not ended. Nobody's are not among them."""
        lines = batch_lines.c
        others = sa.and_(lines.state == LineState.RUNNING, lines.owner.not_in((owner, NOBODY)))
        theirs = sa.select(*LINE).where(others, lines.batch_id.in_(list(batch_ids)))
        with self._database.read() as connection:
            return [Line(**row) for row in connection.execute(theirs).mappings()]

    def advance(self, batch_id: str, say: Callable[[Batch, Undone], bytes]) -> bool:
        """Let a batch go on by itself: end what will not run, some lines at a time, then the batch. True if it went on.

        say: what a line says that never ran.
        """
        now_ns = self._clock()
        with self._database.write() as connection:
            row = connection.execute(sa.select(batches).where(batches.c.id == batch_id)).mappings().first()
            if row is None:
                return False
            batch = _batch(row)
            stopped = bool(batch.errors) or self._stop_if_full(connection, batch, now_ns)
            unrun = end_of_waiting(batch.state, now_ns=now_ns, expires_at_ns=batch.expires_at_ns, stopped=stopped)
            ended = 0 if unrun is None else end_waiting(connection, batch, unrun, say)
            expired = has_any(connection, batch_id, (LineState.EXPIRED,))
            undone = has_any(connection, batch_id, (LineState.WAITING, LineState.RUNNING))
            after = state_after(batch.state, undone=undone, expired=expired)
            if after is batch.state:
                return ended > 0
            values: dict[str, Any] = {"state": after, _STAMPS[after]: now_ns}
            if after in ENDED:
                kept_until_ns = now_ns + batch.answers_kept_s * _SECOND_NS
                values["kept_until_ns"] = kept_until_ns
                if batch.form is FormName.OPENAI:
                    for name, good in (("output_file_id", True), ("error_file_id", False)):
                        values[name] = answers_file(connection, batch.account_id, batch_id, good, now_ns, kept_until_ns)
            connection.execute(batches.update().where(batches.c.id == batch_id).values(values))
            if after in ENDED:
                recount(connection, batch_id)
            if after in ENDED and batch.webhook is not None:
                lines = batch_lines.c
                said = connection.scalar(sa.select(lines.answer).where(lines.batch_id == batch_id, lines.number == 0))
                self._told(connection, batch, said or b"{}")
                message = {batches.c.stored_bytes: batches.c.stored_bytes + len(said or b"")}
                connection.execute(batches.update().where(batches.c.id == batch_id).values(message))
            return True

    def sweep(self) -> int:
        """Delete batches that have been kept long enough, some lines at a time; returns how many rows went."""
        due = (
            sa.select(batches.c.id, batches.c.webhook)
            .where(batches.c.kept_until_ns <= self._clock(), batches.c.state.in_(ENDED))
            .order_by(batches.c.kept_until_ns)
            .limit(_BATCHES_SWEPT_AT_ONCE)
        )
        gone = 0
        with self._database.write() as connection:
            for batch_id, webhook in connection.execute(due).all():
                mine = batch_lines.c.batch_id == batch_id
                some = sa.select(batch_lines.c.number).where(mine).limit(LINES_AT_ONCE)
                lines = connection.execute(batch_lines.delete().where(mine, batch_lines.c.number.in_(some))).rowcount
                gone += lines
                if lines < LINES_AT_ONCE:
                    if webhook is not None:
                        forget_one(connection, webhook)
                    gone += connection.execute(batches.delete().where(batches.c.id == batch_id)).rowcount
        return gone

    def _is_full(self, connection: sa.Connection, account_id: str) -> bool:
        return _kept(connection, account_id)[1] >= self._settings.account_batch_bytes_max

    def _stop_if_full(self, connection: sa.Connection, batch: Batch, now_ns: int) -> bool:
        """Once there was no room for answers nothing more of the batch begins, though some be made meanwhile."""
        may_run = batch.state is BatchState.IN_PROGRESS and now_ns < batch.expires_at_ns
        if not may_run or not has_any(connection, batch.id, (LineState.WAITING,)):
            return False
        full = self._is_full(connection, batch.account_id)
        if full:
            connection.execute(batches.update().where(batches.c.id == batch.id).values(errors=[STOPPED]))
        return full

    def _lease(
        self,
        connection: sa.Connection,
        batch_id: str,
        owner: str,
        state: BatchState | None = None,
        now_ns: int | None = None,
    ) -> bool:
        at_ns = self._clock() if now_ns is None else now_ns
        free = sa.or_(batches.c.owner.is_(None), batches.c.owner == owner, batches.c.lease_until_ns < at_ns)
        mine = batches.update().where(batches.c.id == batch_id, free)
        if state is not None:
            mine = mine.where(batches.c.state == state, batches.c.expires_at_ns > at_ns)
        until_ns = at_ns + round(self._settings.lease_seconds * _SECOND_NS)
        return connection.execute(mine.values(owner=owner, lease_until_ns=until_ns)).rowcount > 0

    def _move(self, batch: Batch, state: BatchState, **values: Any) -> None:
        """From validating only: whoever cancelled it meanwhile has the last word."""
        values |= {"state": state, _STAMPS[state]: self._clock()}
        validating = sa.and_(batches.c.id == batch.id, batches.c.state == BatchState.VALIDATING)
        with self._database.write() as connection:
            connection.execute(batches.update().where(validating).values(values))


def _asked_bytes(lines: Sequence[NewLine]) -> int:
    return sum(len(line.body) for line in lines)


def _kept(connection: sa.Connection, account_id: str) -> tuple[int, int]:
    """Lines of the account's batches, and what they take in bytes."""
    sums = (sa.func.coalesce(sa.func.sum(batches.c[name]), 0) for name in ("lines", "stored_bytes"))
    lines, stored_bytes = connection.execute(sa.select(*sums).where(batches.c.account_id == account_id)).one()
    return int(lines), int(stored_bytes)


def _is_kept(now_ns: int) -> sa.ColumnElement[bool]:
    """Its time is not over: the sweep has not begun to take its lines."""
    return sa.or_(batches.c.kept_until_ns.is_(None), batches.c.kept_until_ns > now_ns)


def _found(connection: sa.Connection, account_id: str, batch_id: str, now_ns: int) -> Batch:
    mine = sa.and_(batches.c.account_id == account_id, batches.c.id == batch_id, _is_kept(now_ns))
    query = sa.select(batches).where(mine)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise BatchNotFound(batch_id)
    return _batch(row)


def _batch(row: sa.RowMapping) -> Batch:
    return replace(Batch(**row), state=BatchState(row["state"]), form=FormName(row["form"]))
