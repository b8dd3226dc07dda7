"""Two accounts with an admin key each on a real database, for the tests of console routes that change something."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from api.app import create_app
from api.settings import Settings
from tenancy import provisioning
from tenancy.authenticate import Authenticator
from tenancy.database import Database, open_database
from tenancy.keys import ALLOWED_SCOPES, KeyKind
from tenancy.pepper import open_pepper
from tests.api.exchange import Exchange, call
from tests.fakes import Fakes, fake_services
from tests.migrated import copy_migrated


@dataclass
class Administered:
    app: ASGIApp
    database: Database
    authenticator: Authenticator
    account_id: str
    admin: provisioning.IssuedKey
    other_id: str
    other: provisioning.IssuedKey

    async def ask(self, method: str, tail: str, body: object = b"", **options: Any) -> Exchange:
        """tail: behind the account's path."""
        values = {"key": self.admin.text, "account_id": self.account_id} | options
        return await call(
            self.app, method, f"/console/v1/accounts/{values.pop('account_id')}{tail}", body=body, **values
        )


@contextmanager
def administered(home: Path, **more: Any) -> Iterator[Administered]:
    settings = Settings.model_validate({"home": home, "cache_dir": home} | more)
    copy_migrated(home)
    database = open_database(settings.database_url)
    pepper = open_pepper(settings.pepper_path)
    accounts = [provisioning.open_account(database, name, clock=time.time_ns) for name in ("acme", "other")]
    keys = [
        provisioning.issue_key(
            database,
            pepper,
            account.id,
            name="a",
            kind=KeyKind.ADMIN,
            scopes=ALLOWED_SCOPES[KeyKind.ADMIN],
            clock=time.time_ns,
        )
        for account in accounts
    ]
    # No cache to speak of: what a test changes is seen at once, however slow the database is.
    authenticator = Authenticator(database, pepper, ttl_s=1e-9, negative_ttl_s=1e-9, stale_s=0)
    services = replace(fake_services(Fakes()), settings=settings, database=database, authenticator=authenticator)
    app = create_app(services)
    yield Administered(app, database, authenticator, accounts[0].id, keys[0], accounts[1].id, keys[1])
    database.close()
