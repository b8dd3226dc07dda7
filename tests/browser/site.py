"""A real `pagegate serve` with its real engine, a history, and users of every role, for a real browser to visit."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE
from tenancy.claims import Meter
from tenancy.database import Database, open_database
from tenancy.keys import KeyKind
from tenancy.passwords import Passwords
from tenancy.pepper import open_pepper
from tenancy.roles import Role
from tenancy.sign_in import make_sign_in_link
from tenancy.users import User
from tests.browser.history import seed_history
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process

PASSWORD = "a horse, a battery"
# Where a page forgot to escape a name, this would run.
XSS = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">'\"{{7*7}}"


@dataclass
class Site:
    process: ServeProcess
    database: Database
    account_id: str
    api_key: str
    admin_key: str
    users: dict[str, User] = field(default_factory=dict)
    other_id: str = ""

    @property
    def url(self) -> str:
        return self.process.base_url

    def link(self, who: str) -> str:
        """A path that signs a user in once."""
        token = make_sign_in_link(self.database, self.users[who], by=COMMAND_LINE, clock=time.time_ns)
        return f"{self.url}/dashboard/link/{token}"

    def account(self, tail: str = "") -> str:
        return f"{self.url}/dashboard/a/{self.account_id}{tail}"

    def console(self, tail: str) -> dict[str, Any]:
        """The API's answer about the account."""
        return self.process.get(f"/console/v1/accounts/{self.account_id}{tail}", self.admin_key)

    def chat(self, text: str, *, tokens: int = 8) -> None:
        body = {
            "model": "@cf/huggingfacetb/smollm2-135m-instruct",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


@contextlib.contextmanager
def open_site(home: Path, checkpoint: Path, *, requests: int = 900, **variables: str) -> Iterator[Site]:
    with serve_process(home, checkpoint, **variables) as process:
        _wait_until_ready(process)
        keys = process.bootstrap()
        database = open_database(f"sqlite:///{home}/pagegate.db")
        site = Site(process, database, keys["account_id"], keys["api_key"], keys["admin_key"])
        _add_people(site)
        _add_usage(site, home, requests)
        yield site
        database.close()


def _wait_until_ready(process: ServeProcess) -> None:
    deadline = time.monotonic() + START_S_MAX
    while not process.is_ready():
        assert time.monotonic() < deadline, process.log
        time.sleep(0.05)


def _add_people(site: Site) -> None:
    passwords = Passwords()
    password_hash = passwords.hash_now(PASSWORD)
    passwords.close()
    for who in [*(role.value for role in Role), "operator", "stranger"]:
        user = people.add_user(
            site.database,
            email=f"{who}@example.com",
            name=who.title(),
            password_hash=password_hash,
            operator=who == "operator",
            by=COMMAND_LINE,
            clock=time.time_ns,
        )
        site.users[who] = user
        if who not in {"operator", "stranger"}:
            people.set_member(site.database, site.account_id, user.id, Role(who), by=COMMAND_LINE, clock=time.time_ns)


def _add_usage(site: Site, home: Path, requests: int) -> None:
    database, pepper = site.database, open_pepper(home / "pepper")
    key_ids = [
        provisioning.issue_key(
            database, pepper, site.account_id, name=name, kind=KeyKind.INFERENCE, clock=time.time_ns
        ).key.id
        for name in ("website", "nightly batch", "search")
    ]
    other = provisioning.open_account(database, "other", clock=time.time_ns)
    site.other_id = other.id
    now_ns = time.time_ns()
    seed_history(database, site.account_id, key_ids, now_ns=now_ns, requests=requests)
    seed_history(database, other.id, key_ids[:1], now_ns=now_ns, requests=20)
    provisioning.set_quota(database, site.account_id, Meter.REQUESTS_PER_MINUTE, 600)
    provisioning.set_quota(database, site.account_id, Meter.TOKENS_PER_DAY, 2_000_000)
