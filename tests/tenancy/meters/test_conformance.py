"""What both implementations of the meters promise, word for word."""

from typing import Any

import pytest

from tenancy.claims import DAY_MS, Meter
from tenancy.errors import (
    ConcurrencyExceeded,
    NeuronsExceeded,
    QuotaExceeded,
    RateExceeded,
    RequestExceedsQuota,
)
from tenancy.meters.protocol import Meters, Ticket
from tenancy.principal import Principal
from tenancy.quotas import FREE_PLAN, MICRO, NOTHING, Amounts, Quota
from tests.tenancy.meters.conftest import Clock, all_of, principal, wants

RPM = Meter.REQUESTS_PER_MINUTE
TPM = Meter.TOKENS_PER_MINUTE


async def _fill(meters: Meters, who: Principal, count: int, prefix: str = "r", **amounts: Any) -> list[Ticket]:
    return [await meters.reserve(who, wants(f"{prefix}{number}", **amounts)) for number in range(count)]


async def _refused(meters: Meters, who: Principal, request_id: str = "no", **amounts: Any) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as refusal:
        await meters.reserve(who, wants(request_id, **amounts))
    return refusal.value


async def _used(meters: Meters, who: Principal, model: str = "m") -> dict[str, int]:
    return {standing.claim.name: standing.used for standing in await meters.standings(who, model)}


class TestConcurrency:
    async def test_a_full_account_is_refused_until_a_slot_is_free(self, meters: Meters) -> None:
        who = principal(concurrency=2)
        first, _ = await _fill(meters, who, 2)
        refusal = await _refused(meters, who)
        assert isinstance(refusal, ConcurrencyExceeded)
        assert refusal.retry_after_s == 1
        await meters.settle(first, Amounts())
        await meters.reserve(who, wants("next"))
        assert meters.live_slots() == 2

    async def test_without_a_limit_slots_are_still_counted(self, meters: Meters) -> None:
        await _fill(meters, principal(), 30)
        assert meters.live_slots() == 30

    async def test_accounts_do_not_take_each_others_slots(self, meters: Meters) -> None:
        one, other = principal(concurrency=1), principal(concurrency=1)
        await _fill(meters, one, 1, "a")
        await _fill(meters, other, 1, "b")
        assert isinstance(await _refused(meters, one), ConcurrencyExceeded)

    async def test_a_slot_of_a_model_is_beside_the_accounts(self, meters: Meters) -> None:
        who = principal(Quota(Meter.CONCURRENCY, 1, model="m"), concurrency=2)
        await meters.reserve(who, wants("1"))
        assert isinstance(await _refused(meters, who), ConcurrencyExceeded)
        await meters.reserve(who, wants("2", model="other"))
        refusal = await all_of([meters.reserve(who, wants("3", model="other"))])
        assert isinstance(refusal[0], ConcurrencyExceeded)

    async def test_a_long_request_keeps_its_slot_past_every_window(self, meters: Meters, clock: Clock) -> None:
        who = principal(concurrency=1)
        await _fill(meters, who, 1)
        clock.now_ms += 300_000
        assert isinstance(await _refused(meters, who), ConcurrencyExceeded)

    async def test_reserving_one_request_twice_is_a_bug(self, meters: Meters) -> None:
        who = principal()
        await _fill(meters, who, 1)
        with pytest.raises(AssertionError):
            await _fill(meters, who, 1)

    async def test_a_lowered_limit_holds_for_the_next_request(self, meters: Meters) -> None:
        who = principal(concurrency=3)
        await _fill(meters, who, 3)
        lowered = principal(concurrency=1, account_id=who.account_id)
        assert isinstance(await _refused(meters, lowered), ConcurrencyExceeded)


