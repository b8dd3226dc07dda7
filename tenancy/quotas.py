"""Quotas: what an account, a project, a key or a model may take a minute, a day and at once. Pure arithmetic.

A quota names a meter, a limit, and perhaps a project or a key, and a model; all that match a request apply. `claims`
turns them into what a meters' implementation counts, and `judge` says whether a claim fits:

    minute   a sliding window of 5-second buckets: the running one and the 12 whole ones before it. Any 60 seconds lie
             inside, so no minute ever holds more than the limit.
    day      one bucket a UTC day
    at once  leases by request id; a windowed counter would forget a request that runs longer than its window

What was reserved is corrected in the bucket where it was booked: a refund into the present would lend the past's room
to the present, and let a burst through. Knows no store and no clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tenancy.claims import DAY_MS, Claim, Meter, Standing
from tenancy.errors import ConcurrencyExceeded, NeuronsExceeded, QuotaExceeded, RateExceeded, RequestExceedsQuota
from tenancy.rule_setters import RuleSetter
from tenancy.values import value

MINUTE_BUCKET_MS = 5_000
MINUTE_BUCKETS = 13  # 12 whole ones and the running one
MICRO = 1_000_000
FREE_NEURONS_PER_DAY = 10_000
LIMIT_MAX = 10**12  # far above any rate; its millionths are still exact in a double, which Lua counts with
_SLOT_RETRY_S = 1  # a slot is free whenever some request ends: nobody can say when


class Plan(StrEnum):
    """Who pays for what is above the daily free neurons: nobody can on the free plan, so it ends there."""

    FREE = "free"
    PAID = "paid"


@dataclass(frozen=True, slots=True)
class Quota:
    """One rule of an account.

    key_id: the key it is about, by its lineage; None: all keys together. model, project_id likewise. set_by: in whose
    name; an operator's and an account's own may be about the same thing.
    """

    meter: Meter
    limit: int
    key_id: str | None = None
    model: str | None = None
    project_id: str | None = None
    set_by: RuleSetter = RuleSetter.OPERATOR

    @property
    def of_whole_account(self) -> bool:
        return self.key_id is None and self.project_id is None

    def __post_init__(self) -> None:
        assert 1 <= self.limit <= LIMIT_MAX, "a limit of nothing is a suspension"
        assert self.key_id is None or self.project_id is None, "a key is in one project already"
        assert self.set_by is RuleSetter.OPERATOR or not self.of_whole_account, "the whole account is the operator's"

    def matches(self, key_id: str, project_id: str, model: str) -> bool:
        """key_id: of the lineage. project_id: the account's id for its default project."""
        return self.key_id in {None, key_id} and self.project_id in {None, project_id} and self.model in {None, model}


FREE_PLAN = Quota(Meter.NEURONS_PER_DAY, FREE_NEURONS_PER_DAY)


@value
class Amounts:
    """What a request takes or took: outputs of all choices; neurons in millionths."""

    requests: int = 1
    tokens_in: int = 0
    tokens_out: int = 0
    neurons_micro: int = 0

    def of(self, meter: Meter) -> int:
        match meter:
            case Meter.REQUESTS_PER_MINUTE | Meter.REQUESTS_PER_DAY | Meter.CONCURRENCY:
                return self.requests
            case Meter.INPUT_TOKENS_PER_MINUTE:
                return self.tokens_in
            case Meter.OUTPUT_TOKENS_PER_MINUTE:
                return self.tokens_out
            case Meter.TOKENS_PER_MINUTE | Meter.TOKENS_PER_DAY:
                return self.tokens_in + self.tokens_out
            case Meter.NEURONS_PER_DAY:
                return self.neurons_micro


# What a request that was refused after it had reserved has taken.
NOTHING = Amounts(requests=0)


