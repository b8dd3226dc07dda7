"""Sends what waits in the outbox, in order for each endpoint, until it is taken or three days have passed.

One task of the composition root. Several processes may run one each: a message is claimed before it is sent. A receiver
may get a message twice (its answer can be lost), never out of order.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import aiohttp
import structlog
from standardwebhooks import Webhook

from billing.webhooks.addresses import AllowedAddresses, GuardedResolver, check_literal
from billing.webhooks.outbox import Waiting, any_due, claim_due, mark_failed, mark_given_up, mark_sent, sweep
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable

_SECOND_NS: Final = 1_000_000_000
_ATTEMPT_S_MAX: Final = 10
# Longer than an attempt, so that a claim does not end before its attempt.
_LEASE_NS: Final = 60 * _SECOND_NS
# The waits after the first failures; the last one is repeated.
BACK_OFF_S: Final = (5, 30, 120, 600, 1_800, 3_600)
GIVE_UP_NS: Final = 72 * 3_600 * _SECOND_NS
_KEPT_NS: Final = 30 * 86_400 * _SECOND_NS
_AT_ONCE: Final = 8

log = structlog.get_logger(__name__)


@cache
def _public() -> ssl.SSLContext:
    """The system's authorities, read once a process: more than a hundred certificates."""
    return ssl.create_default_context()


class Courier:
    """authorities: a PEM file of those that are trusted beside the public ones. Raises OSError if it can't be read."""

    def __init__(
        self,
        database: Database,
        *,
        allowed: AllowedAddresses,
        clock: Callable[[], int] = time.time_ns,
        interval_s: float = 1,
        authorities: Path | None = None,
    ) -> None:
        self._database = database
        self._allowed = allowed
        self._clock = clock
        self._interval_s = interval_s
        self._tls = _public() if authorities is None else ssl.create_default_context()
        if authorities is not None:
            self._tls.load_verify_locations(authorities)

    async def run(self) -> None:
        """Send for ever. Trouble with the database is waited out; the outbox keeps what it has."""
        while True:
            try:
                while await self.send_due():
                    pass
            except TenancyUnavailable:
                pass  # logged where it is first met; nothing is lost
            except Exception:
                # The loop of a worker: a bug must not end it, and must not go unseen.
                log.exception("webhooks_failed")
            await asyncio.sleep(self._interval_s)

    async def send_due(self) -> int:
        """Attempt the next message of every endpoint that has one due; returns how many were sent."""
        if not await self._database.call(self._any_due):
            return 0
        waiting = await self._database.call(self._claim)
        connector = aiohttp.TCPConnector(resolver=GuardedResolver(self._allowed), limit=_AT_ONCE, force_close=True)
        timeout = aiohttp.ClientTimeout(total=_ATTEMPT_S_MAX)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            sent = await asyncio.gather(*(self._attempt(session, message) for message in waiting))
        return sum(sent)

    async def _attempt(self, session: aiohttp.ClientSession, message: Waiting) -> bool:
        problem = await self._post(session, message)
        now_ns = self._clock()
        if problem is None:
            await self._database.call(self._note, mark_sent, message, now_ns)
            return True
        if now_ns - message.created_at_ns >= GIVE_UP_NS:
            log.warning("webhook_given_up", endpoint_id=message.endpoint_id, message_id=message.id, reason=problem)
            await self._database.call(self._note, mark_given_up, message, now_ns)
            return False
        wait_s = BACK_OFF_S[min(message.attempts, len(BACK_OFF_S) - 1)]
        log.info("webhook_waits", endpoint_id=message.endpoint_id, reason=problem, retry_in_s=wait_s)
        await self._database.call(self._note, mark_failed, message, now_ns + wait_s * _SECOND_NS)
        return False

    async def _post(self, session: aiohttp.ClientSession, message: Waiting) -> str | None:
        """None if the receiver took it, else why not. Its answer's body is nobody's business."""
        at = datetime.fromtimestamp(self._clock() // _SECOND_NS, UTC)
        headers = {
            "content-type": "application/json",
            "user-agent": "Pagegate-Webhooks",
            "webhook-id": message.id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(message.secret).sign(message.id, at, message.body),
        }
        try:
            check_literal(message.url, self._allowed)
            async with session.post(
                message.url, data=message.body.encode(), headers=headers, allow_redirects=False, ssl=self._tls
            ) as response:
                return None if 200 <= response.status < 300 else f"status {response.status}"
        except (aiohttp.ClientError, OSError) as error:  # OSError: a refused address, and a timeout
            return type(error).__name__

    def sweep(self) -> None:
        """Forget what was sent or given up a month ago. The composition root calls it now and then."""
        with self._database.write() as connection:
            sweep(connection, self._clock() - _KEPT_NS)

    def _any_due(self) -> bool:
        """Reads only: with nothing to send, which is nearly always, no writer is kept waiting."""
        with self._database.read() as connection:
            return any_due(connection, self._clock())

    def _claim(self) -> list[Waiting]:
        with self._database.write() as connection:
            return claim_due(connection, self._clock(), _LEASE_NS, _AT_ONCE)

    def _note(self, mark: Callable[..., None], message: Waiting, at_ns: int) -> None:
        with self._database.write() as connection:
            mark(connection, message, at_ns)