class TestMinutes:
    async def test_the_limit_passes_and_not_one_more(self, meters: Meters) -> None:
        who = principal(Quota(RPM, 10))
        results = await all_of([meters.reserve(who, wants(f"r{number}")) for number in range(30)])
        refusals = [result for result in results if isinstance(result, RateExceeded)]
        assert (len(results) - len(refusals), len(refusals)) == (10, 20)
        assert {refusal.code for refusal in refusals} == {"requests_per_minute_exceeded"}

    async def test_parallel_requests_share_the_tokens_of_the_minute(self, meters: Meters) -> None:
        who = principal(Quota(TPM, 1_000))
        requests = [meters.reserve(who, wants(f"r{n}", tokens_in=10, tokens_out=90)) for n in range(50)]
        passed = [result for result in await all_of(requests) if isinstance(result, Ticket)]
        assert len(passed) == 10
        await meters.settle(passed[0], Amounts(tokens_in=10, tokens_out=15))
        await meters.reserve(who, wants("now", tokens_in=10, tokens_out=65))
        assert isinstance(await _refused(meters, who, tokens_in=1), RateExceeded)

    async def test_the_second_large_request_is_refused_by_its_tokens(self, meters: Meters) -> None:
        who = principal(Quota(TPM, 10_000))
        await meters.reserve(who, wants("1", tokens_in=9_000))
        assert isinstance(await _refused(meters, who, tokens_in=9_000), RateExceeded)

    async def test_input_and_output_have_limits_of_their_own(self, meters: Meters) -> None:
        who = principal(Quota(Meter.INPUT_TOKENS_PER_MINUTE, 100), Quota(Meter.OUTPUT_TOKENS_PER_MINUTE, 50))
        await meters.reserve(who, wants("1", tokens_in=60, tokens_out=50))
        assert (await _refused(meters, who, tokens_out=1)).code == "output_tokens_per_minute_exceeded"
        assert (await _refused(meters, who, tokens_in=41)).code == "input_tokens_per_minute_exceeded"
        await meters.reserve(who, wants("2", tokens_in=40))

    async def test_after_retry_after_and_not_before_there_is_room(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(RPM, 2))
        await meters.reserve(who, wants("1"))
        clock.now_ms += 7_000
        await meters.reserve(who, wants("2"))
        refusal = await _refused(meters, who)
        assert refusal.retry_after_s is not None
        wait_ms = min(standing.wait_ms for standing in refusal.standings if standing.wait_ms)
        assert (refusal.retry_after_s - 1) * 1_000 < wait_ms <= refusal.retry_after_s * 1_000
        clock.now_ms += wait_ms - 1
        await _refused(meters, who)
        clock.now_ms += 1
        await meters.reserve(who, wants("3"))
        await _refused(meters, who)

    async def test_an_exhausted_limit_fills_again(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(RPM, 3))
        for _round in range(3):
            await _fill(meters, who, 3, f"{_round}-")
            await _refused(meters, who)
            clock.now_ms += 65_000

    async def test_what_is_given_back_goes_where_it_was_booked(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(TPM, 1_000))
        old = await meters.reserve(who, wants("old", tokens_in=900))
        clock.now_ms += 55_000
        await meters.reserve(who, wants("new", tokens_in=100))
        clock.now_ms += 10_000  # the old bucket has left the window
        assert await _used(meters, who) == {"open": 2, "tokens_per_minute||": 100}
        await meters.settle(old, Amounts(tokens_in=0))
        assert await _used(meters, who) == {"open": 1, "tokens_per_minute||": 100}

    async def test_more_than_was_reserved_counts_as_well(self, meters: Meters) -> None:
        who = principal(Quota(TPM, 1_000))
        ticket = await meters.reserve(who, wants("1", tokens_in=10, tokens_out=90))
        await meters.settle(ticket, Amounts(tokens_in=10, tokens_out=890))
        assert isinstance(await _refused(meters, who, tokens_in=101), RateExceeded)

    async def test_a_request_above_a_limit_is_told_that_waiting_is_no_help(self, meters: Meters) -> None:
        who = principal(Quota(TPM, 100), Quota(RPM, 1))
        await _fill(meters, who, 1)
        refusal = await _refused(meters, who, tokens_in=101)
        assert isinstance(refusal, RequestExceedsQuota)
        assert refusal.retry_after_s is None


class TestExtensions:
    async def test_a_running_request_takes_more_until_the_limit(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(TPM, 100), Quota(RPM, 1), concurrency=1)
        ticket = await meters.reserve(who, wants("1", tokens_in=10, tokens_out=40))
        clock.now_ms += 10_000
        ticket = await meters.extend(ticket, Amounts(requests=0, tokens_out=40))
        with pytest.raises(RateExceeded):
            await meters.extend(ticket, Amounts(requests=0, tokens_out=40))
        assert (await _used(meters, who))["tokens_per_minute||"] == 90
        await meters.settle(ticket, Amounts(tokens_in=10, tokens_out=75))
        assert await _used(meters, who) == {"open": 0, "tokens_per_minute||": 85, "requests_per_minute||": 1}

    async def test_what_was_booked_last_is_given_back_first(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(TPM, 1_000))
        ticket = await meters.reserve(who, wants("1", tokens_out=100))
        for _ in range(2):
            clock.now_ms += 20_000
            ticket = await meters.extend(ticket, Amounts(requests=0, tokens_out=100))
        await meters.settle(ticket, Amounts(tokens_out=150))
        assert (await _used(meters, who))["tokens_per_minute||"] == 150
        clock.now_ms += 25_000  # the first bucket leaves: what is left of the second stays
        assert (await _used(meters, who))["tokens_per_minute||"] == 50

    async def test_an_extended_request_that_is_undone_has_taken_nothing(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(TPM, 1_000), FREE_PLAN)
        ticket = await meters.reserve(who, wants("1", tokens_out=100, neurons_micro=5))
        clock.now_ms += 7_000
        ticket = await meters.extend(ticket, Amounts(requests=0, tokens_out=100, neurons_micro=7))
        await meters.settle(ticket, NOTHING)
        await meters.settle(ticket, NOTHING)
        assert set((await _used(meters, who)).values()) == {0}

    async def test_without_limits_there_is_nothing_to_extend(self, meters: Meters) -> None:
        ticket = await meters.reserve(principal(), wants("1"))
        assert await meters.extend(ticket, Amounts(requests=0, tokens_out=9)) is ticket


