"""From a bearer token to a Principal: checksum, cache, database, in this order. Called once by every request.

A fresh cache entry answers without waiting for anything. It is fresh for less than a second after the database was last
heard: by its own look-up, or by a look at the log of deeds that found nothing done to its account (deeds.py). So a
revocation by any process works within a second; if the database is away a known key lives on for a while, and is never
called a bad key.
When keys were last used is kept in memory and written by `note_uses`. Knows no HTTP.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TypedDict

from tenancy.accounts import Account, default_project
from tenancy.database import Database
from tenancy.deeds import Deeds
from tenancy.errors import (
    AccountSuspended,
    KeyDisabled,
    KeyExpired,
    KeyRevoked,
    KeyUnknown,
    ProjectArchived,
    ScopeMissing,
    TenancyError,
    TenancyUnavailable,
)
from tenancy.key_groups import read_groups
from tenancy.keys import check_format, hash_key
from tenancy.principal import Principal, Scope, allowed_by_all
from tenancy.quotas import FREE_PLAN, Plan
from tenancy.roles import SCOPES
from tenancy.store import Bearer, TenancyStore

_NS = 1_000_000_000
# A key that is known, though not freshly, need not wait longer than this for a slow database.
_STALE_WAIT_S = 0.08


@dataclass(slots=True)
class _Entry:
    """What a look-up found. bearer is None for a key that does not exist.

    loaded_at_ns: when the look-up began, before it read. checked_at_ns: the same, or the last attempt that failed.
    """

    bearer: Bearer | None
    principal: Principal | None
    loaded_at_ns: int
    checked_at_ns: int


class Authenticator:
    """Checks bearer tokens. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        *,
        clock: Callable[[], int] = time.time_ns,
        ttl_s: float = 0.8,
        watched_s: float = 60,
        negative_ttl_s: float = 0.8,
        stale_s: float = 30,
        max_entries: int = 10_000,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._clock = clock
        self._ttl_ns = round(ttl_s * _NS)
        self._watched_ns = round(watched_s * _NS)
        self._negative_ttl_ns = round(negative_ttl_s * _NS)
        self._stale_ns = round(stale_s * _NS)
        self._max_entries = max_entries
        # Unknown keys are kept apart: a flood of invented ones can't push the real ones out.
        self._known: OrderedDict[str, _Entry] = OrderedDict()
        self._unknown: OrderedDict[str, _Entry] = OrderedDict()
        # The newest instant as of which the log of deeds was read, and how often something in it was new.
        self._confirmed_at_ns = 0
        self._forgettings = 0
        # Hashes under the pepper of well-formed keys, by a digest that is cheaper; the keys themselves are not kept.
        self._hashes: dict[bytes, str] = {}
        self._used_at_ns: dict[tuple[str, str], int] = {}  # by account and key; at most the keys that exist
        # While the database does not answer, look-ups of known keys go on in the background and hold nobody up.
        self._away = False
        self._lookups: dict[str, asyncio.Task[_Entry]] = {}

    def cached(self, token: str | None) -> Principal | None:
        """The principal of a valid key, if that is known without waiting; None says nothing about the key."""
        try:
            entry = self._fresh(self._hash(token))
            return None if entry is None else self._judge(entry)
        except TenancyError:
            return None

    async def authenticate(self, token: str | None) -> Principal:
        """The principal of a valid key.

        Raises a KeyRefused, AccountSuspended, or TenancyUnavailable if the database is needed and does not answer.
        """
        key_hash = self._hash(token)
        entry = self._fresh(key_hash)
        if entry is None:
            entry = await self._look_up(key_hash)
        return self._judge(entry)

    def heed(self, deeds: Deeds) -> None:
        """What is known still held at that instant, but for what accounts have to which something was done."""
        if deeds:
            self._forgettings += 1
            self._unknown.clear()  # one of them may have been issued meanwhile
            gone = [
                key_hash
                for key_hash, entry in self._known.items()
                if entry.bearer is not None and (deeds.accounts is None or entry.bearer.account.id in deeds.accounts)
            ]
            for key_hash in gone:
                del self._known[key_hash]
        self._confirmed_at_ns = deeds.as_of_ns

    async def note_uses(self) -> None:
        """Write down when keys were last used. Called now and then; what can't be written now is written next time."""
        uses, self._used_at_ns = self._used_at_ns, {}
        if not uses:
            return
        try:
            await self._database.call(self._note_uses, uses)
        except BaseException:
            self._used_at_ns = uses | self._used_at_ns
            raise

    async def close(self) -> None:
        """Give up the look-ups that still run."""
        for task in self._lookups.values():
            task.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)

    def _hash(self, token: str | None) -> str:
        """What the key is known by in the database. Raises KeyMissing or KeyMalformed."""
        digest = sha256((token or "").encode()).digest()
        found = self._hashes.get(digest)
        if found is None:
            found = hash_key(check_format(token), self._pepper)
            if len(self._hashes) >= self._max_entries:
                self._hashes.clear()  # they are made anew at the price of one hash each
            self._hashes[digest] = found
        return found

    def _fresh(self, key_hash: str) -> _Entry | None:
        now_ns = self._clock()
        entry = self._known.get(key_hash)
        if entry is None:
            entry, ttl_ns = self._unknown.get(key_hash), self._negative_ttl_ns
            heard_at_ns = 0 if entry is None else entry.checked_at_ns
        else:
            ttl_ns, heard_at_ns = self._ttl_ns, entry.checked_at_ns
            if 0 <= now_ns - entry.loaded_at_ns < self._watched_ns:
                heard_at_ns = max(heard_at_ns, self._confirmed_at_ns)
        # A clock that was set back makes an entry look as if it came from the future: it is not fresh then.
        return entry if 0 <= now_ns - heard_at_ns < ttl_ns else None

    async def _look_up(self, key_hash: str) -> _Entry:
        task = self._lookups.get(key_hash)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(key_hash), name="key look-up")
            self._lookups[key_hash] = task
            task.add_done_callback(lambda done: self._forget_lookup(key_hash, done))
        stale = self._known.get(key_hash)
        if stale is None or self._clock() - max(stale.loaded_at_ns, self._confirmed_at_ns) > self._stale_ns:
            return await asyncio.shield(task)
        if not self._away:
            # In two parts: a pause of this process ends one of them early, and is no silence of the database. What was
            # revoked would be served as if that were away.
            for _ in range(2):
                await asyncio.wait({task}, timeout=_STALE_WAIT_S / 2)
            if task.done():
                with suppress(TenancyUnavailable):
                    return task.result()
            self._away = True
        stale.checked_at_ns = self._clock()  # the next attempt is one time to live away
        return stale

    def _forget_lookup(self, key_hash: str, task: asyncio.Task[_Entry]) -> None:
        del self._lookups[key_hash]
        if not task.cancelled():
            task.exception()  # whoever waited for it was told; perhaps nobody waits any more

    async def _load(self, key_hash: str) -> _Entry:
        loaded_at_ns, forgettings = self._clock(), self._forgettings
        bearer = await self._database.call(self._read_bearer, key_hash)
        self._away = False
        entry = _Entry(bearer, None if bearer is None else _principal(bearer), loaded_at_ns, loaded_at_ns)
        keep, drop = (self._unknown, self._known) if bearer is None else (self._known, self._unknown)
        drop.pop(key_hash, None)
        if forgettings != self._forgettings:
            return entry  # perhaps it was read before what was heard of meanwhile: good for those who wait, and no more
        keep[key_hash] = entry
        keep.move_to_end(key_hash)
        if len(keep) > self._max_entries:
            keep.popitem(last=False)
        return entry

    def _read_bearer(self, key_hash: str) -> Bearer | None:
        with self._database.read() as connection:
            return TenancyStore(connection).bearer(key_hash)

    def _judge(self, entry: _Entry) -> Principal:
        if entry.bearer is None or entry.principal is None:
            raise KeyUnknown("The API key is not valid.")
        key, now_ns = entry.bearer.key, self._clock()
        refuse_unless_usable(entry.bearer, now_ns=now_ns)
        self._used_at_ns[key.account_id, key.id] = now_ns
        return entry.principal

    def _note_uses(self, uses: dict[tuple[str, str], int]) -> None:
        with self._database.write() as connection:
            store = TenancyStore(connection)
            for (account_id, key_id), moment_ns in sorted(uses.items()):  # in one order everywhere: no deadlock
                store.note_use(account_id, key_id, moment_ns)


