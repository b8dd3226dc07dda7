"""What the pages of usage say is what the API says for the same filter, in tile, chart, table and CSV."""

import csv
import io
import json
import re
import time
from itertools import product
from typing import Any

import pytest

from api.console.accounts import iso
from billing.budgets import BudgetPeriod
from billing.rollups import DAY_NS
from billing.summaries import GroupBy, UsageFilter
from tenancy.projects import list_projects
from tests.api.dashboard.visitors import Dashboard, Visitor, text_of
from tests.billing.rows import event_row, post_rows

_MODELS, _KEYS = ("m1", "m2", "@cf/a/b"), ("k1", "k2")


@pytest.fixture
async def visitor(site: Dashboard) -> Visitor:
    """Some requests of three models, two keys and three outcomes over five days, several a day."""
    now_ns = time.time_ns() // DAY_NS * DAY_NS
    rows = []
    for number, (model, key, day) in enumerate(product(_MODELS, _KEYS, range(5))):
        outcome = ("finished", "finished", "client_disconnected", "upstream_failed")[number % 4]
        rows.append(
            event_row(
                id=f"r{number}",
                account_id=site.account_id,
                key_id=key,
                model=model,
                outcome=outcome,
                prompt_tokens=100 + number,
                cached_tokens=number,
                completion_tokens=number * 7,
                cost_nano=1_000_000 * number + 1,
                neurons_micro=1_000 * number,
                end_user=("ann", "bob", None)[number % 3],
                tags=('{"team":"search","env":"prod"}', '{"team":"ads"}', None)[number % 3],
                charged=outcome != "upstream_failed",
                started_at_ns=now_ns - day * DAY_NS + number * 61_000_000_000,
                ended_at_ns=now_ns - day * DAY_NS + number * 61_000_000_000 + 1_000_000_000,
            )
        )
    post_rows(site.database, *rows, event_row(id="foreign", account_id=site.other_id, started_at_ns=now_ns))
    return await site.visitor("viewer")


def _cells(html: str, row_id: str) -> list[str]:
    row = re.search(rf'<tr id="{row_id}">(.*?)</tr>', html, re.DOTALL)
    assert row, "there is such a row"
    return re.findall(r'<data class="\w+" value="([^"]*)"', row[1])


