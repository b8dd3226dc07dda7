"""End users and tags over real sockets: recorded, told apart, bounded, and in no metric and no log line."""

import json
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from billing.budgets import BudgetPeriod
from tests.e2e.dialects import CHAT, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Answer, Service

HEADER = "cf-aig-metadata"


async def ask(service: Service, dialect: Dialect = CHAT, tags: Mapping[str, Any] | None = None, **body: Any) -> Answer:
    headers = {} if tags is None else {HEADER: json.dumps(tags)}
    return await service.post(dialect.path(service), dialect.body(service, **body), headers=headers)


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_recorded_from_head_and_body(service: Service, dialect: Dialect, stream: bool) -> None:  # noqa: FBT001 - a table's column
    body: dict[str, Any] = {"user": "ada", "metadata": {"team": "of the body", "n": 3}, "stream": stream}
    answer = await ask(service, dialect, {"team": "search", "live": True}, **body)
    assert answer.status == 200, answer.body
    assert "x-ignored-params" not in answer.headers
    row = (await service.records())[0]
    assert (row["end_user"], row["tags"]) == ("ada", {"team": "search", "live": "true", "n": "3"})
    await service.oracle(rows=1)


async def test_words_of_a_runs_query_are_tags_that_are_true(service: Service) -> None:
    path = RUN.path(service)
    for query in ("tags=search,env:dev&tags=search&tags=", "tags=" + ",".join("abcde")):
        assert (await service.post(f"{path}?{query}", RUN.body(service), headers={HEADER: '{"a": 1}'})).status == 200
    rows = await service.records()
    assert [row["tags"] for row in rows] == [
        {"a": "1", "b": "true", "c": "true", "d": "true", "e": "true"},
        {"a": "1", "search": "true", "env:dev": "true"},
    ]


@pytest.mark.parametrize("wrong", ["a,b,c,d,e,f", "a%20b", "a=b", "x" * 51, "%C3%A4"])
async def test_words_that_can_be_no_tags_are_refused(service: Service, wrong: str) -> None:
    answer = await service.post(f"{RUN.path(service)}?tags={wrong}", RUN.body(service))
    assert answer.status == 400, answer.body
    assert b"tags" in answer.body
    assert service.engine.requests == []


async def test_usage_and_costs_are_told_apart_by_them(service: Service) -> None:
    await ask(service, tags={"team": "search"}, user="ada")
    await ask(service, tags={"team": "search", "env": "dev"}, safety_identifier="ada", user="another")
    await ask(service, user="bob")
    await ask(service)
    base = f"/accounts/{service.account_id}"
    total = (await service.console(f"{base}/usage"))["totals"]
    by_user = await service.console(f"{base}/usage?group_by=end_user")
    assert {group["end_user"]: group["requests"] for group in by_user["groups"]} == {None: 1, "ada": 2, "bob": 1}
    by_tag = await service.console(f"{base}/costs?group_by=tag")
    assert [group["tag"] for group in by_tag["groups"]] == [None, "env=dev", "team=search"]
    assert by_tag["overlapping"]
    assert by_user["totals"] == total
    assert by_tag["totals"]["cost_nano"] == total["cost_nano"]
    of_tag = await service.console(f"{base}/usage?tag=team%3Dsearch&group_by=model")
    assert of_tag["totals"]["requests"] == 2
    assert len((await service.console(f"{base}/requests?end_user=ada"))["requests"]) == 2
    part = await service.send("GET", f"/console/v1{base}/usage?group_by=tag&from=1&to=2", key=service.admin_key)
    assert (part.status, b"midnights" in part.body) == (400, True)


async def test_a_budget_of_one_end_user_binds_nobody_else(service: Service) -> None:
    service.services.budgets.add(service.account_id, 0, BudgetPeriod.MONTH, end_user="ada")
    assert [(await ask(service, user=user)).status for user in ("ada", "bob", "Ada")] == [429, 200, 200]
    (budget,) = (await service.console(f"/accounts/{service.account_id}/budgets"))["budgets"]
    assert budget["end_user"] == "ada"


@pytest.mark.parametrize(
    "wrong",
    ["team", "[1]", "{", '{"a": {}}', '{"a": null}', orjson.dumps({str(n): n for n in range(6)}).decode(), "x" * 5_000],
)
async def test_a_head_that_says_nothing_clear_is_refused(service: Service, wrong: str) -> None:
    answer = await service.post(CHAT.path(service), CHAT.body(service), headers={HEADER: wrong})
    assert answer.status == 400, answer.body
    assert HEADER.encode() in answer.body
    assert service.engine.requests == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": "u" * 257},
        {"user": "a\0"},
        {"safety_identifier": "a\n"},
        {"metadata": {"a": ["b"]}},
        {"metadata": {"a": "b\0"}},
        {"metadata": {str(n): "x" for n in range(17)}},
    ],
)
async def test_a_body_that_a_record_could_not_keep_is_refused(service: Service, wrong: dict[str, Any]) -> None:
    assert (await ask(service, **wrong)).status == 400
    assert service.engine.requests == []


async def test_they_stand_in_no_metric_and_no_log_line(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    await ask(service, tags={"canarytag": "canarycontent"}, user="canaryuser")
    await ask(service, tags={"canarytag": "canarycontent"}, user="canaryuser", model="@cf/unknown")
    metrics = await service.send("GET", "/metrics", key=service.admin_key)
    assert b"canary" not in metrics.body
    said = capsys.readouterr()
    assert "canary" not in said.out + said.err