def refuse_unless_usable(bearer: Bearer, *, now_ns: int) -> None:
    """Raises what makes the key unusable at this instant, the gravest first."""
    key, owner = bearer.key, bearer.service_account
    if key.revoked_at_ns is not None:
        raise KeyRevoked("The API key was revoked.")
    if key.disabled:
        raise KeyDisabled("The API key is disabled.")
    if owner is not None and owner.disabled:
        raise KeyDisabled("The service account of this API key is disabled.")
    if key.expires_at_ns is not None and now_ns >= key.expires_at_ns:
        raise KeyExpired("The API key has expired.")
    if bearer.account.suspended:
        raise AccountSuspended("The account is suspended.")
    if bearer.project.archived_at_ns is not None:
        raise ProjectArchived("The project of this API key is archived.")


def _principal(bearer: Bearer) -> Principal:
    key, account, owner = bearer.key, bearer.account, bearer.service_account
    return Principal(
        account_id=account.id,
        key_id=key.id,
        scopes=key.scopes if owner is None else key.scopes & SCOPES[owner.role],
        concurrency=account.concurrency,
        credit_limit_nano=account.credit_limit_nano,
        lineage_id=key.lineage_id,
        quotas=(*bearer.quotas, FREE_PLAN) if account.plan is Plan.FREE else bearer.quotas,
        models=allowed_by_all(account.models, bearer.project.models, key.models),
        networks=key.networks,
        project_id=key.project_id,
        **_of_account(account),
    )


