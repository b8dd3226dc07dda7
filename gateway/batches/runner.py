"""Runs batches while engines are idle: reads their files, feeds their lines, ends them, and picks up after a death.

One task of the composition root in every process. A batch is one process's at a time, by a lease that it renews; a line
is whose it was moved from waiting to running. The order of things for a line is what makes it run and cost once: its
request id is fixed before it begins, what it says is kept before its usage record ends, and a line that was running in
a process that died is judged by that record (decision 0076).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from billing.errors import BillingUnavailable
from billing.store import UsageEvent
from billing.usage import TokenUsage
from gateway.batches.batch import Batch, BatchState, Line, LineState, NewLine
from gateway.batches.files import FileStore
from gateway.batches.form import Answered, Cut, Forms, Fruitless, Later, LineEnd, LineReader
from gateway.batches.judging import Judge
from gateway.batches.line_rows import Undone
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from gateway.batches.turns import next_turn
from gateway.errors import StoredFileNotFound
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LINES_AT_ONCE: Final = 500
# How often SQL is asked for batches, if nothing of this process wakes us: others make and cancel some, too.
_LOOK_S: Final = 2.0
# How often models are asked for room while batches are open. That is a look at numbers in memory.
_ROOM_S: Final = 0.25
# How long a batch is not asked for a line again that had none.
_QUIET_S: Final = 1.0
_AWAY_S: Final = 1.0
_ERRORS_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """owner: the name of this process, in this life and the next. reader: of the file of a batch for an endpoint, with
    so many lines at most. room: may background work begin at this model now? recorded: returns when every ended request
    is in SQL. event: the usage record of an account's request.
    """

    database: Database
    store: BatchStore
    files: FileStore
    forms: Forms
    reader: Callable[[str, int], LineReader]
    settings: BatchSettings
    owner: str
    room: Callable[[str], bool]
    recorded: Callable[[], Any]
    event: Callable[[str, str], UsageEvent]


class BatchRunner:
    def __init__(self, parts: RunnerParts, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._parts = parts
        self._store = parts.store
        self._call = parts.database.call
        self._clock = clock
        self._judge = Judge(
            database=parts.database,
            store=parts.store,
            forms=parts.forms,
            settings=parts.settings,
            owner=parts.owner,
            event=parts.event,
        )
        self._woken = asyncio.Event()
        self._open: list[Batch] = []  # as they were when SQL was asked last
        self._look_at = 0.0  # when it is asked next
        self._running: dict[tuple[str, int], Line] = {}
        self._by_model: Counter[str] = Counter()
        self._by_account: Counter[str] = Counter()
        self._by_batch: Counter[str] = Counter()
        self._beginning: set[str] = set()  # models with a line that is not inside yet: one at a time
        self._validating: set[str] = set()
        self._served: dict[str, int] = {}
        self._turn = 0
        self._rests: dict[tuple[str, str], float] = {}  # models and accounts without room, quiet batches: until when
        self._renewed_at = 0.0
        self.figures = self._judge.figures

    def wake(self) -> None:
        """There is something new to do, which SQL knows."""
        self._look_at = 0.0
        self._woken.set()

    async def run(self) -> None:
        """For ever. While the database is away nothing begins, and nothing is lost."""
        await self._until_done(self._pick_up)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._woken.clear()
                await self._until_done(partial(self._round, tasks))
                try:
                    async with asyncio.timeout(_ROOM_S if self._open else _LOOK_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass

    async def _until_done(self, deed: Callable[[], Any]) -> Any:
        while True:
            try:
                return await deed()
            except (TenancyUnavailable, BillingUnavailable) as error:
                log.warning("batches wait", reason=error.message)
            except Exception:
                # The loop of a worker: a bug must not end the process, and must not go unseen.
                log.exception("batches failed")
            await asyncio.sleep(_AWAY_S)

    # After a death

    async def _pick_up(self) -> None:
        """Of an earlier life, and of this one: a call to the database that took too long may have claimed a line."""
        found = await self._call(self._store.left_running, self._parts.owner)
        left = [line for line in found if (line.batch_id, line.number) not in self._running]
        if left:
            await self._parts.recorded()
            for line in left:
                await self._judge.judge(line, begun=False)
            log.warning("lines of batches picked up", count=len(left))

    # A round

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        """Everything that can be done now."""
        if time.monotonic() >= self._look_at:
            await self._look(tasks)
        await self._renew()
        ready = [batch for batch in self._open if batch.state is BatchState.IN_PROGRESS and self._may_have(batch)]
        for model in sorted({batch.model for batch in ready}):
            await self._feed(model, [batch for batch in ready if batch.model == model], tasks)

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Which batches are open, and what has to be done with each that is no line of it."""
        self._look_at = time.monotonic() + _LOOK_S
        self._open = await self._call(self._store.open_batches)
        self.figures.open_batches = len(self._open)
        self.figures.undone = sum(batch.lines - batch.succeeded - batch.failed for batch in self._open)
        for batch in self._open:
            if batch.state is BatchState.VALIDATING:
                await self._begin_validating(batch, tasks)
            elif batch.state is not BatchState.IN_PROGRESS or self._clock() >= batch.expires_at_ns or _is_over(batch):
                await self._advance(batch)

    def _may_have(self, batch: Batch) -> bool:
        rests = self._rests_now("account", batch.account_id) or self._rests_now("batch", batch.id)
        return self._is_free(batch) and not rests and not batch.errors

    def _is_free(self, batch: Batch) -> bool:
        return batch.owner in (None, self._parts.owner) or batch.lease_until_ns < self._clock()

    def _rests_now(self, kind: str, name: str) -> bool:
        return self._rests.get((kind, name), 0.0) > time.monotonic()

    async def _feed(self, model: str, ready: list[Batch], tasks: asyncio.TaskGroup) -> None:
        """Begin a line, if there is room for one: the next begins once this one is inside."""
        while ready and self._has_room(model):
            batch = next_turn(ready, self._by_account, self._served)
            assert batch is not None, "some are ready"
            self._turn += 1
            self._served[batch.account_id] = self._turn
            line = await self._call(self._store.claim, batch.id, self._parts.owner)
            if line is None:
                ready = [other for other in ready if other is not batch]
                self._rests["batch", batch.id] = time.monotonic() + _QUIET_S
                if not self._by_batch[batch.id]:
                    await self._advance(batch)
                continue
            self._note(batch, line, 1)
            self._beginning.add(model)
            tasks.create_task(self._run_line(batch, line), name=f"line {line.number} of {batch.id}")

    def _has_room(self, model: str) -> bool:
        return (
            model not in self._beginning
            and self._by_model[model] < self._parts.settings.at_once_max
            and not self._rests_now("model", model)
            and self._parts.room(model)
        )

    def _note(self, batch: Batch, line: Line, change: int) -> None:
        if change > 0:
            self._running[batch.id, line.number] = line
        else:
            del self._running[batch.id, line.number]
        self._by_model[batch.model] += change
        self._by_account[batch.account_id] += change
        self._by_batch[batch.id] += change
        if not self._by_batch[batch.id]:
            del self._by_batch[batch.id]
        if not self._by_account[batch.account_id]:
            del self._by_account[batch.account_id]
        self.figures.running = len(self._running)

    async def _renew(self) -> None:
        """Say that the batches that run here are being worked on, and see that none of their lines is forgotten."""
        now = time.monotonic()
        if now - self._renewed_at < self._parts.settings.lease_seconds / 3:
            return
        self._renewed_at = now
        await self._pick_up()
        for batch_id in list(self._by_batch):
            await self._call(self._store.lease, batch_id, self._parts.owner)
        await self._judge.take_over([batch for batch in self._open if self._is_free(batch)])
        self._rests = {place: until for place, until in self._rests.items() if until > now}
        if not self._by_account:
            self._served.clear()

    async def _advance(self, batch: Batch) -> None:
        if not await self._call(self._store.lease, batch.id, self._parts.owner):
            return
        if self._clock() >= batch.expires_at_ns:
            await self._judge.give_up(batch)
        if await self._call(self._store.advance, batch.id, self._say):
            self.wake()

    def _say(self, batch: Batch, line: Undone) -> bytes:
        self.figures.ended[line.state.value] += 1
        return self._parts.forms(batch).unrun(batch, line)

    # One line

    async def _run_line(self, batch: Batch, line: Line) -> None:
        begun = partial(self._has_begun, batch.model)
        try:
            keep = partial(self._keep, line)
            end: LineEnd = await self._parts.forms(batch).run(batch, line, keep, begun)
            await self._close(batch, line, end)
        except Exception:
            # The rim of a worker: a bug must not end the process. The record says what became of the line.
            log.exception("a line failed", batch_id=batch.id, line=line.number)
            await self._until_done(partial(self._judge_again, line))
        finally:
            begun()
            self._note(batch, line, -1)
            self._rests.pop(("batch", batch.id), None)
            if batch.id in self._by_batch:
                self._woken.set()
            else:
                self.wake()

    async def _judge_again(self, line: Line) -> None:
        await self._parts.recorded()
        for left in await self._call(self._store.left_running, self._parts.owner):
            if (left.batch_id, left.request_id) == (line.batch_id, line.request_id):
                await self._judge.judge(left, begun=True)

    def _has_begun(self, model: str) -> None:
        if model in self._beginning:
            self._beginning.discard(model)
            self._woken.set()

    async def _keep(self, line: Line, answer: bytes) -> None:
        await self._until_done(partial(self._call, self._store.keep, line, answer))

    async def _close(self, batch: Batch, line: Line, end: LineEnd) -> None:
        settings = self._parts.settings
        match end:
            case Answered():
                state = LineState.SUCCEEDED if end.good else LineState.FAILED
                await self._end(line, state, end.answer, end.usage)
            case Later():
                place = ("account", batch.account_id) if end.account_alone else ("model", batch.model)
                self._rests[place] = time.monotonic() + end.after_s
                await self._put_back(line, attempts=line.attempts, after_s=0)
            case Fruitless() if line.attempts + 1 < settings.attempts_max:
                await self._put_back(line, attempts=line.attempts + 1, after_s=end.after_s)
            case Cut():
                await self._until_done(partial(self._judge_again, line))
            case Fruitless():
                await self._end(line, LineState.FAILED, end.answer, TokenUsage())

    async def _put_back(self, line: Line, *, attempts: int, after_s: float) -> None:
        back = partial(self._store.put_back, line, attempts=attempts, after_s=after_s)
        await self._until_done(partial(self._call, back))

    async def _end(self, line: Line, state: LineState, answer: bytes, usage: TokenUsage) -> None:
        await self._until_done(partial(self._judge.end, line, state, answer, usage))

    # A new file

    async def _begin_validating(self, batch: Batch, tasks: asyncio.TaskGroup) -> None:
        if self._validating or not await self._call(self._store.lease, batch.id, self._parts.owner):
            return  # one at a time: a file's lines are in memory while they are checked
        self._validating.add(batch.id)
        tasks.create_task(self._validate_safely(batch), name=f"validate {batch.id}")

    async def _validate_safely(self, batch: Batch) -> None:
        try:
            await self._validate(batch)
        except (TenancyUnavailable, BillingUnavailable):
            log.warning("a batch's file waits", batch_id=batch.id)  # the next round begins anew
        except Exception:
            # The rim of a worker: one file must not end the process.
            log.exception("a batch's file could not be checked", batch_id=batch.id)
            await self._fail(batch, [_error("server_error", "The file could not be checked.")])
        finally:
            self._validating.discard(batch.id)
            self.wake()

    async def _validate(self, batch: Batch) -> None:
        reader = self._parts.reader(batch.endpoint, self._parts.settings.lines_max)
        try:
            lines = await self._read(batch, reader)
        except StoredFileNotFound:
            await self._fail(batch, [_error("invalid_input_file", "The input file was deleted.")])
            return
        model = reader.end()
        if reader.errors:
            await self._fail(batch, reader.errors[:_ERRORS_MAX])
            return
        for start in range(0, len(lines), _LINES_AT_ONCE):
            if not await self._call(self._store.add_lines, batch, lines[start : start + _LINES_AT_ONCE]):
                return
        await self._call(self._store.begin, batch, model, lines)

    async def _read(self, batch: Batch, reader: LineReader) -> list[NewLine]:
        assert batch.input_file_id is not None, "a batch that is validated has a file"
        files, lines, rest, part, size = self._parts.files, [], b"", 0, 0
        file = await self._call(files.get, batch.account_id, batch.input_file_id)
        number = 0
        while content := await self._call(files.part, file, part):
            *whole, rest = (rest + content).split(b"\n")
            part += 1
            size += len(content)
            lines += await asyncio.to_thread(_seen, reader, number, whole)
            number += len(whole)
        if size < file.bytes:
            raise StoredFileNotFound(file.id)  # deleted meanwhile: its first half is no batch
        lines += await asyncio.to_thread(_seen, reader, number, [rest])
        return lines

    async def _fail(self, batch: Batch, errors: list[dict[str, Any]]) -> None:
        await self._until_done(partial(self._call, self._store.fail, batch, errors))


def _is_over(batch: Batch) -> bool:
    """All its lines have ended, or those that wait will not run: that needs no room at any engine."""
    return batch.succeeded + batch.failed >= batch.lines or bool(batch.errors)


def _seen(reader: LineReader, number: int, texts: list[bytes]) -> list[NewLine]:
    """Blank lines are none; the others keep their place in the file as their number."""
    found = (reader.see(number + at, text) for at, text in enumerate(texts) if text.strip())
    return [line for line in found if line is not None]


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "line": None, "message": message, "param": None}
