"""An account's webhook endpoints: added with a secret that is shown once, listed, removed. Console and CLI call it.

The secret signs every message, so it is kept as it is: whoever reads the database could forge messages, and see none
that the account does not get anyway.
"""

import base64
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import sqlalchemy as sa

from billing.errors import WebhookInvalid, WebhookNotFound
from billing.tables import webhook_endpoints, webhook_messages
from billing.webhooks.addresses import AllowedAddresses, check_url
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database

ENDPOINTS_MAX = 10
_SECRET_BYTES = 24  # as Standard Webhooks asks: 24 to 64


@dataclass(frozen=True, slots=True)
class Endpoint:
    """waiting: messages that are not delivered yet."""

    id: str
    url: str
    created_at_ns: int
    waiting: int


@dataclass(frozen=True, slots=True)
class AddedEndpoint:
    """secret: "whsec_" and base64; told once."""

    endpoint: Endpoint
    secret: str


class Endpoints:
    def __init__(self, database: Database, *, allowed: AllowedAddresses, clock: Callable[[], int]) -> None:
        self._database = database
        self._allowed = allowed
        self._clock = clock

    def add(self, account_id: str, url: str, *, by: Actor = COMMAND_LINE) -> AddedEndpoint:
        """Raises WebhookInvalid for a URL that can't be called, and beyond ENDPOINTS_MAX."""
        url = check_url(url, self._allowed)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()
        endpoint = Endpoint(secrets.token_hex(16), url, self._clock(), 0)
        with self._database.write() as connection:
            mine = webhook_endpoints.c.account_id == account_id
            count = sa.select(sa.func.count()).where(mine, webhook_endpoints.c.removed_at_ns.is_(None))
            if (connection.scalar(count) or 0) >= ENDPOINTS_MAX:
                raise WebhookInvalid(f"An account has at most {ENDPOINTS_MAX} webhook endpoints.")
            connection.execute(
                webhook_endpoints.insert().values(
                    id=endpoint.id,
                    account_id=account_id,
                    url=url,
                    secret=secret,
                    created_at_ns=endpoint.created_at_ns,
                )
            )
            # The host alone: a path or a query may be a secret of the receiver's.
            _log(connection, by, account_id, "webhook.add", endpoint.id, endpoint.created_at_ns, host=_host(url))
        return AddedEndpoint(endpoint, secret)

    def add_for_one(self, account_id: str, url: str) -> AddedEndpoint:
        """An endpoint of one message (`outbox.enqueue_one`): marked as removed from the start, so that none of the
        account's facts go there and nobody sees it in a list. Raises WebhookInvalid.
        """
        url = check_url(url, self._allowed)
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()
        endpoint = Endpoint(secrets.token_hex(16), url, self._clock(), 0)
        row = {
            "id": endpoint.id,
            "account_id": account_id,
            "url": url,
            "secret": secret,
            "created_at_ns": endpoint.created_at_ns,
            "removed_at_ns": endpoint.created_at_ns,
        }
        with self._database.write() as connection:
            connection.execute(webhook_endpoints.insert().values(row))
        return AddedEndpoint(endpoint, secret)

    def forget_one(self, account_id: str, endpoint_id: str) -> None:
        """An endpoint of one message that will never be sent."""
        mine = (webhook_endpoints.c.account_id == account_id, webhook_endpoints.c.id == endpoint_id)
        with self._database.write() as connection:
            connection.execute(webhook_endpoints.delete().where(*mine))

    def all_of(self, account_id: str) -> list[Endpoint]:
        """Oldest first."""
        waiting = (
            sa.select(sa.func.count())
            .where(webhook_messages.c.endpoint_id == webhook_endpoints.c.id, webhook_messages.c.state == "waiting")
            .scalar_subquery()
        )
        query = (
            sa.select(webhook_endpoints, waiting.label("waiting"))
            .where(webhook_endpoints.c.account_id == account_id, webhook_endpoints.c.removed_at_ns.is_(None))
            .order_by(webhook_endpoints.c.created_at_ns, webhook_endpoints.c.id)
        )
        with self._database.read() as connection:
            return [
                Endpoint(row["id"], row["url"], row["created_at_ns"], row["waiting"])
                for row in connection.execute(query).mappings()
            ]

    def remove(self, account_id: str, endpoint_id: str, *, by: Actor = COMMAND_LINE) -> None:
        """What waits for it is dropped. Raises WebhookNotFound for an unknown one and another account's alike."""
        now_ns = self._clock()
        with self._database.write() as connection:
            query = (
                webhook_endpoints.update()
                .where(
                    webhook_endpoints.c.account_id == account_id,
                    webhook_endpoints.c.id == endpoint_id,
                    webhook_endpoints.c.removed_at_ns.is_(None),
                )
                .values(removed_at_ns=now_ns, secret="")
            )
            if connection.execute(query).rowcount == 0:
                raise WebhookNotFound("There is no such webhook endpoint in this account.")
            connection.execute(
                webhook_messages.update()
                .where(webhook_messages.c.endpoint_id == endpoint_id, webhook_messages.c.state == "waiting")
                .values(state="given_up", ended_at_ns=now_ns, body="")
            )
            _log(connection, by, account_id, "webhook.remove", endpoint_id, now_ns)


def _host(url: str) -> str | None:
    return urlsplit(url).hostname


def _log(  # noqa: PLR0917 - by whom, whose, what, to what, when: always in this order
    connection: sa.Connection, by: Actor, account_id: str, action: str, subject: str, at_ns: int, **detail: str | None
) -> None:
    audit_log.record(connection, at_ns=at_ns, by=by, account_id=account_id, action=action, subject=subject, **detail)
