"""Which rules match, and the arithmetic of one counter. What the meters make of it is in meters/."""

import pytest

from tenancy.claims import DAY_MS, Meter, Standing
from tenancy.errors import ConcurrencyExceeded, NeuronsExceeded, RateExceeded, RequestExceedsQuota
from tenancy.quotas import FREE_PLAN, LIMIT_MAX, MICRO, Amounts, Plan, Quota, claims, judge, judge_slot, refusal
from tenancy.rule_setters import RuleSetter

AMOUNTS = Amounts(requests=1, tokens_in=10, tokens_out=20, neurons_micro=7)
RPM = Meter.REQUESTS_PER_MINUTE


def _names(*quotas: Quota, key_id: str = "k", model: str = "m", project_id: str = "p") -> list[str]:
    found = claims(quotas, None, key_id=key_id, project_id=project_id, model=model, amounts=AMOUNTS)
    return [claim.name for claim in found]


def test_the_account_slot_comes_first_whatever_the_rules() -> None:
    assert _names() == ["open"]
    assert _names(Quota(RPM, 1)) == ["open", "requests_per_minute||"]


def test_a_rule_matches_its_key_its_model_or_both() -> None:
    rules = (Quota(RPM, 1), Quota(RPM, 2, key_id="k"), Quota(RPM, 3, model="m"), Quota(RPM, 4, key_id="k", model="m"))
    assert len(_names(*rules)) == 5
    assert _names(*rules, key_id="other") == ["open", "requests_per_minute||", "requests_per_minute||m"]
    assert _names(*rules, model="other") == ["open", "requests_per_minute||", "requests_per_minute|k|"]


def test_a_rule_of_a_project_matches_whatever_key_of_it_asks() -> None:
    rules = (Quota(RPM, 1), Quota(RPM, 2, project_id="p"), Quota(RPM, 3, project_id="p", model="m"))
    assert _names(*rules) == [
        "open",
        "requests_per_minute||",
        "requests_per_minute|p|",
        "requests_per_minute|p|m",
    ]
    assert _names(*rules, project_id="other") == ["open", "requests_per_minute||"]


@pytest.mark.parametrize(
    ("meter", "amount"),
    [
        (Meter.REQUESTS_PER_MINUTE, 1),
        (Meter.INPUT_TOKENS_PER_MINUTE, 10),
        (Meter.OUTPUT_TOKENS_PER_MINUTE, 20),
        (Meter.TOKENS_PER_MINUTE, 30),
        (Meter.REQUESTS_PER_DAY, 1),
        (Meter.TOKENS_PER_DAY, 30),
        (Meter.NEURONS_PER_DAY, 7),
        (Meter.CONCURRENCY, 1),
    ],
)
def test_each_meter_counts_its_own(meter: Meter, amount: int) -> None:
    (_, claim) = claims([Quota(meter, 100)], None, key_id="k", project_id="p", model="m", amounts=AMOUNTS)
    assert claim.amount == amount
    assert claim.bucket_ms * claim.buckets == {0: 0, 60: 65_000, 86_400: DAY_MS}[meter.window_s]


def test_the_plans_neurons_and_the_accounts_own_are_one_counter_and_the_least_wins() -> None:
    for own, least in ((5, 5), (20_000, 10_000)):
        rules = [Quota(Meter.NEURONS_PER_DAY, own), FREE_PLAN]
        (_, claim) = claims(rules, None, key_id="k", project_id="p", model="m", amounts=AMOUNTS)
        assert claim.limit == least * MICRO


@pytest.mark.parametrize(("of_operator", "own"), [(5, 50), (50, 5)])
def test_an_operators_limit_and_the_accounts_own_are_one_counter_and_the_tighter_holds(
    of_operator: int, own: int
) -> None:
    both = [
        Quota(Meter.REQUESTS_PER_MINUTE, own, project_id="p", set_by=RuleSetter.ACCOUNT),
        Quota(Meter.REQUESTS_PER_MINUTE, of_operator, project_id="p"),
    ]
    found = claims(both, None, key_id="k", project_id="p", model="m", amounts=Amounts())
    assert [(claim.meter, claim.limit) for claim in found[1:]] == [(Meter.REQUESTS_PER_MINUTE, 5)]


def test_a_limit_of_nothing_is_a_bug() -> None:
    for limit in (0, LIMIT_MAX + 1):
        with pytest.raises(AssertionError):
            Quota(RPM, limit)


def _standing(meter: Meter, limit: int, counts: dict[int, int], now_ms: int, amount: int = 1) -> Standing:
    amounts = Amounts(requests=amount, tokens_in=amount, neurons_micro=amount)
    (_, claim) = claims([Quota(meter, limit)], None, key_id="k", project_id="p", model="m", amounts=amounts)
    return judge(claim, counts, now_ms)


def test_buckets_count_until_a_whole_minute_is_over() -> None:
    counts = {100: 5}  # from 500 s to 505 s
    assert _standing(RPM, 5, counts, 564_999).wait_ms == 1
    assert _standing(RPM, 5, counts, 565_000).used == 0


def test_the_wait_ends_with_the_first_bucket_that_leaves_enough_room() -> None:
    counts = {100: 2, 101: 2, 102: 6}
    assert _standing(RPM, 10, counts, 515_000, amount=1).wait_ms == 50_000
    assert _standing(RPM, 10, counts, 515_000, amount=3).wait_ms == 55_000
    assert _standing(RPM, 10, counts, 515_000, amount=5).wait_ms == 60_000
    assert _standing(RPM, 10, counts, 515_000, amount=11).wait_ms == -1


def test_a_lowered_limit_waits_for_what_is_above_it() -> None:
    standing = _standing(RPM, 1, {100: 5, 101: 1}, 510_000)
    assert (standing.used, standing.wait_ms) == (6, 60_000)


def test_the_refusal_is_the_one_that_is_hardest_to_wait_for() -> None:
    slot = judge_slot(claims([], 1, key_id="k", project_id="p", model="m", amounts=AMOUNTS)[0], taken=1)
    minute = _standing(RPM, 1, {100: 1}, 500_000)
    day = _standing(Meter.NEURONS_PER_DAY, 1, {0: MICRO}, 500_000)
    never = _standing(Meter.TOKENS_PER_MINUTE, 1, {}, 500_000, amount=2)
    fits = _standing(RPM, 9, {}, 500_000)
    assert refusal([fits]) is None
    assert isinstance(refusal([fits, slot]), ConcurrencyExceeded)
    for order in (1, -1):
        assert isinstance(refusal([slot, minute][::order]), RateExceeded)
        assert isinstance(refusal([minute, day][::order]), NeuronsExceeded)
        assert isinstance(refusal([day, never][::order]), RequestExceedsQuota)


def test_plans_are_words_that_are_stored() -> None:
    assert {plan.value for plan in Plan} == {"free", "paid"}