class TestDays:
    async def test_a_day_ends_at_midnight_utc(self, meters: Meters, clock: Clock) -> None:
        who = principal(Quota(Meter.REQUESTS_PER_DAY, 1), Quota(Meter.TOKENS_PER_DAY, 100))
        ticket = await meters.reserve(who, wants("1", tokens_in=100))
        refusal = await _refused(meters, who)
        midnight_ms = (clock.now_ms // DAY_MS + 1) * DAY_MS
        assert refusal.retry_after_s == -(-(midnight_ms - clock.now_ms) // 1_000)
        await meters.settle(ticket, Amounts(tokens_in=100))
        clock.now_ms = midnight_ms - 1
        await _refused(meters, who)
        clock.now_ms = midnight_ms
        await meters.reserve(who, wants("2", tokens_in=100))

    async def test_the_free_plan_ends_at_ten_thousand_neurons_a_day(self, meters: Meters) -> None:
        who = principal(FREE_PLAN)
        ticket = await meters.reserve(who, wants("1", neurons_micro=10_000 * MICRO))
        refusal = await _refused(meters, who, neurons_micro=1)
        assert isinstance(refusal, NeuronsExceeded)
        assert refusal.message == "The limit of 10000 neurons per day is reached."
        await meters.settle(ticket, Amounts(neurons_micro=9_999 * MICRO))
        await meters.reserve(who, wants("2", neurons_micro=MICRO))


class TestAllOrNone:
    async def test_a_refusal_by_one_meter_takes_nothing_of_the_others(self, meters: Meters) -> None:
        who = principal(Quota(RPM, 5), Quota(TPM, 1_000), concurrency=1)
        held = await meters.reserve(who, wants("held"))
        for number in range(4):
            assert isinstance(await _refused(meters, who, f"no{number}", tokens_in=10), ConcurrencyExceeded)
        await meters.settle(held, Amounts())
        for number in range(4):
            await meters.settle(await meters.reserve(who, wants(f"yes{number}")), Amounts())
        assert isinstance(await _refused(meters, who), RateExceeded)

    async def test_the_least_of_all_matching_rules_wins(self, meters: Meters) -> None:
        rules = (Quota(RPM, 4), Quota(RPM, 3, model="m"), Quota(RPM, 2, key_id="key-1"), Quota(RPM, 9, key_id="key-2"))
        one = principal(*rules)
        await _fill(meters, one, 2)
        await _refused(meters, one)
        other = principal(*rules, account_id=one.account_id, key_id="key-2")
        await meters.reserve(other, wants("model's last"))
        await _refused(meters, other)
        await meters.reserve(other, wants("account's last", model="other"))
        await _refused(meters, other)

    async def test_rotated_keys_share_what_the_first_of_them_may(self, meters: Meters) -> None:
        rule = Quota(RPM, 2, key_id="first")
        old = principal(rule, key_id="first")
        new = principal(rule, key_id="second", lineage_id="first", account_id=old.account_id)
        await meters.reserve(old, wants("1"))
        await meters.reserve(new, wants("2"))
        await _refused(meters, old)
        await _refused(meters, new)

    async def test_a_request_that_is_undone_has_taken_nothing(self, meters: Meters) -> None:
        who = principal(Quota(RPM, 1), Quota(TPM, 10), Quota(Meter.REQUESTS_PER_DAY, 1), concurrency=1)
        for number in range(20):
            ticket = await meters.reserve(who, wants(f"r{number}", tokens_in=10))
            await meters.settle(ticket, NOTHING)
        assert set((await _used(meters, who)).values()) == {0}

    async def test_settling_again_changes_nothing(self, meters: Meters) -> None:
        who = principal(Quota(TPM, 100))
        first, second = await _fill(meters, who, 2, tokens_in=50)
        for _ in range(3):
            await meters.settle(first, NOTHING)
        assert await _used(meters, who) == {"open": 1, "tokens_per_minute||": 50}
        await meters.settle(second, NOTHING)
        assert meters.live_slots() == 0

    async def test_looking_costs_nothing(self, meters: Meters) -> None:
        who = principal(Quota(RPM, 1), concurrency=1)
        for _ in range(100):
            await meters.standings(who, "m")
        await meters.reserve(who, wants("1"))

    async def test_what_is_told_falls_with_each_request_and_agrees_with_the_refusal(self, meters: Meters) -> None:
        who = principal(Quota(RPM, 5))
        told = []
        for ticket in await _fill(meters, who, 5):
            standing = ticket.standings[1]
            assert standing.claim.limit is not None
            told.append(standing.claim.limit - standing.used)
            assert 60_000 <= standing.reset_ms <= 65_000
        assert told == [4, 3, 2, 1, 0]
        refusal = await _refused(meters, who)
        assert [standing.used for standing in refusal.standings] == [5, 5]