def claims(
    quotas: Iterable[Quota],
    concurrency: int | None,
    *,
    key_id: str,
    project_id: str,
    model: str,
    amounts: Amounts,
) -> tuple[Claim, ...]:
    """What a request takes. The first is always the account's slot, which is also how its end is known by all."""
    found = {"open": Claim(Meter.CONCURRENCY, "open", amounts.requests, concurrency, 0, 0)}
    for quota in quotas:
        if not quota.matches(key_id, project_id, model):
            continue
        unit = MICRO if quota.meter is Meter.NEURONS_PER_DAY else 1
        bucket_ms, buckets = _window(quota.meter)
        name = f"{quota.meter}|{quota.key_id or quota.project_id or ''}|{quota.model or ''}"
        limit, twin = quota.limit * unit, found.get(name)
        if (
            twin is not None and twin.limit is not None
        ):  # the plan's or an operator's beside the account's own: one counter, the least wins
            limit = min(limit, twin.limit)
        found[name] = Claim(quota.meter, name, amounts.of(quota.meter), limit, bucket_ms, buckets)
    return tuple(found.values())


def bucket_at(now_ms: int, claim: Claim) -> int:
    """The bucket that counts what is booked now."""
    return now_ms // claim.bucket_ms if claim.bucket_ms else 0


def judge(claim: Claim, counts: Mapping[int, int], now_ms: int) -> Standing:
    """Whether a claim fits a window beside what its buckets hold already; buckets out of the window don't count."""
    oldest = bucket_at(now_ms, claim) - claim.buckets + 1
    live = sorted((bucket, count) for bucket, count in counts.items() if bucket >= oldest and count > 0)
    used = sum(count for _, count in live)
    reset_ms = _leaves_ms(live[-1][0], claim) - now_ms if live else 0
    wait_ms = 0
    if claim.limit is not None and used + claim.amount > claim.limit:
        wait_ms = -1
        left = used
        for bucket, count in live:
            left -= count
            if left + claim.amount <= claim.limit:
                wait_ms = _leaves_ms(bucket, claim) - now_ms
                break
    return Standing(claim, used, reset_ms, wait_ms)


def judge_slot(claim: Claim, taken: int) -> Standing:
    """Whether one more request fits beside `taken` that run."""
    full = claim.limit is not None and taken + claim.amount > claim.limit
    return Standing(claim, taken, 0, _SLOT_RETRY_S * 1_000 if full else 0)


def taken(standing: Standing, now_ms: int) -> Standing:
    """A standing after its claim was granted now."""
    claim = standing.claim
    reset_ms = standing.reset_ms
    if claim.amount and claim.bucket_ms:
        reset_ms = _leaves_ms(bucket_at(now_ms, claim), claim) - now_ms
    return Standing(claim, standing.used + claim.amount, reset_ms)


def refusal(standings: Iterable[Standing]) -> QuotaExceeded | None:
    """The error for the claim that is hardest to wait for, if one does not fit."""
    standings = tuple(standings)
    worst: Standing | None = None
    for standing in standings:
        harder = worst is None or (worst.wait_ms >= 0 and not 0 <= standing.wait_ms <= worst.wait_ms)
        if standing.wait_ms and harder:
            worst = standing
    if worst is None:
        return None
    claim = worst.claim
    assert claim.limit is not None, "a claim without a limit fits"
    limit = claim.limit // (MICRO if claim.meter is Meter.NEURONS_PER_DAY else 1)
    words = claim.meter.value.replace("_", " ")
    if worst.wait_ms < 0:
        return RequestExceedsQuota(
            f"This request alone is more than the limit of {limit} {words}.", standings=standings
        )
    retry_after_s = max(1, -(-worst.wait_ms // 1_000))
    if claim.meter is Meter.CONCURRENCY:
        return ConcurrencyExceeded(
            f"{limit} requests are under way, which is all that may be at once.",
            standings=standings,
            retry_after_s=retry_after_s,
        )
    sentence = f"The limit of {limit} {words} is reached."
    if claim.meter is Meter.NEURONS_PER_DAY:
        return NeuronsExceeded(sentence, standings=standings, retry_after_s=retry_after_s)
    return RateExceeded(sentence, meter=claim.meter, standings=standings, retry_after_s=retry_after_s)


def _window(meter: Meter) -> tuple[int, int]:
    if meter is Meter.CONCURRENCY:
        return 0, 0
    return (DAY_MS, 1) if meter.daily else (MINUTE_BUCKET_MS, MINUTE_BUCKETS)


def _leaves_ms(bucket: int, claim: Claim) -> int:
    """When a bucket leaves the window."""
    return (bucket + claim.buckets) * claim.bucket_ms