def _chart(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="usage-data">(.*?)</script>', html, re.DOTALL)
    assert found
    chart: dict[str, Any] = json.loads(found[1])
    return chart


_ASKED = [
    ("model", ""),
    ("model", "key=k2"),
    ("model", "model=m2&key=k1"),
    ("key", "outcome=finished"),
    ("key", "model=m1"),
    ("outcome", ""),
    ("outcome", "endpoint=chat"),
    ("endpoint", "outcome=refused"),
    ("none", "model=m1"),
    ("end_user", ""),
    ("end_user", "model=m1&key=k2"),
    ("model", "end_user=ann"),
    ("key", "tag=team=search"),
    ("none", "tag=env=prod"),
    ("project", ""),
    ("project", "model=m1"),
]


@pytest.mark.parametrize(("by", "only"), _ASKED)
async def test_table_chart_and_csv_add_up_to_the_apis_total(
    site: Dashboard, visitor: Visitor, by: str, only: str
) -> None:
    now_ns = time.time_ns() // DAY_NS * DAY_NS + DAY_NS
    asked = f"from={iso(now_ns - 6 * DAY_NS)[:19]}&to={iso(now_ns)[:19]}&step=day&by={by}&{only}"
    html = (await visitor.get(site.path(f"/usage?{asked}"))).body.decode()
    filters = dict(part.split("=", 1) for part in only.split("&") if part)
    wanted = site.services.usage.usage_summary(
        site.account_id,
        now_ns - 6 * DAY_NS,
        now_ns,
        GroupBy(by),
        UsageFilter(
            model=filters.get("model"),
            key_id=filters.get("key"),
            endpoint=filters.get("endpoint"),
            outcome=filters.get("outcome"),
            end_user=filters.get("end_user"),
            tag=filters.get("tag"),
        ),
    ).totals
    if not wanted.requests:
        assert "Nothing was used" in html
        return
    cells = _cells(html, "totals")
    assert [int(cell) for cell in cells[:5]] == [
        wanted.requests,
        wanted.prompt_tokens,
        wanted.cached_tokens,
        wanted.completion_tokens,
        wanted.prompt_tokens + wanted.completion_tokens,
    ]
    bands = _chart(html)["bands"]
    assert sum(sum(band["values"]) for band in bands) == wanted.cost_nano
    text = (await visitor.get(site.path(f"/usage.csv?{asked}"))).body.decode()
    *rows, total = list(csv.DictReader(io.StringIO(text)))
    for column, amount in (("requests", wanted.requests), ("prompt_tokens", wanted.prompt_tokens)):
        assert sum(int(row[column]) for row in rows) == amount == int(total[column])
    assert sum(round(float(row["cost_usd"]) * 1e9) for row in rows) == wanted.cost_nano


async def test_tags_overlap_and_say_so(site: Dashboard, visitor: Visitor) -> None:
    now_ns = time.time_ns() // DAY_NS * DAY_NS + DAY_NS
    period = (now_ns - 6 * DAY_NS, now_ns)
    asked = f"from={iso(period[0])[:19]}&to={iso(period[1])[:19]}&step=day&by=tag"
    answer = await visitor.get(site.path(f"/usage?{asked}"))
    html = answer.body.decode()
    wanted = site.services.usage.usage_summary(site.account_id, *period, GroupBy.TAG)
    chart = _chart(html)
    assert chart["lines"] is True
    names = {group.key or "(none)": group.totals.cost_nano for group in wanted.groups}
    assert {band["name"]: sum(band["values"]) for band in chart["bands"]} == names
    assert sorted(names) == ["(none)", "env=prod", "team=ads", "team=search"]
    assert int(_cells(html, "totals")[0]) == wanted.totals.requests == 30
    assert "A request counts for each of its tags" in text_of(answer)


async def test_projects_are_told_by_their_names(site: Dashboard, visitor: Visitor) -> None:
    page = text_of(await visitor.get(site.path("/usage?by=project")))
    (project,) = list_projects(site.database, site.account_id)
    assert f"{project.name} 30" in page


async def test_the_log_is_filtered_by_end_user_tag_and_project(site: Dashboard, visitor: Visitor) -> None:
    counted = {}
    for asked in ("end_user=ann", "tag=team%3Dads", "tag=team%3Dnone", f"project={site.account_id}"):
        html = (await visitor.get(site.path(f"/requests?{asked}"))).body.decode()
        counted[asked] = len(re.findall(rf"{site.path('/requests/')}r\d+", html))
    assert list(counted.values()) == [10, 10, 0, 30]
    page = text_of(await visitor.get(site.path("/requests/r0")))
    assert "End user ann" in page
    assert "team=search" in page


async def test_the_page_names_the_call_that_gives_the_same(site: Dashboard, visitor: Visitor) -> None:
    html = (await visitor.get(site.path("/usage?by=key&model=m1"))).body.decode()
    assert f"GET /console/v1/accounts/{site.account_id}/usage?" in html
    assert "group_by=key" in html


async def test_cumulative_values_end_at_the_sum(site: Dashboard, visitor: Visitor) -> None:
    plain = _chart((await visitor.get(site.path("/usage?measure=requests"))).body.decode())
    running = _chart((await visitor.get(site.path("/usage?measure=requests&running=1"))).body.decode())
    assert [sum(band["values"]) for band in plain["bands"]] == [band["values"][-1] for band in running["bands"]]


async def test_steps_are_utc_whatever_the_machines_zone(
    site: Dashboard, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns() // DAY_NS * DAY_NS + DAY_NS
    charts, asked = [], f"from={iso(now_ns - 6 * DAY_NS)[:19]}&to={iso(now_ns)[:19]}"
    for zone in ("UTC", "Asia/Tokyo", "America/Los_Angeles"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        charts.append(_chart((await visitor.get(site.path(f"/usage?{asked}"))).body.decode()))
    monkeypatch.delenv("TZ")
    time.tzset()
    assert charts[0] == charts[1] == charts[2]
    assert all(step % 86_400 == 0 for step in charts[0]["steps"])


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("from=2026-01-02&to=2026-01-01", "ends before it begins"),
        ("from=2026-01-01&to=2026-01-03&step=minute", "at most 1 days"),
        ("from=2020-01-01&to=2026-01-01", "at most 731 days"),
        ("from=2026-01-01&to=2026-01-20&step=hour&model=m1&by=key", "at most 7 days"),
        ("from=2026-01-01&to=2026-01-02&step=hour&by=tag", "choose steps of one day"),
        ("from=2026-01-01T12:00:00&to=2026-01-03&by=end_user", "must be midnights"),
        ("from=2026-01-01&to=2026-01-03&by=tag&end_user=ann", "not by both together"),
        ("from=2026-01-01&to=2026-01-03&by=outcome&tag=a=b", "by model, key, project and day alone"),
    ],
)
async def test_a_range_that_can_not_be_told_is_refused_in_words(
    site: Dashboard, visitor: Visitor, query: str, said: str
) -> None:
    answer = await visitor.get(site.path(f"/usage?{query}"))
    assert answer.status == 400
    assert said in text_of(answer)


@pytest.mark.parametrize("query", ["from=yesterday", "step=model", "by=day", "measure=x", "to=99999999999999"])
async def test_a_query_that_is_none_is_refused(site: Dashboard, visitor: Visitor, query: str) -> None:
    assert (await visitor.get(site.path(f"/usage?{query}"))).status == 400


async def test_a_name_that_a_spreadsheet_would_run_is_text(site: Dashboard, visitor: Visitor) -> None:
    post_rows(
        site.database,
        event_row(id="evil", account_id=site.account_id, model="=HYPERLINK(1)", started_at_ns=time.time_ns()),
    )
    text = (await visitor.get(site.path("/usage.csv"))).body.decode()
    assert "'=HYPERLINK" in text
    assert ",=HYPERLINK" not in text


async def test_the_overview_says_what_the_summaries_say(site: Dashboard, visitor: Visitor) -> None:
    period_ns, html = (0, 0), ""
    while not period_ns[0] <= time.time_ns() < period_ns[1]:  # or a month has ended since
        period_ns = BudgetPeriod.MONTH.around(time.time_ns())
        html = (await visitor.get(site.path())).body.decode()
    month = site.services.usage.usage_summary(site.account_id, *period_ns).totals
    for tile, amount in (
        ("requests", month.requests),
        ("tokens-in", month.prompt_tokens),
        ("tokens-cached", month.cached_tokens),
        ("tokens-out", month.completion_tokens),
    ):
        found = re.search(rf'id="{tile}">.*?value="(\d+)"', html, re.DOTALL)
        assert found
        assert int(found[1]) == amount


async def test_the_log_goes_on_page_by_page_without_gaps(site: Dashboard, visitor: Visitor) -> None:
    now_ns = time.time_ns()
    rows = [
        event_row(id=f"0197f5a0-0000-7000-8000-{n:012}", account_id=site.account_id, started_at_ns=now_ns - n)
        for n in range(70)
    ]
    post_rows(site.database, *rows)
    seen: list[str] = []
    path: str | None = site.path("/requests")
    while path is not None:
        html = (await visitor.get(path)).body.decode()
        seen += re.findall(rf'{site.path("/requests/")}([\w-]+)"', html)
        onward = re.search(r'rel="next" href="([^"]+)"', html)
        path = onward[1].replace("&amp;", "&") if onward else None
    assert len(seen) == len(set(seen)) == 100
    filtered = (await visitor.get(site.path("/requests?model=m1&outcome=finished"))).body.decode()
    assert 0 < len(re.findall(rf"{site.path('/requests/')}", filtered)) < 10


@pytest.mark.load
async def test_an_operator_sees_tenants_by_spend_and_by_the_pages_that_they_held(site: Dashboard) -> None:
    # As much in the next month, which may have begun when the pages are asked for.
    for month_ns in BudgetPeriod.MONTH.around(time.time_ns()):
        for name, account_id, cost_nano, page_ms in (
            ("dear", site.account_id, 9_000_000_000, 1_000),
            ("long", site.other_id, 1_000_000_000, 7_500_000),
        ):
            row = event_row(
                id=f"{name} {month_ns}",
                account_id=account_id,
                cost_nano=cost_nano,
                kv_page_ms=page_ms,
                started_at_ns=month_ns + 1,
            )
            post_rows(site.database, row)
    operator = await site.visitor("operator")
    names = [
        re.findall(r'<th scope="row"><a href="[^"]*">(\w+)</a>', (await operator.get(path)).body.decode())
        for path in ("/dashboard/operator/tenants", "/dashboard/operator/tenants?by=pages")
    ]
    assert names == [["acme", "other"], ["other", "acme"]]
    assert "7,500" in text_of(await operator.get("/dashboard/operator/tenants"))


async def test_a_request_says_what_it_was_served_in(site: Dashboard, visitor: Visitor) -> None:
    row = event_row(
        id="told", account_id=site.account_id, kv_page_ms=12_000, precisions="weights=int4,kv_cache=fp8_e4m3",
        deployment="a1b2", started_at_ns=time.time_ns(),
    )  # fmt: skip
    post_rows(site.database, row)
    page = text_of(await visitor.get(site.path("/requests/told")))
    for said in ("KV page-seconds 12", "Deployment a1b2", "Weights int4", "KV cache fp8_e4m3"):
        assert said in page


async def test_one_request_is_told_line_by_line(site: Dashboard, visitor: Visitor) -> None:
    answer = await visitor.get(site.path("/requests/r7"))
    assert answer.status == 200
    assert "$0.007000001" in text_of(answer)
    for unknown in ("nothing", "foreign"):
        assert (await visitor.get(site.path(f"/requests/{unknown}"))).status == 404
