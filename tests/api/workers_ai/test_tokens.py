"""Verification takes both kinds of key on both routes and says what is wrong in its own code."""

import pytest
from starlette.types import ASGIApp

from tests.api.exchange import get
from tests.fakes import ACCOUNT, ADMIN_KEY, KEY, OTHER_ACCOUNT

USER = "/client/v4/user/tokens/verify"
OWN = f"/client/v4/accounts/{ACCOUNT}/tokens/verify"


@pytest.mark.parametrize("path", [USER, OWN])
@pytest.mark.parametrize("key", [KEY, ADMIN_KEY])
async def test_a_good_key_is_active(app: ASGIApp, path: str, key: str) -> None:
    answer = await get(app, path, key=key)
    assert answer.json == {
        "result": {"id": "key-1", "status": "active"},
        "success": True,
        "errors": [],
        "messages": [{"code": 10000, "message": "This API Token is valid and active", "type": None}],
    }


@pytest.mark.parametrize(
    ("path", "key", "status", "code"),
    [
        (USER, "unknown", 401, 1000),
        (OWN, "unknown", 401, 1000),
        (USER, None, 400, 9106),
        (OWN.replace(ACCOUNT, OTHER_ACCOUNT), KEY, 403, 10000),
        (OWN.replace(ACCOUNT, "me"), KEY, 404, 7003),
    ],
)
async def test_others_are_not(app: ASGIApp, path: str, key: str | None, status: int, code: int) -> None:
    answer = await get(app, path, key=key)
    assert (answer.status, answer.json["errors"][0]["code"]) == (status, code)
