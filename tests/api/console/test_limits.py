"""What a key may take, and what is left: the numbers of the headers, for free."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tenancy.claims import Meter
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Reservation
from tenancy.principal import Principal, Scope
from tenancy.quotas import Amounts, Quota
from tests.api.exchange import get
from tests.fakes import ACCOUNT, OTHER_ACCOUNT, Fakes

PATH = f"/console/v1/accounts/{ACCOUNT}/limits"
QUOTAS = (
    Quota(Meter.REQUESTS_PER_MINUTE, 10),
    Quota(Meter.TOKENS_PER_MINUTE, 100, model="m"),
    Quota(Meter.REQUESTS_PER_DAY, 7, key_id="another"),
)


def _principal(scopes: Sequence[Scope]) -> Principal:
    return Principal(ACCOUNT, "key-1", frozenset(scopes), 4, None, quotas=QUOTAS)


@pytest.fixture
def meters() -> ProcessMeters:
    return ProcessMeters()


@pytest.fixture
def app(fakes: Fakes, meters: ProcessMeters) -> ASGIApp:
    fakes.authenticator.keys = {
        "inference": _principal([Scope.AI_READ]),
        "admin": _principal([Scope.AI_READ, Scope.ACCOUNT_ADMIN]),
        "bare": _principal([]),
    }
    fakes.holds = cast("Any", SimpleNamespace(meters=meters, live={}))
    return create_app(fakes.services)


async def test_looking_shows_the_headers_numbers_and_costs_nothing(app: ASGIApp, meters: ProcessMeters) -> None:
    await meters.reserve(_principal([]), Reservation("r1", "m", Amounts(tokens_in=30)))
    for _ in range(100):
        answer = await get(app, f"{PATH}?model=m", key="inference")
    shown = [(row["meter"], row["limit"], row["remaining"]) for row in answer.json["limits"]]
    assert shown == [("concurrency", 4, 3), ("requests_per_minute", 10, 9), ("tokens_per_minute", 100, 70)]
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "70"
    assert "rules" not in answer.json


async def test_an_admin_key_sees_every_rule(app: ASGIApp) -> None:
    answer = await get(app, PATH, key="admin")
    assert [row["meter"] for row in answer.json["limits"]] == ["concurrency", "requests_per_minute"]
    assert answer.json["rules"] == [
        {
            "meter": "requests_per_minute",
            "limit": 10,
            "project_id": None,
            "key_id": None,
            "model": None,
            "set_by": "operator",
        },
        {
            "meter": "tokens_per_minute",
            "limit": 100,
            "project_id": None,
            "key_id": None,
            "model": "m",
            "set_by": "operator",
        },
        {
            "meter": "requests_per_day",
            "limit": 7,
            "project_id": None,
            "key_id": "another",
            "model": None,
            "set_by": "operator",
        },
    ]


async def test_foreign_and_unknown_accounts_are_the_same_404(app: ASGIApp) -> None:
    for account in (OTHER_ACCOUNT, "0" * 32, "nonsense"):
        answer = await get(app, f"/console/v1/accounts/{account}/limits", key="admin")
        assert (answer.status, answer.json["code"]) == (404, "account_not_found")
    assert (await get(app, PATH, key="bare")).status == 403
    assert (await get(app, f"{PATH}?nonsense=1", key="admin")).status == 400
