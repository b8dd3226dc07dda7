"""Invoices over real sockets: what an account used is what it is billed, and nobody else sees it."""

from collections.abc import Callable

import pytest

from api.console.accounts import iso
from billing.invoices.close import MonthClose
from billing.ledger.periods import month_bounds
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service


async def closed_months(service: Service) -> tuple[int, int]:
    """Close the month of each request, as if it had ended: two, where one ends meanwhile. Their begin and end."""
    await service.services.metering.flush()
    months = sorted({row["started_at"][:7] for row in await service.records()})
    from_ns, to_ns = month_bounds(months[0])[0], month_bounds(months[-1])[1]
    database = service.services.database
    close: Callable[[str], object] = MonthClose(database, seller="Seller", clock=lambda: to_ns).close
    for month in months:
        await database.call(close, month)
    return from_ns, to_ns


async def test_an_invoice_comes_to_what_the_requests_cost(service: Service) -> None:
    for _ in range(3):
        assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
    from_ns, to_ns = await closed_months(service)
    base = f"/accounts/{service.account_id}/invoices"
    numbers = [summary["number"] for summary in (await service.console(base))["invoices"]]
    lines = [line for number in numbers for line in (await service.console(f"{base}/{number}"))["lines"]]
    totals = await service.console(f"/accounts/{service.account_id}/usage?from={iso(from_ns)}&to={iso(to_ns)}")
    assert sum(line["amount_nano"] for line in lines) == totals["totals"]["cost_nano"] > 0
    assert sum(line["requests"] for line in lines) == 3
    assert (await service.console("/invariants"))["violations"] == []


@pytest.mark.parametrize(
    ("form", "kind"),
    [("json", "application/json"), ("html", "text/html"), ("pdf", "application/pdf"), ("csv", "text/csv")],
)
async def test_an_invoice_comes_in_each_form(service: Service, form: str, kind: str) -> None:
    assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
    await closed_months(service)
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
