"""An account's wallet, ledger and budgets, for its own admin keys alone."""

from dataclasses import replace

import pytest
from starlette.types import ASGIApp

from billing.budgets import Budget, BudgetPeriod, BudgetStanding
from billing.ledger.payers import AccountMode, HoldMode
from billing.ledger.statement import StatementLine
from billing.ledger.wallet import Grant
from tests.api.exchange import get
from tests.fakes import ACCOUNT, ADMIN_KEY, CREATED, KEY, OTHER_ACCOUNT, Fakes

BASE = f"/console/v1/accounts/{ACCOUNT}"
AT_NS = CREATED * 10**9
AT = "2027-01-15T08:00:00.000000Z"


class TestAccess:
    @pytest.mark.parametrize("tail", ["wallet", "ledger", "budgets"])
    async def test_foreign_and_unknown_accounts_are_the_same_404(self, app: ASGIApp, tail: str) -> None:
        for account in (OTHER_ACCOUNT, "0" * 32, "nonsense"):
            answer = await get(app, f"/console/v1/accounts/{account}/{tail}", key=ADMIN_KEY)
            assert (answer.status, answer.json["code"]) == (404, "account_not_found")

    @pytest.mark.parametrize("tail", ["wallet", "budgets"])
    async def test_only_an_admin_key_may_look(self, app: ASGIApp, tail: str) -> None:
        assert (await get(app, f"{BASE}/{tail}", key=None)).status == 401
        assert (await get(app, f"{BASE}/{tail}", key=KEY)).status == 403
        assert (await get(app, f"{BASE}/{tail}", key=ADMIN_KEY)).status == 200


async def test_a_wallet_is_shown_with_its_grants(app: ASGIApp, fakes: Fakes) -> None:
    fakes.wallets.view = replace(
        fakes.wallets.view,
        mode=AccountMode.PREPAID,
        hold_mode=HoldMode.CLAMP,
        wallet_nano=1_500_000_000,
        grants=(Grant("g1", 10**9, 5 * 10**8, 0, AT_NS, AT_NS),),
    )
    assert (await get(app, f"{BASE}/wallet", key=ADMIN_KEY)).json == {
        "account_id": ACCOUNT,
        "mode": "prepaid",
        "hold_mode": "clamp",
        "wallet": "1.5",
        "wallet_nano": 1_500_000_000,
        "owed": "0",
        "owed_nano": 0,
        "grants": [
            {
                "id": "g1",
                "amount": "1",
                "amount_nano": 10**9,
                "left": "0.5",
                "left_nano": 5 * 10**8,
                "priority": 0,
                "expires_at": AT,
                "created_at": AT,
            }
        ],
    }
    assert fakes.metering.flushed == 1


async def test_a_ledger_is_paged(app: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def statement(_database: object, *args: object) -> list[StatementLine]:
        asked.append(args)
        return [StatementLine("usage:r1", "usage", AT_NS, AT_NS, None, None, (("revenue", 7), ("wallet:a", -7)))]

    monkeypatch.setattr("api.console.ledger.read_statement", statement)
    page = (await get(app, f"{BASE}/ledger?limit=1", key=ADMIN_KEY)).json
    assert page["next"] == f"{AT_NS}.usage:r1"
    assert page["transactions"][0]["entries"] == [
        {"ledger_account": "revenue", "amount": "0.000000007", "amount_nano": 7},
        {"ledger_account": "wallet:a", "amount": "-0.000000007", "amount_nano": -7},
    ]
    last = (await get(app, f"{BASE}/ledger?limit=2&before={page['next']}", key=ADMIN_KEY)).json
    assert last["next"] is None
    assert asked == [(ACCOUNT, 1, None), (ACCOUNT, 2, (AT_NS, "usage:r1"))]


@pytest.mark.parametrize("query", ["ledger?before=x", "ledger?limit=0", "budgets?at=tomorrow"])
async def test_a_bad_query_is_named(app: ASGIApp, query: str) -> None:
    answer = await get(app, f"{BASE}/{query}", key=ADMIN_KEY)
    assert answer.status == 400


async def test_budgets_show_what_is_spent_in_a_period(app: ASGIApp, fakes: Fakes) -> None:
    budget = Budget("b1", ACCOUNT, None, "m", BudgetPeriod.DAY, 10**9, hard=True, created_at_ns=AT_NS)
    fakes.budgets.standing = [BudgetStanding(budget, AT_NS, AT_NS + 1_000, 5), _total(budget)]
    answer = (await get(app, f"{BASE}/budgets?at=2026-11-02", key=ADMIN_KEY)).json
    assert answer["budgets"][0] == {
        "id": "b1",
        "key_id": None,
        "model": "m",
        "project_id": None,
        "end_user": None,
        "period": "day",
        "hard": True,
        "set_by": "operator",
        "limit": "1",
        "limit_nano": 10**9,
        "spent": "0.000000005",
        "spent_nano": 5,
        "from": AT,
        "to": "2027-01-15T08:00:00.000001Z",
        "created_at": AT,
    }
    assert (answer["budgets"][1]["from"], answer["budgets"][1]["to"]) == (None, None)
    assert fakes.budgets.asked == [(ACCOUNT, 1_793_577_600 * 10**9)]


def _total(budget: Budget) -> BudgetStanding:
    return BudgetStanding(replace(budget, period=BudgetPeriod.TOTAL), 0, 2**63 - 1, 5)
