"""Three regions on one machine, real engines and real stores: overload one, cut one off, heal it.

Answers, running streams, ledger, quotas and bindings hold throughout. `benchmarks/regions.py` prints how much later a
first token comes from elsewhere; here half of them are held to five times the promised distance: of a few rounds the
slowest tell what else two cores do.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tenancy import provisioning
from tenancy.claims import Meter
from tenancy.database import Database, open_database
from tests.doubles.waiting import eventually_async
from tests.e2e.regions import POOL_TOKENS, REGIONS, ROUND_TRIPS_S, Region, World, first_tokens_s, three_regions
from tests.stores import PostgresServer, ValkeyServer

# Three gateways and three engines start at once, on as few as two cores.
pytestmark = [pytest.mark.load, pytest.mark.engine, pytest.mark.stores, pytest.mark.timeout(480)]

HOME, NEAR, FAR = REGIONS
# Deadlines of waiting, for two cores that do other things as well.
LEFT_WITHIN_S = 30.0
BACK_WITHIN_S = 60.0
# A limit in milliseconds is held to five times itself on a machine that does other things as well.
ADDED_S_MAX = 5 * 0.010
ROUNDS = 20
REQUESTS_A_DAY = 90
ALONE = 20


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


async def test_regions_help_each_other_and_nothing_is_lost_while_one_is_cut_off(
    tmp_path: Path, checkpoint: Path, postgres: PostgresServer, valkey: ValkeyServer
) -> None:
    async with three_regions(tmp_path, checkpoint, postgres, valkey) as world:
        home, near, far = world.regions
        served = Counter[str]()

        async def ask(region: Region, *, max_tokens: int = 4) -> str:
            """Where it was served."""
            status, decision = await region.ask(max_tokens=max_tokens)
            assert status == 200, decision
            served[region.name] += 1
            return str(decision["region"])

        await _limit(world, REQUESTS_A_DAY)

        # Each serves its own.
        assert [await ask(region) for region in world.regions] == list(REGIONS)

        # How much later a first token comes from elsewhere.
        at_home, elsewhere = await first_tokens_s(home, "r0", ROUNDS)
        served[HOME] += 2 * ROUNDS
        added_s = statistics.median(elsewhere) - statistics.median(at_home)
        assert added_s <= ROUND_TRIPS_S[0][1] + ADDED_S_MAX

        # One is overloaded: the others take what would start later there.
        assert {HOME} < set(await asyncio.gather(*(ask(home, max_tokens=POOL_TOKENS // 3) for _ in range(8))))

        # One is cut off. The others leave it within seconds; it serves its own clients, by its share of the limits.
        # What runs elsewhere goes on.
        for region in world.regions:
            await eventually_async(partial(_is_clean, region), within_s=BACK_WITHIN_S, what="an end of the overload")
        await eventually_async(partial(_knows_itself_idle, home), within_s=BACK_WITHIN_S, what="a report of that end")
        running = asyncio.create_task(home.ask(max_tokens=POOL_TOKENS // 2, stream=True), name="a running stream")
        await eventually_async(partial(_runs, home), within_s=BACK_WITHIN_S, what="a running stream")
        world.cut_off(2)
        alone = asyncio.create_task(_in_turn(ask, far, ALONE), name="clients of the region that is cut off")
        await eventually_async(partial(_finds, home, FAR, "unknown"), within_s=LEFT_WITHIN_S, what="a region left")
        assert {await ask(home) for _ in range(5)} <= {HOME, NEAR}
        assert set(await alone) == {FAR}
        # A home that was not given a core for a moment is slow by its own forecast.
        status, decision = await running
        assert status == 200
        assert decision["region"] in {HOME, NEAR}
        served[decision["region"]] += 1

        # Meanwhile an operator has said where the account's prompts may go. It can't hear that yet.
        await _change(world, partial(provisioning.set_regions, regions=[HOME, NEAR]))

        # It is back: everybody finds everybody, and its records reach the ledger.
        world.heal(2)
        for region in world.regions:
            await eventually_async(partial(_finds_all, region), within_s=BACK_WITHIN_S, what="regions that are back")
        await eventually_async(partial(_shares_limits, far), within_s=BACK_WITHIN_S, what="limits that are shared")

        async def is_bound() -> bool:
            return await ask(far) != FAR

        await eventually_async(is_bound, within_s=BACK_WITHIN_S, what="a binding that holds everywhere")
        assert FAR not in {await ask(region) for region in (*world.regions, far)}
        while (refused := (await near.ask())[1].get("code")) is None:
            served[NEAR] += 1
            assert served.total() <= REQUESTS_A_DAY + ALONE
        assert refused == "requests_per_day_exceeded"
        # What the cut-off one let in by itself is not booked: that is the bound, and no more than its share.
        assert REQUESTS_A_DAY <= served.total() <= REQUESTS_A_DAY + ALONE <= REQUESTS_A_DAY * 4 // 3
        await eventually_async(partial(_recorded, world, served.total()), within_s=BACK_WITHIN_S, what="every record")
        for region in world.regions:
            await eventually_async(partial(_is_clean, region), within_s=BACK_WITHIN_S, what="nothing that is held")


async def _in_turn(ask: Callable[[Region], Awaitable[str]], region: Region, requests: int) -> list[str]:
    return [await ask(region) for _ in range(requests)]


async def _limit(world: World, requests_a_day: int) -> None:
    """It holds within a second."""
    await _change(world, partial(provisioning.set_quota, meter=Meter.REQUESTS_PER_DAY, limit=requests_a_day))
    for region in world.regions:
        await eventually_async(
            partial(_is_limited, region), within_s=BACK_WITHIN_S, what="a limit that holds everywhere"
        )


async def _change(world: World, deed: Callable[[Database, str], object]) -> None:
    """An operator does, where the database is. deed: what, to the account."""
    database = open_database(world.database_url)
    try:
        await asyncio.to_thread(deed, database, world.regions[0].account_id)
    finally:
        database.close()


async def _runs(region: Region) -> bool:
    return bool((await region.console("/invariants"))["live_holds"])


async def _is_limited(region: Region) -> bool:
    return bool((await region.console(f"/accounts/{region.account_id}/limits"))["limits"])


async def _shares_limits(region: Region) -> bool:
    return await region.metric("pagegate_limiter_degraded") == 0


async def _finds(region: Region, other: str, standing: str) -> bool:
    return (await region.standings())[other] == standing


async def _knows_itself_idle(region: Region) -> bool:
    (served,) = (await region.console("/capacity"))["models"]
    reports = [replica["reported"] for replica in served["replicas"] if replica["region"] == region.name]
    return all(report is not None and report["running"] == report["waiting"] == 0 for report in reports)


async def _finds_all(region: Region) -> bool:
    return set((await region.standings()).values()) == {"open"}


async def _recorded(world: World, requests: int) -> bool:
    """Each answer is one row and charged once, whichever gateway gave it."""
    region = world.regions[0]
    rows = (await region.console(f"/accounts/{region.account_id}/requests?limit=200"))["requests"]
    found = [row for row in rows if row["outcome"] == "finished"]
    assert len({row["id"] for row in rows}) == len(rows)
    assert len(found) <= requests
    return len(found) == requests


async def _is_clean(region: Region) -> bool:
    state = await region.console("/invariants")
    return state["violations"] == [] and not any(
        state[name] for name in ("live_holds", "live_slots", "held_nano", "kv_pages_held")
    )
