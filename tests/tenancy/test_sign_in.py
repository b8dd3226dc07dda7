"""Signing in over both databases: one refusal for every reason, bounded attempts, sessions that end by themselves."""

from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from tenancy import people
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database
from tenancy.errors import LinkInvalid, SignInRefused, SignInThrottled
from tenancy.people_store import PeopleStore
from tenancy.sign_in import (
    ATTEMPTS_MAX,
    ATTEMPTS_NS,
    SESSION_IDLE_NS_MAX,
    SESSION_NS_MAX,
    SESSIONS_MAX,
    SIGN_IN_LINK_NS,
    SignIns,
    make_sign_in_link,
)
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases
from tests.tenancy.people import PASSWORD, add_user, cheap_passwords

pytestmark = over_both_databases

_HERE = ip_address("192.0.2.1")


@pytest.fixture
def sign_ins(database: Database, clock: SettableClock) -> Iterator[SignIns]:
    with cheap_passwords() as passwords:
        yield SignIns(database, passwords, clock=clock)


async def test_the_right_password_opens_a_session(database: Database, clock: SettableClock, sign_ins: SignIns) -> None:
    user = add_user(database, clock, with_password=True)
    opened = await sign_ins.with_password(" ANN@example.com", PASSWORD, _HERE)
    session = await sign_ins.find(opened.token)
    assert session is not None
    assert session.user == user
    assert opened.token not in repr(opened)
    await sign_ins.close(opened.token)
    assert await sign_ins.find(opened.token) is None


async def test_every_reason_not_to_let_in_is_one_answer(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    add_user(database, clock, with_password=True)
    add_user(database, clock, "nopassword@example.com")
    gone = add_user(database, clock, "gone@example.com", with_password=True)
    people.change_user(database, gone.id, disabled=True, by=COMMAND_LINE, clock=clock)
    said = set()
    for email, password in (
        ("ann@example.com", "wrong"),
        ("nobody@example.com", PASSWORD),
        ("nopassword@example.com", ""),
        ("gone@example.com", PASSWORD),
    ):
        with pytest.raises(SignInRefused) as refused:
            await sign_ins.with_password(email, password, _HERE)
        said.add(str(refused.value))
    assert len(said) == 1


async def test_guesses_for_one_user_are_bounded_and_the_window_passes(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    add_user(database, clock, with_password=True)
    for _ in range(ATTEMPTS_MAX["user and address"]):
        with pytest.raises(SignInRefused):
            await sign_ins.with_password("ann@example.com", "wrong", _HERE)
    with pytest.raises(SignInThrottled) as refused:
        await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)
    assert refused.value.retry_after_s == ATTEMPTS_NS // 1_000_000_000
    assert await sign_ins.with_password("ann@example.com", PASSWORD, ip_address("192.0.2.2"))
    clock.now_ns += ATTEMPTS_NS
    assert await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)


async def test_guesses_from_one_network_are_bounded_over_all_users(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    for number in range(ATTEMPTS_MAX["address"]):
        with pytest.raises(SignInRefused):
            await sign_ins.with_password(f"u{number}@c", "x", ip_address(f"2001:db8::{number + 1:x}"))
    with pytest.raises(SignInThrottled):
        await sign_ins.with_password("another@c", "x", ip_address("2001:db8::ffff"))
    with pytest.raises(SignInRefused):
        await sign_ins.with_password("another@c", "x", ip_address("2001:db8:0:1::1"))


async def test_guesses_for_one_user_from_everywhere_are_bounded(clock: SettableClock, sign_ins: SignIns) -> None:
    for number in range(ATTEMPTS_MAX["user"]):
        with pytest.raises(SignInRefused):
            await sign_ins.with_password("ann@example.com", "x", ip_address(f"192.0.2.{number + 1}"))
    with pytest.raises(SignInThrottled):
        await sign_ins.with_password("ann@example.com", "x", ip_address("198.51.100.1"))


async def test_who_signs_in_often_and_rightly_is_never_throttled(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    add_user(database, clock, with_password=True)
    for _ in range(ATTEMPTS_MAX["address"] + 5):
        await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)


async def test_a_session_ends_when_it_is_idle_and_when_it_is_old(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    add_user(database, clock, with_password=True)
    idle = await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)
    clock.now_ns += SESSION_IDLE_NS_MAX
    assert await sign_ins.find(idle.token) is None
    used = await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)
    began_ns = clock.now_ns
    while clock.now_ns + SESSION_IDLE_NS_MAX // 2 < began_ns + SESSION_NS_MAX:
        clock.now_ns += SESSION_IDLE_NS_MAX // 2
        assert await sign_ins.find(used.token) is not None
    clock.now_ns = began_ns + SESSION_NS_MAX
    assert await sign_ins.find(used.token) is None


async def test_a_user_has_a_bounded_number_of_sessions(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    add_user(database, clock, with_password=True)
    tokens = []
    for _ in range(SESSIONS_MAX + 1):
        clock.advance_s(1)
        tokens.append((await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)).token)
    assert await sign_ins.find(tokens[0]) is None
    assert all([await sign_ins.find(token) is not None for token in tokens[1:]])


async def test_a_new_password_ends_every_session(database: Database, clock: SettableClock, sign_ins: SignIns) -> None:
    user = add_user(database, clock, with_password=True)
    opened = await sign_ins.with_password("ann@example.com", PASSWORD, _HERE)
    with pytest.raises(SignInRefused):
        await sign_ins.change_password(user, "wrong", "a new battery, a horse")
    assert await sign_ins.find(opened.token) is not None
    await sign_ins.change_password(user, PASSWORD, "a new battery, a horse")
    assert await sign_ins.find(opened.token) is None
    assert await sign_ins.with_password("ann@example.com", "a new battery, a horse", _HERE)


async def test_a_link_signs_in_once_and_for_a_while(
    database: Database, clock: SettableClock, sign_ins: SignIns
) -> None:
    user = add_user(database, clock)
    link = make_sign_in_link(database, user, by=COMMAND_LINE, clock=clock)
    assert (await sign_ins.with_link(link)).user == user
    late = make_sign_in_link(database, user, by=COMMAND_LINE, clock=clock)
    clock.now_ns += SIGN_IN_LINK_NS
    disabled = make_sign_in_link(database, user, by=COMMAND_LINE, clock=clock)
    people.change_user(database, user.id, disabled=True, by=COMMAND_LINE, clock=clock)
    for token in (link, late, disabled, "nonsense"):
        with pytest.raises(LinkInvalid):
            await sign_ins.with_link(token)


async def test_no_token_is_stored_as_it_is(database: Database, clock: SettableClock, sign_ins: SignIns) -> None:
    user = add_user(database, clock)
    token = make_sign_in_link(database, user, by=COMMAND_LINE, clock=clock)
    with database.read() as connection:
        assert PeopleStore(connection).link(token) is None
    opened = await sign_ins.with_link(token)
    with database.read() as connection:
        assert PeopleStore(connection).session(opened.token) is None
