"""Files in SQL: uploaded ones as parts, and files of answers, which are views of a batch's lines.

Synchronous, as all stores: callers on an event loop run it through `Database.call`, one part at a time, so that no
transaction holds the writer for long. Every method takes the account first; another's file is as unknown as none.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from gateway.batches.batch import LineState
from gateway.batches.line_rows import next_answers, recount
from gateway.batches.tables import batch_lines, file_parts, files
from gateway.errors import StoredFileNotFound, StoredFilesFull
from tenancy.database import Database, take_turn

PART_BYTES: Final = 1 << 20
_SWEPT_AT_ONCE: Final = 20
_TURN: Final = 0x7067_6266  # "pgbf": one process at a time counts an account's files
# An upload that has not ended by then never will.
_UPLOAD_NS_MAX: Final = 3_600 * 1_000_000_000
_BAD: Final = (LineState.FAILED, LineState.CANCELLED, LineState.EXPIRED)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """batch_id, good: of a file of answers, whose they are and whether of the lines that succeeded."""

    id: str
    account_id: str
    purpose: str
    filename: str
    bytes: int
    complete: bool
    batch_id: str | None
    good: bool | None
    created_at_ns: int
    expires_at_ns: int


class FileStore:
    def __init__(
        self, database: Database, *, clock: Callable[[], int], account_bytes_max: int, account_files_max: int = 10_000
    ) -> None:
        self._database = database
        self._clock = clock
        self._account_bytes_max = account_bytes_max
        self._account_files_max = account_files_max

    def begin(self, account_id: str, filename: str, purpose: str, size: int, kept_s: int) -> StoredFile:
        """A file whose parts come next. Raises StoredFilesFull beyond the account's share."""
        now_ns = self._clock()
        file = StoredFile(
            id="file-" + secrets.token_hex(12),
            account_id=account_id,
            purpose=purpose,
            filename=filename,
            bytes=size,
            complete=False,
            batch_id=None,
            good=None,
            created_at_ns=now_ns,
            expires_at_ns=now_ns + kept_s * 1_000_000_000,
        )
        mine = sa.and_(files.c.account_id == account_id, files.c.batch_id.is_(None), files.c.expires_at_ns > now_ns)
        with self._database.write() as connection:
            take_turn(connection, _TURN)
            kept, count = connection.execute(
                sa.select(sa.func.coalesce(sa.func.sum(files.c.bytes), 0), sa.func.count()).where(mine)
            ).one()
            if count >= self._account_files_max:
                raise StoredFilesFull(f"An account has at most {self._account_files_max} files: delete some first.")
            if int(kept) + size > self._account_bytes_max:
                raise StoredFilesFull(
                    f"The files of an account have at most {self._account_bytes_max} bytes together: delete some first."
                )
            connection.execute(files.insert().values(_row(file)))
        return file

    def add_part(self, file_id: str, number: int, content: bytes) -> None:
        with self._database.write() as connection:
            connection.execute(file_parts.insert().values(file_id=file_id, number=number, content=content))

    def finish(self, account_id: str, file_id: str) -> None:
        """All parts are in: from now on it is there."""
        with self._database.write() as connection:
            connection.execute(files.update().where(_of(account_id, file_id)).values(complete=True))

    def get(self, account_id: str, file_id: str) -> StoredFile:
        """Raises StoredFileNotFound."""
        with self._database.read() as connection:
            return _found(connection, account_id, file_id, self._clock())

    def page(
        self, account_id: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[StoredFile], bool]:
        """The account's files from `after` on, and whether there are more. Raises StoredFileNotFound for it."""
        now_ns = self._clock()
        order = (files.c.created_at_ns, files.c.id)
        query = sa.select(files).where(
            files.c.account_id == account_id, files.c.complete, files.c.expires_at_ns > now_ns
        )
        with self._database.read() as connection:
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if after is not None:
                last = _found(connection, account_id, after, now_ns)
                place = sa.tuple_(*order), sa.tuple_(sa.literal(last.created_at_ns), sa.literal(last.id))
                query = query.where(place[0] < place[1] if newest_first else place[0] > place[1])
            query = query.order_by(*((column.desc() for column in order) if newest_first else order)).limit(limit + 1)
            found = [StoredFile(**row) for row in connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def delete(self, account_id: str, file_id: str) -> None:
        """Its contents too; of answers, the answers. Raises StoredFileNotFound."""
        with self._database.write() as connection:
            _delete(connection, _found(connection, account_id, file_id, self._clock()))

    def drop(self, account_id: str, file_id: str) -> None:
        """An upload that failed."""
        with self._database.write() as connection:
            connection.execute(file_parts.delete().where(file_parts.c.file_id == file_id))
            connection.execute(files.delete().where(_of(account_id, file_id)))

    def part(self, file: StoredFile, number: int) -> bytes:
        """The content's next stretch; empty at its end. Numbers go up from 0, by one."""
        query = sa.select(file_parts.c.content).where(file_parts.c.file_id == file.id, file_parts.c.number == number)
        with self._database.read() as connection:
            return connection.scalar(query) or b""

    def answers(self, file: StoredFile, after: int) -> tuple[bytes, int]:
        """The next lines of a file of answers, behind line number `after` (-1: from the start); empty at its end."""
        assert file.batch_id is not None, "asked of a file of answers"
        with self._database.read() as connection:
            found, last = next_answers(connection, _answers_of(file), after)
        return b"".join(answer + b"\n" for answer in found), last

    def sweep(self) -> int:
        """Delete what is due, and uploads that broke off; returns how many. The service calls it each minute."""
        now_ns = self._clock()
        broken = sa.and_(~files.c.complete, files.c.created_at_ns < now_ns - _UPLOAD_NS_MAX)
        due = sa.select(files).where(sa.or_(files.c.expires_at_ns <= now_ns, broken)).limit(_SWEPT_AT_ONCE)
        with self._database.write() as connection:
            found = [StoredFile(**row) for row in connection.execute(due).mappings()]
            for file in found:
                _delete(connection, file)
        return len(found)


def answers_file(  # noqa: PLR0917 - whose, of what, for how long
    connection: sa.Connection,
    account_id: str,
    batch_id: str,
    good: bool,  # noqa: FBT001 - as the column
    now_ns: int,
    expires_at_ns: int,
) -> str | None:
    """Make the file of a batch's good or bad answers in the caller's transaction; None if there are none."""
    file = StoredFile(
        id="file-" + secrets.token_hex(12),
        account_id=account_id,
        purpose="batch_output",
        filename=f"{batch_id}_{'output' if good else 'error'}.jsonl",
        bytes=0,
        complete=True,
        batch_id=batch_id,
        good=good,
        created_at_ns=now_ns,
        expires_at_ns=expires_at_ns,
    )
    size = sa.select(sa.func.sum(sa.func.length(batch_lines.c.answer) + 1)).where(_answers_of(file))
    total = connection.scalar(size)
    if not total:
        return None
    connection.execute(files.insert().values(_row(file) | {"bytes": int(total)}))
    return file.id


def _row(file: StoredFile) -> dict[str, object]:
    return {name: getattr(file, name) for name in StoredFile.__dataclass_fields__}


def _of(account_id: str, file_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(files.c.account_id == account_id, files.c.id == file_id)


def _found(connection: sa.Connection, account_id: str, file_id: str, now_ns: int) -> StoredFile:
    query = sa.select(files).where(_of(account_id, file_id), files.c.complete, files.c.expires_at_ns > now_ns)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise StoredFileNotFound(file_id)
    return StoredFile(**row)


def _answers_of(file: StoredFile) -> sa.ColumnElement[bool]:
    states = (LineState.SUCCEEDED,) if file.good else _BAD
    lines = batch_lines.c
    return sa.and_(lines.batch_id == file.batch_id, lines.state.in_(states), lines.answer.is_not(None))


def _delete(connection: sa.Connection, file: StoredFile) -> None:
    if file.batch_id is not None:
        connection.execute(batch_lines.update().where(_answers_of(file)).values(answer=None))
        recount(connection, file.batch_id)
    connection.execute(file_parts.delete().where(file_parts.c.file_id == file.id))
    connection.execute(files.delete().where(_of(file.account_id, file.id)))
