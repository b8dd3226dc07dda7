"""Invoices over real sockets: what an account used is what it is billed, and nobody else sees it."""

import time
from collections.abc import Callable

import pytest

from api.console.accounts import iso
from billing.invoices.close import MonthClose
from billing.ledger.periods import month_bounds, month_of
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service


async def closed_month(service: Service) -> None:
    """Close the month that runs now, as if it had ended."""
    _, end_ns = month_bounds(month_of(time.time_ns()))
    database = service.services.database
    close: Callable[[str], object] = MonthClose(database, seller="Seller", clock=lambda: end_ns).close
    await service.services.metering.flush()
    await database.call(close, month_of(end_ns - 1))


async def test_an_invoice_comes_to_what_the_requests_cost(service: Service) -> None:
    for _ in range(3):
        assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
    month_ns = month_bounds(month_of(time.time_ns()))
    await closed_month(service)
    base = f"/accounts/{service.account_id}/invoices"
    (summary,) = (await service.console(base))["invoices"]
    invoice = await service.console(f"{base}/{summary['number']}")
    totals = await service.console(
        f"/accounts/{service.account_id}/usage?from={iso(month_ns[0])}&to={iso(month_ns[1])}"
    )
    assert sum(line["amount_nano"] for line in invoice["lines"]) == totals["totals"]["cost_nano"] > 0
    assert sum(line["requests"] for line in invoice["lines"]) == 3
    assert (await service.console("/invariants"))["violations"] == []


@pytest.mark.parametrize(
    ("form", "kind"),
    [("json", "application/json"), ("html", "text/html"), ("pdf", "application/pdf"), ("csv", "text/csv")],
)
async def test_an_invoice_comes_in_each_form(service: Service, form: str, kind: str) -> None:
    assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
    await closed_month(service)
    answer = await service.send(
        "GET", f"/console/v1/accounts/{service.account_id}/invoices/1?format={form}", key=service.admin_key
    )
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(kind)


@pytest.mark.parametrize("number", ["2", "0", "x", "99999999999999999999", "1;drop"])
async def test_an_unknown_invoice_is_404(service: Service, number: str) -> None:
    path = f"/console/v1/accounts/{service.account_id}/invoices/{number}"
    assert (await service.send("GET", path, key=service.admin_key)).status == 404


async def test_a_key_that_may_not_administer_sees_none(service: Service) -> None:
    path = f"/console/v1/accounts/{service.account_id}/invoices"
    assert (await service.send("GET", path, key=service.api_key)).status == 403
    assert (await service.send("GET", f"/console/v1/accounts/{'0' * 32}/invoices", key=service.admin_key)).status == 404
