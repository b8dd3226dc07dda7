"""What is counted and charged of a request depends on its prompt and its answer, and on no route, form or ending."""

import re
import sqlite3
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from billing.tables import usage_rollups
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, COMPLETIONS, PROMPT, RUN
from tests.e2e.ledger import expected_cost_nano
from tests.e2e.service import Service

PRODUCED, CACHED = 20, 3
COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano", "neurons", "outcome")


def every_route(service: Service) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of one and the same chat on each route that takes it."""
    asked = [
        (dialect.path(service), dialect.body(service, max_tokens=PRODUCED)) for dialect in (CHAT, ACCOUNT_CHAT, RUN)
    ]
    responses = {"model": service.model, "input": PROMPT, "max_output_tokens": PRODUCED}
    account = f"/client/v4/accounts/{service.account_id}/ai"
    asked += [("/v1/responses", responses), (f"{account}/v1/responses", responses)]
    return [*asked, (f"{account}/run/{service.model}", {"prompt": PROMPT, "max_tokens": PRODUCED})]


async def ask_on_every_route(service: Service) -> None:
    """Whole and as a stream, and all of it is in the records."""
    routes = every_route(service)
    for path, body in routes:
        for form in ({}, {"stream": True}):
            answer = await service.post(path, body | form)
            assert answer.status == 200, answer.body
    await service.oracle(rows=2 * len(routes))


async def test_one_chat_is_counted_and_charged_alike_on_every_route_streamed_or_not(service: Service) -> None:
    service.engine.steer(usage={"cached_tokens": CACHED})
    await ask_on_every_route(service)
    rows = await service.records()
    (counted,) = {tuple(row[name] for name in COUNTED) for row in rows}
    assert counted[1:3] == (CACHED, PRODUCED)
    assert rows[0]["cost_nano"] == expected_cost_nano(service, rows[0]) > 0
    totals = (await service.console(f"/accounts/{service.account_id}/usage"))["totals"]
    assert totals["requests"] == len(rows)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nano"):
        assert totals[name] == len(rows) * rows[0][name], name


async def test_what_an_engine_does_not_count_is_estimated_on_every_route_and_never_nothing(service: Service) -> None:
    service.engine.steer(no_usage=True, text="a")
    await ask_on_every_route(service)
    (prompt_tokens,) = {len(received.body["input_ids"]) for received in service.engine.requests}
    for row in await service.records():
        assert (row["usage_source"], row["prompt_tokens"]) == ("estimated", prompt_tokens)
        assert row["cost_nano"] == expected_cost_nano(service, row) > 0
        if row["stream"]:
            assert row["completion_tokens"] == PRODUCED, "each event of a token, and no other"
        else:
            assert 1 <= row["completion_tokens"] <= PRODUCED, "so many tokens as the text has"


async def test_who_leaves_a_stream_pays_the_cached_price_for_what_was_cached_on_both_kinds_of_route(
    service: Service,
) -> None:
    """Running usage does not say how much was: the engine's last word, after it was stopped, does."""
    service.engine.steer(usage={"cached_tokens": CACHED}, itl_ms=20)
    for dialect in (CHAT, COMPLETIONS):
        body = dialect.body(service, stream=True, max_tokens=400)
        async with service.open_stream(dialect.path(service), body) as response:
            for _ in range(6):
                await response.content.readline()
        await eventually(lambda: not service.engine.live, what="a stopped engine")
    await service.oracle(rows=2)
    for row in await service.records():
        assert (row["outcome"], row["cached_tokens"], row["usage_source"]) == ("client_disconnected", CACHED, "engine")
        assert row["cost_nano"] == expected_cost_nano(service, row)


async def test_what_was_answered_is_in_the_sums_by_itself_and_what_waits_is_told(service: Service) -> None:
    """Nobody who reads usage hurries the records along here."""
    home = service.services.settings.home
    with closing(sqlite3.connect(home / "pagegate.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else writes
        for _ in range(3):
            assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200
        assert await lag(service) == 3
        other.execute("ROLLBACK")
    await eventually_async(lambda: drained(service), what="drained records")
    with service.services.database.read() as connection:
        of_each = sa.func.sum(usage_rollups.c.requests)
        summed = connection.scalars(sa.select(of_each).group_by(usage_rollups.c.view, usage_rollups.c.grain)).all()
    assert set(summed) == {3}


async def lag(service: Service) -> float:
    text = (await service.send("GET", "/metrics")).body.decode()
    (value,) = re.findall(r"^pagegate_spool_lag_records (\S+)$", text, re.MULTILINE)
    return float(value)


async def drained(service: Service) -> bool:
    return await lag(service) == 0
