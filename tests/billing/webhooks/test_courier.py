"""Messages arrive signed, in order and once they are taken; trouble is waited out, and given up in the end."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from billing.tables import webhook_messages
from billing.webhooks.addresses import AllowedAddresses
from billing.webhooks.courier import BACK_OFF_S, GIVE_UP_NS, Courier
from billing.webhooks.endpoints import Endpoints
from billing.webhooks.outbox import Message, claim_due, enqueue, enqueue_one
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT
from tests.billing.webhooks.receiver import LOOPBACK, Receiver, running_receiver
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases
MINUTE_NS = 60 * 10**9


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(time.time_ns())  # receivers check that a signature is of now


@pytest.fixture
async def receiver(database: Database, clock: SettableClock, tmp_path: Path) -> AsyncIterator[Receiver]:
    """One endpoint of the account leads to it."""
    async with running_receiver(tmp_path) as running:
        running.secret = Endpoints(database, allowed=LOOPBACK, clock=clock).add(ACCOUNT, running.url).secret
        yield running


@pytest.fixture
def courier(database: Database, clock: SettableClock, receiver: Receiver) -> Courier:
    return Courier(database, allowed=LOOPBACK, clock=clock, authorities=receiver.authorities)


def tell(database: Database, *numbers: int, account: str = ACCOUNT) -> None:
    at_ns = time.time_ns() - MINUTE_NS
    with database.write() as connection:
        for number in numbers:
            message = Message(f"fact-{number}", "budget.threshold_reached", "2026-11-29T00:00:00Z", {"number": number})
            enqueue(connection, account, message, at_ns)


def numbers(receiver: Receiver) -> list[int]:
    return [body["data"]["number"] for body in receiver.bodies]


async def send_all(courier: Courier) -> None:
    while await courier.send_due():
        pass


async def test_a_message_arrives_signed_under_the_id_of_its_fact(
    database: Database, courier: Courier, receiver: Receiver
) -> None:
    tell(database, 7)
    assert await courier.send_due() == 1
    assert receiver.bodies == [
        {"type": "budget.threshold_reached", "timestamp": "2026-11-29T00:00:00Z", "data": {"number": 7}}
    ]
    assert receiver.ids == ["fact-7"]
    assert await courier.send_due() == 0


async def test_a_fact_that_is_told_twice_is_sent_once(database: Database, courier: Courier, receiver: Receiver) -> None:
    tell(database, 1, 1)
    tell(database, 1)
    await send_all(courier)
    assert numbers(receiver) == [1]


async def test_messages_come_in_order_after_the_receiver_was_down(
    database: Database, courier: Courier, receiver: Receiver, clock: SettableClock
) -> None:
    tell(database, 1, 2, 3)
    receiver.status = 500
    for wait_s in BACK_OFF_S[:3]:
        assert await courier.send_due() == 0
        assert await courier.send_due() == 0  # not due yet
        clock.advance_s(wait_s)
    assert receiver.attempts == 3  # of the first message alone: what follows it waits behind it
    receiver.status = 200
    await send_all(courier)
    assert numbers(receiver) == [1, 2, 3]


async def test_a_receiver_that_never_answers_rightly_is_given_up_after_three_days(
    database: Database, courier: Courier, receiver: Receiver, clock: SettableClock
) -> None:
    receiver.status = 404
    tell(database, 1)
    with database.write() as connection:
        connection.exec_driver_sql(f"UPDATE webhook_messages SET created_at_ns = {clock.now_ns - GIVE_UP_NS}")
    assert await courier.send_due() == 0
    receiver.status = 200
    tell(database, 2)
    await send_all(courier)
    assert numbers(receiver) == [2]


async def test_a_redirect_is_not_followed(database: Database, courier: Courier, receiver: Receiver) -> None:
    receiver.status, receiver.headers = 307, {"location": receiver.url}
    tell(database, 1)
    assert await courier.send_due() == 0
    assert receiver.attempts == 1


async def test_an_address_that_is_not_allowed_any_more_is_not_called(
    database: Database, receiver: Receiver, clock: SettableClock
) -> None:
    tell(database, 1)
    strict = Courier(database, allowed=AllowedAddresses(), clock=clock, authorities=receiver.authorities)
    assert await strict.send_due() == 0
    assert receiver.attempts == 0


async def test_a_certificate_that_nobody_vouches_for_is_not_trusted(
    database: Database, receiver: Receiver, clock: SettableClock
) -> None:
    tell(database, 1)
    assert await Courier(database, allowed=LOOPBACK, clock=clock).send_due() == 0
    assert receiver.attempts == 0


async def test_two_processes_do_not_send_the_same_message(
    database: Database, courier: Courier, receiver: Receiver, clock: SettableClock
) -> None:
    tell(database, 1)
    with database.write() as connection:
        assert len(claim_due(connection, clock.now_ns, 10**9, 8)) == 1
    assert await courier.send_due() == 0
    clock.advance_s(1)  # it died: its claim ends
    await send_all(courier)
    assert numbers(receiver) == [1]


async def test_an_account_with_many_messages_holds_up_no_other(database: Database, clock: SettableClock) -> None:
    endpoints = Endpoints(database, allowed=LOOPBACK, clock=clock)
    for number in range(20):
        hanging = endpoints.add_for_one(ACCOUNT, f"https://127.0.0.1/{number}").endpoint
        with database.write() as connection:
            enqueue_one(connection, ACCOUNT, hanging.id, f"run-{number}", "{}", clock.now_ns - MINUTE_NS)
    endpoints.add(OTHER_ACCOUNT, "https://127.0.0.1/alerts")
    with database.write() as connection:
        message = Message("fact", "budget.threshold_reached", "2026-11-29T00:00:00Z", {})
        enqueue(connection, OTHER_ACCOUNT, message, clock.now_ns)
        claimed = claim_due(connection, clock.now_ns, 10**9, 8)
    assert [message.id for message in claimed if not message.id.startswith("run")] == ["fact"]
    assert len(claimed) == 8


def test_large_messages_are_claimed_a_few_megabytes_at_a_time(
    database: Database, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("billing.webhooks.outbox._CLAIMED_CHARS_MAX", 10)
    endpoints = Endpoints(database, allowed=LOOPBACK, clock=clock)
    for at, said in enumerate(("more than is claimed at once", "five5", "ten more 10", "five6", "1")):
        endpoint = endpoints.add_for_one(ACCOUNT, "https://127.0.0.1/hook").endpoint.id
        with database.write() as connection:
            enqueue_one(connection, ACCOUNT, endpoint, str(at), said, at)
    claimed = []
    while True:
        with database.write() as connection:
            some = claim_due(connection, clock(), MINUTE_NS, 8)
        if not some:
            break
        claimed.append([message.body for message in some])
    assert claimed == [["more than is claimed at once"], ["five5", "five6"], ["ten more 10"], ["1"]]


async def test_what_a_message_said_goes_when_it_has_ended(
    database: Database, courier: Courier, receiver: Receiver, clock: SettableClock
) -> None:
    tell(database, 1)
    await send_all(courier)
    receiver.status = 500
    tell(database, 2)
    await send_all(courier)
    with database.write() as connection:
        bodies = sa.select(webhook_messages.c.state, webhook_messages.c.body == "").order_by(
            webhook_messages.c.position
        )
        assert [tuple(row) for row in connection.execute(bodies)] == [("sent", True), ("waiting", False)]
        connection.execute(webhook_messages.update().values(created_at_ns=clock.now_ns - GIVE_UP_NS))
    clock.advance_s(BACK_OFF_S[0])
    await send_all(courier)
    with database.read() as connection:
        assert [tuple(row) for row in connection.execute(bodies)] == [("sent", True), ("given_up", True)]
    assert numbers(receiver) == [1]


async def test_a_removed_endpoint_gets_nothing_more(
    database: Database, courier: Courier, receiver: Receiver, clock: SettableClock
) -> None:
    endpoints = Endpoints(database, allowed=LOOPBACK, clock=clock)
    tell(database, 1)
    (endpoint,) = endpoints.all_of(ACCOUNT)
    assert endpoint.waiting == 1
    endpoints.remove(ACCOUNT, endpoint.id)
    tell(database, 2)
    assert await courier.send_due() == 0
    assert (receiver.attempts, endpoints.all_of(ACCOUNT)) == (0, [])


async def test_another_account_hears_nothing(database: Database, courier: Courier, receiver: Receiver) -> None:
    tell(database, 1, account=OTHER_ACCOUNT)
    assert await courier.send_due() == 0
    assert receiver.attempts == 0


async def test_what_was_sent_is_forgotten_after_a_month(
    database: Database, courier: Courier, clock: SettableClock
) -> None:
    tell(database, 1)
    await send_all(courier)
    courier.sweep()
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM webhook_messages").scalar() == 1
    clock.advance_s(31 * 86_400)
    courier.sweep()
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT COUNT(*) FROM webhook_messages").scalar() == 0
