"""A store that is stopped, hangs or loses its data while requests run: what goes on, what is refused and how, and that
all recovers by itself. Each is a real server.
"""

import asyncio
import contextlib
import re
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog

from billing.ledger.payers import AccountMode
from tenancy.keys import KeyKind, new_key_text
from tests.doubles.engine import ScriptedEngine
from tests.doubles.own_time import OwnTime
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service
from tests.stores import Away, PostgresServer, ValkeyServer

pytestmark = pytest.mark.stores

# Three times what is promised, for a machine that does ten things at once.
RECOVERY_S_MAX = 15.0
# Ten times what is promised: with seven runnable processes on two cores it was 0.55 s. Who waits for a store that does
# not answer waits for seconds.
ADDED_S_MAX = 1.0
# A store that is there again and has no turn on a busy machine is away once more.
CHANGES_MAX = 3
CLIENTS = 6
ALONE = "limits are kept by this process alone, at its share"
SHARED = "limits are shared again"
AWAY = "the database does not answer"
BACK = "the database answers again"


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """To be mistreated; each test leaves it running."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@dataclass
class Load:
    """Clients that ask again as soon as they are answered. answers: (status, error code) of each, in order."""

    service: Service
    own: OwnTime
    answers: list[tuple[int, str | None]] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    async def client(self) -> None:
        while True:
            began = self.own.now()
            answer = await self.service.post(CHAT.path(self.service), CHAT.body(self.service, max_tokens=2))
            self.took_s.append(self.own.since(began))
            code = None if answer.status == 200 else answer.json()["error"]["code"]
            self.answers.append((answer.status, code))

    async def more(self, count: int) -> Counter[tuple[int, str | None]]:
        """The next so many answers."""
        begins = len(self.answers)
        await eventually(lambda: len(self.answers) >= begins + count, within_s=40, what=f"{count} more answers")
        return Counter(self.answers[begins:])

    def added_s(self, begins: int) -> float:
        """What nineteen of twenty answers since then took more, at most, than half of those before."""
        return sorted(self.took_s[begins:])[(len(self.took_s) - begins) * 19 // 20] - statistics.median(
            self.took_s[:begins]
        )


@contextlib.asynccontextmanager
async def under_load(service: Service) -> AsyncIterator[Load]:
    with OwnTime() as own:
        load = Load(service, own)
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(load.client(), name="client") for _ in range(CLIENTS)]
            assert set(await load.more(20)) == {(200, None)}
            yield load
            for client in clients:
                client.cancel()


async def gauge(service: Service, name: str) -> float:
    text = (await service.send("GET", "/metrics")).body.decode()
    (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


async def becomes(service: Service, name: str, value: float, *, within_s: float) -> None:
    async def is_so() -> bool:
        return await gauge(service, name) == value

    await eventually_async(is_so, within_s=within_s, what=f"{name} {value}")


def said(logs: list[structlog.typing.EventDict], *events: str) -> list[int]:
    """How often each."""
    return [sum(line["event"] == event for line in logs) for event in events]


@pytest.mark.parametrize("how", ["stopped", "hanging", "wiped"])
async def test_without_meters_requests_go_on_by_a_share_and_nothing_is_open(
    how: str,
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    own_valkey: ValkeyServer,
) -> None:
    tenancy = {"meters_probe_interval_s": 0.1, "meters_processes": 2}
    shared: dict[str, Any] = {"meters_url": own_valkey.url, "pages_url": own_valkey.url}
    with structlog.testing.capture_logs() as logs:
        async with running_service(tmp_path / "home", checkpoint, engine, tenancy=tenancy, **shared) as service:
            async with under_load(service) as load:
                # In a thread: how long a server takes to end is no part of what requests wait for.
                await asyncio.to_thread(
                    {"stopped": own_valkey.stop, "hanging": own_valkey.hang, "wiped": own_valkey.wipe}[how]
                )
                healthy = len(load.answers)
                assert set(await load.more(60)) == {(200, None)}
                assert load.added_s(healthy) < ADDED_S_MAX
                invented = await service.post(
                    CHAT.path(service), CHAT.body(service), key=new_key_text(KeyKind.INFERENCE)
                )
                assert invented.status == 401, "no store that is away opens a door"
                if how == "wiped":
                    assert await gauge(service, "pagegate_limiter_degraded") == 0
                else:
                    await becomes(service, "pagegate_limiter_degraded", 1, within_s=RECOVERY_S_MAX)
                    await becomes(service, "pagegate_pages_alone", 1, within_s=RECOVERY_S_MAX)
                    await asyncio.to_thread(own_valkey.start if how == "stopped" else own_valkey.wake)
                    await becomes(service, "pagegate_limiter_degraded", 0, within_s=RECOVERY_S_MAX)
                    await becomes(service, "pagegate_pages_alone", 0, within_s=RECOVERY_S_MAX)
                await load.more(20)
            await eventually_async(service.is_clean, within_s=10, what="a clean service")
    went, came = said(logs, ALONE, SHARED)
    assert went == came
    assert went == 0 if how == "wiped" else 1 <= went <= CHANGES_MAX, "a line a change, however many requests saw it"


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_without_a_database_allowances_carry_on_then_it_is_a_503_and_never_a_401(
    how: Away,
    tmp_path: Path,
    checkpoint: Path,
    engine: ScriptedEngine,
    own_postgres: PostgresServer,
) -> None:
    with ValkeyServer() as valkey, structlog.testing.capture_logs() as logs, own_postgres.database() as url:
        shared: dict[str, Any] = {"database_url": url, "meters_url": valkey.url}
        async with running_service(tmp_path / "home", checkpoint, engine, **shared) as service:
            wallets, account = service.services.wallets, service.account_id
            wallets.set_mode(account, AccountMode.PREPAID)
            wallets.top_up(account, 10**9, idempotency_key="plenty")
            await service.services.holds.credit.refresh()
            async with under_load(service) as load:
                with own_postgres.away(how) as come_back:
                    answered = await load.more(40)
                    assert answered[200, None] > 0, "what was allowed before is served"
                    await becomes(service, "pagegate_database_away", 1, within_s=15)
                    standing = await service.send("GET", "/health/ready")
                    assert (standing.status, standing.json()["status"]) == (200, "degraded"), "it stays in rotation"
                    known_away = len(load.answers) + CLIENTS  # those that wait now may have begun before
                    for key in (new_key_text(KeyKind.INFERENCE), service.admin_key):
                        refused = await service.send(
                            "GET", f"/console/v1/accounts/{service.account_id}/wallet", key=key
                        )
                        assert refused.status == 503, refused.body
                    while not (await load.more(20))[503, "billing_unavailable"]:
                        pass  # until the allowance is spent
                    assert load.added_s(known_away) < ADDED_S_MAX, "who is refused is not kept waiting either"
                    await asyncio.to_thread(come_back)
                    await becomes(service, "pagegate_database_away", 0, within_s=RECOVERY_S_MAX)
                    await load.more(20)
            unforeseen = {key for key in Counter(load.answers) if key[0] not in {200, 503}}
            assert unforeseen == set()
            assert {code for status, code in load.answers if status == 503} <= {"billing_unavailable", "unavailable"}
            await eventually_async(service.is_clean, within_s=10, what="a clean service")
            served = sum(status == 200 for status, _ in load.answers)
            usage = await service.console(f"/accounts/{service.account_id}/usage")
            assert usage["totals"]["requests"] >= served, "every answer is recorded"
    # A line a change, however many requests saw it, and whenever the calls that were stuck end.
    assert said(logs, AWAY, BACK) == [1, 1]
