"""Times of the dashboard's pages over many events: `python -m benchmarks.dashboard_pages [EVENTS] [DATABASE_URL]`.

Seeds one account with that many events of 500 keys and 30 models over 90 days, with rollups as posting keeps them, and
asks for each page again and again: rendered whole, in this process, by somebody who is signed in.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa
import structlog

from api.app import create_app
from api.settings import Settings
from billing.budgets import Budgets
from billing.ledger.wallet import Wallets
from billing.rollups import DAY_NS, DIMENSIONS, GRAINS_NS, ROLLUPS, SUMMED, VIEWS
from billing.store import UsageStore
from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database, open_database
from tenancy.migrations import upgrade_schema
from tenancy.passwords import HashCost, Passwords
from tenancy.sign_in import SignIns, make_sign_in_link
from tests.api.dashboard.visitors import Visitor
from tests.fakes import Fakes, fake_services

EVENTS = 2_000_000
KEYS, MODELS, DAYS = 500, 30, 90
_ROUNDS = 12
_PATHS = (
    "",
    "/usage",
    "/usage?step=hour&from={week}&by=key",
    "/usage?by=key&from={quarter}",
    "/usage?by=key&model=model-3&from={quarter}",
    "/usage?step=hour&from={week}&by=key&model=model-3",
    "/usage?step=minute&from={day}&to={now}&by=outcome",
    "/requests",
    "/requests?outcome=refused",
    "/requests?model=model-3&key=key-7",
    "/requests?before={middle}",
    "/keys",
    "/limits",
    "/credits",
)


def _seed(database: Database, account_id: str, events: int, now_ns: int) -> None:
    """In SQL, and the rollups from the events: posting each as the drain does would take longer than measuring."""
    step_ns = DAYS * DAY_NS // events
    made = f"""
        WITH RECURSIVE numbers(n) AS
            (SELECT CAST(0 AS BIGINT) UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < {events})
        INSERT INTO usage_events
            (id, account_id, key_id, model, endpoint, stream, outcome, finish_reason, prompt_tokens, cached_tokens,
             completion_tokens, reasoning_tokens, usage_source, charged, cost_nano, neurons_micro, price_version,
             started_at_ns, ended_at_ns, queued_ms, ttft_ms, replica)
        SELECT CAST(n AS VARCHAR), '{account_id}', 'key-' || (n * 7919 % {KEYS}), 'model-' || (n * 104729 % {MODELS}),
            'chat', TRUE,
            CASE WHEN n % 20 = 0 THEN 'upstream_failed' WHEN n % 20 = 1 THEN 'refused' ELSE 'finished' END,
            'stop', 500 + n % 900, n % 400, n % 300, 0, 'engine', TRUE, 1000 * (n % 977), n % 977, 1,
            CAST({now_ns} - ({events} - n) * CAST({step_ns} AS BIGINT) AS BIGINT),
            CAST({now_ns} - ({events} - n) * CAST({step_ns} AS BIGINT) + 900000000 AS BIGINT), 0, n % 700, 'engine-0'
        FROM numbers"""
    with database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        connection.execute(sa.text(made))
        for grain, view in ROLLUPS:
            told = [name if name in VIEWS[view] else "''" for name in DIMENSIONS]
            period = f"started_at_ns / {GRAINS_NS[grain]} * {GRAINS_NS[grain]}"
            summed = ", ".join(f"SUM({name})" for name in SUMMED)
            grouped = ", ".join([period, *(name for name in DIMENSIONS if name in VIEWS[view])])
            connection.execute(
                sa.text(
                    f"INSERT INTO usage_rollups (account_id, view, grain, period_start_ns, {', '.join(DIMENSIONS)}, "
                    f"requests, {', '.join(SUMMED)}) SELECT '{account_id}', '{view}', '{grain}', {period}, "
                    f"{', '.join(told)}, COUNT(*), {summed} FROM usage_events GROUP BY {grouped}"
                )
            )


@contextmanager
def _opened(url: str | None, folder: Path) -> Iterator[tuple[Database, Settings]]:
    values: dict[str, Any] = {"home": folder, "cache_dir": folder}
    settings = Settings.model_validate(values if url is None else values | {"database_url": url})
    database = open_database(settings.database_url)
    upgrade_schema(database.engine)
    yield database, settings
    database.close()


async def _measure(database: Database, settings: Settings, events: int) -> None:
    account = provisioning.open_account(database, "acme", clock=time.time_ns)
    user = people.dashboard_user(database, clock=time.time_ns)
    now_ns = time.time_ns() // DAY_NS * DAY_NS
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    began = time.monotonic()
    _seed(database, account.id, events, now_ns)
    with database.write() as connection:
        connection.execute(sa.text("ANALYZE"))
    print(f"{database.engine.dialect.name}: {events:,} events in {time.monotonic() - began:.0f} s")
    passwords = Passwords(HashCost(memory_kib=8, passes=1))
    fakes = Fakes(settings=settings, sign_ins=SignIns(database, passwords, clock=time.time_ns))
    fakes.usage = cast("Any", UsageStore(database))
    fakes.budgets = cast("Any", Budgets(database, clock=time.time_ns))
    fakes.wallets = cast("Any", Wallets(database, clock=time.time_ns))
    services = replace(fake_services(fakes), database=database)
    visitor = Visitor(create_app(services))
    await visitor.post(f"/dashboard/link/{make_sign_in_link(database, user, by=COMMAND_LINE, clock=time.time_ns)}")
    times = {name: _iso(now_ns - round(days * DAY_NS)) for name, days in (("quarter", 89), ("week", 6), ("day", 0.9))}
    times["now"] = _iso(now_ns)
    times["middle"] = f"{now_ns - 45 * DAY_NS}.{'0' * 36}"
    for path in _PATHS:
        if path == "/limits":
            continue  # its meters are not the database's
        filled = f"/dashboard/a/{account.id}{path.format(**times)}"
        spent = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            answer = await visitor.get(filled)
            spent.append((time.perf_counter() - start) * 1000)
            assert answer.status == 200, filled
        spent.sort()
        print(f"{path or '(overview)':60} p50 {spent[len(spent) // 2]:7.0f} ms   most {spent[-1]:7.0f} ms")
    passwords.close()


def _iso(at_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_ns // 1_000_000_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", type=int, nargs="?", default=EVENTS)
    parser.add_argument("url", nargs="?", help="of an empty database; SQLite in a temporary folder if left out")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _opened(asked.url, Path(folder)) as (database, settings):
        asyncio.run(_measure(database, settings, asked.events))


if __name__ == "__main__":
    main()