def principal_of_key(database: Database, account_id: str, key_id: str, scope: Scope, now_ns: int) -> Principal:
    """Whoever held a key earlier, as key and account are now: for work that was ordered with it and is done later.

    Raises KeyNotFound, a KeyRefused, AccountSuspended, ProjectArchived, and ScopeMissing where it lost the scope since.
    """
    with database.read() as connection:
        store = TenancyStore(connection)
        bearer = store.bearer_of(store.key(account_id, key_id))
    refuse_unless_usable(bearer, now_ns=now_ns)
    principal = _principal(bearer)
    if scope not in principal.scopes:
        raise ScopeMissing(f"This API key lacks the scope {scope.value}.")
    return principal


def act_for(database: Database, account_id: str, key_id: str, scopes: frozenset[Scope]) -> Principal:
    """An account itself, without a key: what a member does in the dashboard is bounded by the account's own limits.

    key_id: a key whose limits apply too, or a word under which usage is told apart. Raises AccountNotFound,
    AccountSuspended.
    """
    with database.read() as connection:
        store = TenancyStore(connection)
        account, quotas = store.account(account_id), tuple(store.quotas(account_id))
        groups = read_groups(connection, account_id, {key_id})[key_id]
        project = default_project(account)
        if groups.project_id != account_id:
            project = store.project(account_id, groups.project_id)
    if account.suspended:
        raise AccountSuspended("The account is suspended.")
    return Principal(
        account_id=account.id,
        key_id=key_id,
        scopes=scopes,
        concurrency=account.concurrency,
        credit_limit_nano=account.credit_limit_nano,
        quotas=(*quotas, FREE_PLAN) if account.plan is Plan.FREE else quotas,
        lineage_id=groups.lineage_id,
        project_id=groups.project_id,
        models=allowed_by_all(account.models, project.models),
        **_of_account(account),
    )


class _OfAccount(TypedDict):
    tier: int
    weight_percent: int
    regions: frozenset[str] | None


def _of_account(account: Account) -> _OfAccount:
    """What binds whatever an account does, with or without a key."""
    return {
        "tier": account.tier,
        "weight_percent": account.weight_percent,
        "regions": None if account.regions is None else frozenset(account.regions),
    }
