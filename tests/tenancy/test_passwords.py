"""Passwords and tokens: what is taken, what is compared, and that a burst of sign-ins is bounded."""

import asyncio
import threading
import time

import pytest

from tenancy.errors import SignInThrottled
from tenancy.passwords import HashCost, Passwords
from tenancy.sign_in import form_token, new_token, password_fault
from tests.tenancy.people import PASSWORD, cheap_passwords


async def test_a_password_matches_its_own_argon2id_hash_alone() -> None:
    with cheap_passwords() as passwords:
        kept = await passwords.hash(PASSWORD)
        assert kept.startswith("$argon2id$")
        assert await passwords.matches(PASSWORD, kept)
        assert not await passwords.matches(PASSWORD + "x", kept)
        assert not await passwords.matches(PASSWORD, None)
        assert not await passwords.matches(PASSWORD, "not a hash")


async def test_the_default_cost_is_above_the_least_that_is_advised() -> None:
    cost = HashCost()
    assert cost.memory_kib >= 19 * 1024
    assert cost.passes >= 2


async def test_more_sign_ins_than_can_wait_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenancy.passwords._WAITING_MAX", 2)
    with cheap_passwords() as passwords:
        release = threading.Event()
        passwords._threads.submit(release.wait)
        waiting = [asyncio.create_task(passwords.matches("x", None)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(SignInThrottled):
            await passwords.matches("x", None)
        release.set()
        assert await asyncio.gather(*waiting) == [False, False]
        assert not await passwords.matches("x", None)


async def test_hashing_leaves_the_loop_alone() -> None:
    passwords = Passwords(HashCost(memory_kib=64 * 1024, passes=4))
    began, turns = time.monotonic(), 0
    hashing = asyncio.create_task(passwords.hash(PASSWORD))
    while not hashing.done():
        await asyncio.sleep(0)
        turns += 1
        assert time.monotonic() - began < 30
    passwords.close()
    assert turns > 10


def test_a_form_token_belongs_to_one_session() -> None:
    one, other = new_token(), new_token()
    assert form_token(one) == form_token(one) != form_token(other)


@pytest.mark.parametrize("password", ["short", "x" * 257, "aaaaaaaaaaaaaaaa", "ababababababab"])
def test_a_weak_password_is_refused_in_a_sentence(password: str) -> None:
    fault = password_fault(password)
    assert fault is not None
    assert fault.endswith(".")


def test_a_fair_password_is_taken() -> None:
    assert password_fault(PASSWORD) is None
