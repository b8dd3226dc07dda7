"""Passwords: argon2id hashes, made and compared in one thread of their own.

A comparison takes memory and time by design. In the database's threads a burst of sign-ins would hold up every API key;
here it only holds up other sign-ins, and past a bound they are told to come back.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from tenancy.errors import SignInThrottled

T = TypeVar("T")

_WAITING_MAX: Final = 32
_WAIT_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True)
class HashCost:
    """What one comparison takes. The default is above the least that OWASP's password storage sheet names for
    argon2id (19 MiB, two passes, one lane).
    """

    memory_kib: int = 32 * 1024
    passes: int = 3


class Passwords:
    def __init__(self, cost: HashCost | None = None) -> None:
        cost = cost or HashCost()
        self._hasher = PasswordHasher(time_cost=cost.passes, memory_cost=cost.memory_kib, parallelism=1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="passwords")
        self._waiting = 0

    def hash_now(self, password: str) -> str:
        """Blocks for as long as it takes: for the command line."""
        return self._hasher.hash(password)

    async def hash(self, password: str) -> str:
        return await self._run(self._hasher.hash, password)

    async def matches(self, password: str, kept: str | None) -> bool:
        """kept: the stored hash, None if there is none; both take the same time."""
        return await self._run(self._compare, password, kept)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    @cached_property
    def _nobodys(self) -> str:
        """Compared with where there is no password: how long an answer takes must not tell who exists."""
        return self._hasher.hash("nobody has this password")

    def _compare(self, password: str, kept: str | None) -> bool:
        nobodys = self._nobodys  # made by the first comparison, whoever is compared
        try:
            self._hasher.verify(kept or nobodys, password)
        except (VerificationError, InvalidHashError):
            return False
        return kept is not None

    async def _run(self, deed: Callable[..., T], *arguments: str | None) -> T:
        if self._waiting >= _WAITING_MAX:
            raise SignInThrottled("Too many people sign in at this moment.", retry_after_s=5)
        self._waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S_MAX):
                return await asyncio.get_running_loop().run_in_executor(self._threads, deed, *arguments)
        finally:
            self._waiting -= 1
