"""The dashboard over a real database and real stores, visited without a browser: cookies and forms by hand."""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

from starlette.types import ASGIApp

from api.app import create_app
from api.services import Services
from api.settings import Settings
from billing.budgets import Budgets
from billing.ledger.wallet import Wallets
from billing.store import UsageStore
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database, open_database
from tenancy.meters.process import ProcessMeters
from tenancy.roles import Role
from tenancy.sign_in import SignIns, make_sign_in_link
from tenancy.users import User
from tests.api.exchange import Exchange, call
from tests.fakes import FakeHolds, Fakes, fake_services
from tests.tenancy.people import cheap_passwords

ORIGIN = "http://gate.example"
_FORM_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]*)"')


@dataclass
class Visitor:
    """A browser of a kind: keeps cookies, follows nothing by itself."""

    app: ASGIApp
    cookies: dict[str, str] = field(default_factory=dict)
    form_token: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    last_cookie: str = ""

    async def get(self, path: str, **headers: str) -> Exchange:
        return self._remember(await call(self.app, "GET", path, key=None, headers=self._headers(headers)))

    async def post(self, path: str, *, origin: str | None = ORIGIN, token: str | None = None, **form: Any) -> Exchange:
        """token: the form's, as the last page had it unless said otherwise."""
        sent = {"form_token": self.form_token if token is None else token} | form
        headers = {"content-type": "application/x-www-form-urlencoded"}
        if origin is not None:
            headers["origin"] = origin
        body = urlencode(sent, doseq=True).encode()
        return self._remember(await call(self.app, "POST", path, body=body, key=None, headers=self._headers(headers)))

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        return {"host": "gate.example", **({"cookie": cookies} if cookies else {}), **self.headers, **more}

    def _remember(self, answer: Exchange) -> Exchange:
        for line in set_cookies(answer):
            name, _, rest = line.partition("=")
            value = rest.partition(";")[0]
            self.last_cookie = line
            if "Max-Age=0" in line:
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        found = _FORM_TOKEN.search(answer.body.decode(errors="replace"))
        if found:
            self.form_token = found[1]
        return answer


def set_cookies(answer: Exchange) -> list[str]:
    return [value for name, value in answer.headers.items() if name == "set-cookie"]


def text_of(answer: Exchange) -> str:
    """What a reader sees, roughly: without tags, entities as what they stand for."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.body.decode())).split())


@dataclass
class Dashboard:
    app: ASGIApp
    services: Services
    fakes: Fakes
    account_id: str
    other_id: str
    users: dict[str, User]

    @property
    def database(self) -> Database:
        return self.services.database

    def path(self, tail: str = "", account_id: str | None = None) -> str:
        return f"/dashboard/a/{account_id or self.account_id}{tail}"

    def stranger(self) -> Visitor:
        return Visitor(self.app)

    async def visitor(self, who: str, **headers: str) -> Visitor:
        """Signed in: a role in the first account, or "operator", or "outsider" (owner of the other account).

        headers: sent with each request.
        """
        visitor = Visitor(self.app, headers=headers)
        token = make_sign_in_link(self.database, self.users[who], by=COMMAND_LINE, clock=time.time_ns)
        answer = await visitor.post(f"/dashboard/link/{token}")
        assert answer.status == 303, answer.body
        await visitor.get("/dashboard/profile")
        return visitor


@contextmanager
def dashboard(home: Path, migrated_file: Path, **settings: Any) -> Iterator[Dashboard]:
    """migrated_file: a database at the newest revision, to be copied."""
    chosen = Settings.model_validate({"home": home, "cache_dir": home} | settings)
    shutil.copy(migrated_file, home / "pagegate.db")
    database = open_database(chosen.database_url)
    accounts = [provisioning.open_account(database, name, clock=time.time_ns) for name in ("acme", "other")]
    users = {who: _add_user(database, who, accounts[0].id) for who in [*(role.value for role in Role), "operator"]}
    users["outsider"] = _add_user(database, "outsider", None)
    people.set_member(database, accounts[1].id, users["outsider"].id, Role.OWNER, by=COMMAND_LINE, clock=time.time_ns)
    fakes = Fakes(settings=chosen)
    fakes.wallets = cast("Any", Wallets(database, clock=time.time_ns))
    fakes.budgets = cast("Any", Budgets(database, clock=time.time_ns))
    fakes.usage = cast("Any", UsageStore(database))
    batches = BatchStore(database, BatchSettings(), clock=time.time_ns, told=lambda *_: None)
    fakes.batching = SimpleNamespace(files=None, store=batches, wake=lambda: None)
    meters = ProcessMeters()
    fakes.holds = cast("Any", SimpleNamespace(live={}, meters=meters, credit=FakeHolds().credit))
    with cheap_passwords() as passwords:
        fakes.sign_ins = SignIns(database, passwords, clock=time.time_ns)
        services = replace(fake_services(fakes), database=database)
        yield Dashboard(create_app(services), services, fakes, accounts[0].id, accounts[1].id, users)
    database.close()


def _add_user(database: Database, who: str, account_id: str | None) -> User:
    user = people.add_user(
        database,
        email=f"{who}@example.com",
        name=who.title(),
        operator=who == "operator",
        by=COMMAND_LINE,
        clock=time.time_ns,
    )
    if account_id is not None and who != "operator":
        people.set_member(database, account_id, user.id, Role(who), by=COMMAND_LINE, clock=time.time_ns)
    return user
