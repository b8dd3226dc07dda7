"""Answers that are kept so that a conversation can go on from them: `previous_response_id` of the Responses API.

An answer is what a model wrote for an account, so it is kept only where the request asks for it, for a bounded time, in
a bounded number for each account, and can be deleted. What is kept are opaque JSON texts: the dialect reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from gateway.errors import AnswerUnknown
from tenancy.database import Database

metadata = sa.MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

kept_conversations = sa.Table(
    "kept_conversations",
    metadata,
    sa.Column("account_id", sa.String(32), primary_key=True),
    sa.Column("response_id", sa.String(36), primary_key=True),
    sa.Column("expires_at_ns", sa.BigInteger, nullable=False),
    sa.Column("turns", sa.LargeBinary, nullable=False),
    sa.Column("answer", sa.LargeBinary, nullable=False),
    sa.Index("ix_kept_conversations_expires_at_ns", "expires_at_ns"),
)

_SWEPT_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Conversation:
    """turns: what was said up to the answer, and it. answer: the answer as it was given. Both are JSON."""

    turns: bytes
    answer: bytes


class Conversations:
    """kept_s: how long, from the answer on. bytes_max: of one conversation, which an account's bytes have room for.
    per_account_max, account_bytes_max: the oldest go first.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], int],
        kept_s: int,
        bytes_max: int,
        per_account_max: int,
        account_bytes_max: int,
    ) -> None:
        self._database = database
        self._clock = clock
        self._kept_ns = kept_s * 1_000_000_000
        self._bytes_max = bytes_max
        self._per_account_max = per_account_max
        self._account_bytes_max = account_bytes_max

    def fits(self, conversation: Conversation) -> bool:
        return len(conversation.turns) + len(conversation.answer) <= self._bytes_max

    def keep(self, account_id: str, response_id: str, conversation: Conversation) -> None:
        """One that fits. Keeping it again changes nothing but its time."""
        assert self.fits(conversation), "what is too large is told of, not kept"
        row = {
            "account_id": account_id,
            "response_id": response_id,
            "expires_at_ns": self._clock() + self._kept_ns,
            "turns": conversation.turns,
            "answer": conversation.answer,
        }
        kept = kept_conversations.c
        mine = kept.account_id == account_id
        newest_first = (kept.expires_at_ns.desc(), kept.response_id.desc())
        taken = sa.func.sum(sa.func.length(kept.turns) + sa.func.length(kept.answer)).over(order_by=newest_first)
        number = sa.func.row_number().over(order_by=newest_first)
        ranked = sa.select(kept.response_id, number.label("number"), taken.label("taken")).where(mine).subquery()
        newest = sa.select(ranked.c.response_id).where(
            ranked.c.number <= self._per_account_max, ranked.c.taken <= self._account_bytes_max
        )
        with self._database.write() as connection:
            connection.execute(kept_conversations.delete().where(_of(account_id, response_id)))
            connection.execute(kept_conversations.insert().values(row))
            connection.execute(kept_conversations.delete().where(mine, kept.response_id.not_in(newest)))

    def get(self, account_id: str, response_id: str) -> Conversation:
        """Raises AnswerUnknown, for another account's as for one that never was."""
        kept = sa.select(kept_conversations.c.turns, kept_conversations.c.answer).where(
            _of(account_id, response_id), kept_conversations.c.expires_at_ns > self._clock()
        )
        with self._database.read() as connection:
            found = connection.execute(kept).one_or_none()
        if found is None:
            raise AnswerUnknown(response_id)
        return Conversation(*found)

    def delete(self, account_id: str, response_id: str) -> None:
        """Raises AnswerUnknown."""
        with self._database.write() as connection:
            if not connection.execute(kept_conversations.delete().where(_of(account_id, response_id))).rowcount:
                raise AnswerUnknown(response_id)

    def sweep(self) -> int:
        """Delete what has been kept long enough; returns how many. The service calls it each minute."""
        key = (kept_conversations.c.account_id, kept_conversations.c.response_id)
        due = (
            sa.select(*key)
            .where(kept_conversations.c.expires_at_ns <= self._clock())
            .order_by(kept_conversations.c.expires_at_ns)
            .limit(_SWEPT_AT_ONCE)
        )
        with self._database.write() as connection:
            return connection.execute(kept_conversations.delete().where(sa.tuple_(*key).in_(due))).rowcount


def _of(account_id: str, response_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(kept_conversations.c.account_id == account_id, kept_conversations.c.response_id == response_id)
