"""Messages that wait to be sent, one for each endpoint of the account: written in the transaction of what they tell.

A message's id names its fact, so that a fact that is posted again is told once, and a receiver that gets a message
twice can drop the second. alerts.py and invoices/close.py write; courier.py sends.
"""

from dataclasses import dataclass
from typing import Any

import orjson
import sqlalchemy as sa

from billing.tables import webhook_endpoints, webhook_messages
from tenancy.database import insert_missing

_CLAIMED_CHARS_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """id: of the fact. kind: "budget.threshold_reached" or "invoice.issued". data: plain JSON."""

    id: str
    kind: str
    occurred_at: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message that is due, with what is needed to send it. position orders an endpoint's messages."""

    position: int
    endpoint_id: str
    url: str
    secret: str
    id: str
    body: str
    attempts: int
    created_at_ns: int


def enqueue(connection: sa.Connection, account_id: str, message: Message, now_ns: int) -> None:
    """To every endpoint that the account has now, in the caller's write transaction."""
    endpoints = connection.scalars(
        sa.select(webhook_endpoints.c.id)
        .where(webhook_endpoints.c.account_id == account_id, webhook_endpoints.c.removed_at_ns.is_(None))
        .order_by(webhook_endpoints.c.id)
    ).all()
    envelope = {"type": message.kind, "timestamp": message.occurred_at, "data": message.data}
    body = orjson.dumps(envelope).decode()
    insert_missing(
        connection,
        webhook_messages,
        [
            {
                "endpoint_id": endpoint,
                "id": message.id,
                "account_id": account_id,
                "body": body,
                "created_at_ns": now_ns,
                "attempts": 0,
                "next_attempt_at_ns": now_ns,
                "state": "waiting",
            }
            for endpoint in endpoints
        ],
    )


def enqueue_one(  # noqa: PLR0917 - whose, to whom, what, when
    connection: sa.Connection, account_id: str, endpoint_id: str, message_id: str, body: str, now_ns: int
) -> None:
    """A message whose endpoint was made for it alone (`Endpoints.add_for_one`); its body goes out as it is."""
    row = {
        "endpoint_id": endpoint_id,
        "id": message_id,
        "account_id": account_id,
        "body": body,
        "created_at_ns": now_ns,
        "attempts": 0,
        "next_attempt_at_ns": now_ns,
        "state": "waiting",
    }
    insert_missing(connection, webhook_messages, [row])


def forget_one(connection: sa.Connection, endpoint_id: str) -> None:
    """An endpoint that was made for one message, and the message, unless it still waits: then `sweep` takes it."""
    mine = webhook_messages.c.endpoint_id == endpoint_id
    connection.execute(webhook_messages.delete().where(mine, webhook_messages.c.state != "waiting"))
    left = sa.select(webhook_messages.c.position).where(mine)
    if connection.scalar(left.limit(1)) is None:
        connection.execute(webhook_endpoints.delete().where(webhook_endpoints.c.id == endpoint_id))


def any_due(connection: sa.Connection, now_ns: int) -> bool:
    """Whether the next message of some endpoint is due."""
    first = _first_of_each()
    query = (
        sa.select(webhook_messages.c.position)
        .join(first, first.c.position == webhook_messages.c.position)
        .where(webhook_messages.c.next_attempt_at_ns <= now_ns)
        .limit(1)
    )
    return connection.scalar(query) is not None


def claim_due(connection: sa.Connection, now_ns: int, lease_ns: int, limit: int) -> list[Waiting]:
    """The oldest waiting message of each endpoint, where it is due; nobody else gets it before the lease ends.

    Accounts take turns: one whose receivers all hang, each until its attempt times out, holds up no other. What a line
    of a batch says may be megabytes: of such messages few are claimed at once.
    """
    first = _first_of_each()
    position, due_at = webhook_messages.c.position, webhook_messages.c.next_attempt_at_ns
    turn = sa.func.row_number().over(partition_by=webhook_messages.c.account_id, order_by=due_at)
    query = (
        sa.select(position, due_at)
        .join(first, first.c.position == position)
        .join(webhook_endpoints, webhook_endpoints.c.id == webhook_messages.c.endpoint_id)
        .where(due_at <= now_ns)
        .order_by(turn, due_at)
        .limit(limit)
    )
    due = connection.execute(query).all()
    lengths = sa.select(position, sa.func.length(webhook_messages.c.body).label("length")).where(
        position.in_([row[0] for row in due])
    )
    length_of = {row.position: int(row.length) for row in connection.execute(lengths)}
    claimed: list[Waiting] = []
    total = 0
    for number, attempt_at_ns in due:
        if claimed and total + length_of[number] > _CLAIMED_CHARS_MAX:
            continue
        mine = webhook_messages.update().where(
            position == number, due_at == attempt_at_ns, webhook_messages.c.state == "waiting"
        )
        if connection.execute(mine.values(next_attempt_at_ns=now_ns + lease_ns)).rowcount:
            claimed.append(_waiting(connection, number))
            total += length_of[number]
    return claimed


def mark_sent(connection: sa.Connection, message: Waiting, now_ns: int) -> None:
    _end(connection, message, "sent", now_ns)


def mark_given_up(connection: sa.Connection, message: Waiting, now_ns: int) -> None:
    _end(connection, message, "given_up", now_ns)


def mark_failed(connection: sa.Connection, message: Waiting, next_attempt_at_ns: int) -> None:
    """It stays the endpoint's next message, and is tried again then."""
    connection.execute(
        webhook_messages.update()
        .where(webhook_messages.c.position == message.position)
        .values(attempts=message.attempts + 1, next_attempt_at_ns=next_attempt_at_ns)
    )


def sweep(connection: sa.Connection, before_ns: int) -> int:
    """Forget what was sent or given up before an instant, and endpoints that were removed before it; returns how many
    messages that were.
    """
    done = webhook_messages.c.state != "waiting"
    gone = connection.execute(
        webhook_messages.delete().where(done, webhook_messages.c.ended_at_ns < before_ns)
    ).rowcount
    told = sa.select(webhook_messages.c.position).where(webhook_messages.c.endpoint_id == webhook_endpoints.c.id)
    connection.execute(
        webhook_endpoints.delete().where(webhook_endpoints.c.removed_at_ns < before_ns, ~sa.exists(told))
    )
    return gone


def _first_of_each() -> sa.Subquery:
    return (
        sa.select(sa.func.min(webhook_messages.c.position).label("position"))
        .where(webhook_messages.c.state == "waiting")
        .group_by(webhook_messages.c.endpoint_id)
        .subquery()
    )


def _waiting(connection: sa.Connection, position: int) -> Waiting:
    query = (
        sa.select(webhook_messages, webhook_endpoints.c.url, webhook_endpoints.c.secret)
        .join(webhook_endpoints, webhook_endpoints.c.id == webhook_messages.c.endpoint_id)
        .where(webhook_messages.c.position == position)
    )
    row = connection.execute(query).mappings().one()
    return Waiting(**{name: row[name] for name in Waiting.__dataclass_fields__})


def _end(connection: sa.Connection, message: Waiting, state: str, now_ns: int) -> None:
    """The fact stays known, so that it is not told again; what it said is of no more use."""
    connection.execute(
        webhook_messages.update()
        .where(webhook_messages.c.position == message.position)
        .values(state=state, attempts=message.attempts + 1, ended_at_ns=now_ns, body="")
    )
