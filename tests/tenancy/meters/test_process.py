"""What is the in-process meters' own: memory stays bounded. The rest is test_conformance.py's."""

from tenancy.claims import Meter
from tenancy.meters.process import _SWEEP_EVERY, ProcessMeters
from tenancy.quotas import NOTHING, Amounts, Quota
from tests.tenancy.meters.conftest import Clock, principal, wants


async def test_quiet_accounts_are_forgotten(clock: Clock) -> None:
    meters = ProcessMeters(clock_ms=clock)
    busy = principal(Quota(Meter.REQUESTS_PER_MINUTE, 10))
    await meters.reserve(busy, wants("long"))
    for number in range(_SWEEP_EVERY - 2):
        who = principal(Quota(Meter.REQUESTS_PER_MINUTE, 10))
        await meters.settle(await meters.reserve(who, wants(f"r{number}")), Amounts())
    assert len(meters._accounts) == _SWEEP_EVERY - 1
    clock.now_ms += 65_000
    ticket = await meters.reserve(principal(), wants("last"))
    assert len(meters._accounts) == 2
    await meters.settle(ticket, NOTHING)
    assert list(meters._accounts) == [busy.account_id]


async def test_an_account_without_quotas_leaves_nothing_behind() -> None:
    meters = ProcessMeters()
    await meters.settle(await meters.reserve(principal(), wants("1")), Amounts(tokens_in=5))
    assert meters._accounts == {}
