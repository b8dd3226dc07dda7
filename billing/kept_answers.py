"""Answers kept for a repeated Idempotency-Key: the same request again gets the same answer, and is charged once.

Called by api/idempotency.py around a request that carries a key. An answer holds what a model wrote, so it is kept for
a day (a setting), only because its client asked for it by sending a key, and nowhere else. Keys are kept as hashes.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import orjson
import sqlalchemy as sa

from billing.errors import AnswerNotKept, IdempotencyMismatch, RequestRunning
from billing.tables import idempotency_records
from tenancy.database import Database, insert_missing

_SWEPT_AT_ONCE = 1_000
_ENDED_AT_ONCE = 100
# An account's bytes are summed each time that a twentieth of its share was kept: that is milliseconds for ten thousand.
_LOOKS = 20

_RUNNING = "running"
_ANSWERED = "answered"
_ENDED = "ended"


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


class KeptAnswers:
    """process: a name that stays with this process's durable record, so that what others run is told apart."""

    def __init__(
        self,
        database: Database,
        *,
        process: str = "-",
        clock: Callable[[], int],
        kept_s: int,
        answer_bytes_max: int,
        keys_per_account_max: int,
        account_bytes_max: int,
    ) -> None:
        self._database = database
        self._process = process
        self._clock = clock
        self._kept_ns = kept_s * 1_000_000_000
        self._answer_bytes_max = answer_bytes_max
        self._keys_max = keys_per_account_max
        self._account_bytes_max = account_bytes_max
        self._kept_since: Counter[str] = Counter()  # bytes, by account, since its were summed last

    def begin(self, account_id: str, key: str, fingerprint: str, request_id: str) -> KeptAnswer | None:
        """The answer, if there is one; None if the key is new, and then it is taken: say how the request ends.

        Raises IdempotencyMismatch if the key was used for another request, RequestRunning while its own runs,
        AnswerNotKept if its own has ended and its answer can't be given again.
        """
        now_ns = self._clock()
        mine = _of(account_id, key)
        row = {
            "account_id": account_id,
            "key_hash": _hash(key),
            "fingerprint": fingerprint,
            "request_id": request_id,
            "state": _RUNNING,
            "process": self._process,
            "expires_at_ns": now_ns + self._kept_ns,
        }
        with self._database.write() as connection:
            connection.execute(idempotency_records.delete().where(mine, idempotency_records.c.expires_at_ns <= now_ns))
            insert_missing(connection, idempotency_records, [row])
            found = connection.execute(sa.select(idempotency_records).where(mine)).mappings().one()
            if found["request_id"] == request_id:
                self._make_room(connection, account_id)
                return None
        if found["fingerprint"] != fingerprint:
            raise IdempotencyMismatch("This Idempotency-Key was used for another request.")
        if found["state"] == _RUNNING:
            raise RequestRunning(
                f"A request with this Idempotency-Key is running: {found['request_id']}.", retry_after_s=1
            )
        if found["state"] == _ENDED:
            raise AnswerNotKept(
                f"The request with this Idempotency-Key was {found['request_id']}. Its answer can't be given again."
            )
        return KeptAnswer(found["status"], orjson.loads(found["headers"]), found["body"])

    def keep(self, account_id: str, key: str, request_id: str, answer: KeptAnswer) -> None:
        """The request is answered. An answer that is too large to be kept only ends it."""
        if len(answer.body) > self._answer_bytes_max:
            self.end(account_id, key, request_id)
            return
        headers = orjson.dumps(answer.headers).decode()
        self._update(
            account_id, key, request_id, state=_ANSWERED, status=answer.status, headers=headers, body=answer.body
        )
        self._kept_since[account_id] += len(answer.body)
        if self._kept_since[account_id] > self._account_bytes_max // _LOOKS:
            del self._kept_since[account_id]
            self._end_oldest(account_id)

    def end(self, account_id: str, key: str, request_id: str) -> None:
        """The request may have been charged and has no answer that could be given again: streams, and failures."""
        self._update(account_id, key, request_id, state=_ENDED)

    def forget(self, account_id: str, key: str, request_id: str) -> None:
        """The request was refused and costs nothing: the same key may try again."""
        with self._database.write() as connection:
            connection.execute(
                idempotency_records.delete().where(_of(account_id, key), idempotency_records.c.request_id == request_id)
            )

    def end_abandoned(self, *, everybodys: bool) -> int:
        """End what an earlier life of this process was running; called at start. Returns how many.

        everybodys: this is the only process of the database, so that whatever runs runs no more.
        """
        running = idempotency_records.c.state == _RUNNING
        gone = running if everybodys else sa.and_(running, idempotency_records.c.process == self._process)
        with self._database.write() as connection:
            return connection.execute(idempotency_records.update().where(gone).values(state=_ENDED)).rowcount

    def sweep(self) -> int:
        """Delete what has been kept long enough; returns how many. The service calls it each minute."""
        key = (idempotency_records.c.account_id, idempotency_records.c.key_hash)
        due = (
            sa.select(*key)
            .where(idempotency_records.c.expires_at_ns <= self._clock())
            .order_by(idempotency_records.c.expires_at_ns)
            .limit(_SWEPT_AT_ONCE)
        )
        with self._database.write() as connection:
            return connection.execute(idempotency_records.delete().where(sa.tuple_(*key).in_(due))).rowcount

    def _update(self, account_id: str, key: str, request_id: str, **values: object) -> None:
        with self._database.write() as connection:
            connection.execute(
                idempotency_records.update()
                .where(_of(account_id, key), idempotency_records.c.request_id == request_id)
                .values(values)
            )

    def _make_room(self, connection: sa.Connection, account_id: str) -> None:
        """Forget the account's oldest answers beyond its share, so that no account can fill the table."""
        mine = idempotency_records.c.account_id == account_id
        count = connection.scalar(sa.select(sa.func.count()).select_from(idempotency_records).where(mine)) or 0
        if count <= self._keys_max:
            return
        oldest = (
            sa.select(idempotency_records.c.key_hash)
            .where(mine, idempotency_records.c.state != _RUNNING)
            .order_by(idempotency_records.c.expires_at_ns)
            .limit(count - self._keys_max)
        )
        connection.execute(
            idempotency_records.delete().where(mine, idempotency_records.c.key_hash.in_(oldest.scalar_subquery()))
        )

    def _end_oldest(self, account_id: str) -> None:
        """Beyond the account's bytes answers go and keys stay, so that nothing is run and charged again."""
        records = idempotency_records.c
        mine = sa.and_(records.account_id == account_id, records.state == _ANSWERED)
        newest_first = (records.expires_at_ns.desc(), records.key_hash)
        taken = sa.func.sum(sa.func.length(records.body))
        with self._database.read() as connection:
            if (connection.scalar(sa.select(taken).where(mine)) or 0) <= self._account_bytes_max:
                return
            ranked = sa.select(records.key_hash, taken.over(order_by=newest_first).label("taken")).where(mine)
            of = ranked.subquery().c
            gone = list(connection.scalars(sa.select(of.key_hash).where(of.taken > self._account_bytes_max)))
        # To look takes seconds where there is much: nobody who writes waits for that.
        ended = {"state": _ENDED, "status": None, "headers": None, "body": None}
        for start in range(0, len(gone), _ENDED_AT_ONCE):
            some = records.key_hash.in_(gone[start : start + _ENDED_AT_ONCE])
            with self._database.write() as connection:
                connection.execute(idempotency_records.update().where(mine, some).values(ended))


def _of(account_id: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(idempotency_records.c.account_id == account_id, idempotency_records.c.key_hash == _hash(key))


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
