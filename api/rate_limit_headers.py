"""How an account's limits stand, as headers: on every answer of a generating route, and on the refusal that follows.

    RateLimit-Policy: "requests_per_minute";q=60;w=60        IETF draft: what the limits are
    RateLimit: "requests_per_minute";r=59;t=64               what is left, and when all of it is again
    x-ratelimit-limit-requests, -remaining-, -reset-         as OpenAI writes them: the tightest limit of each kind

Of several rules for one meter (account, key, model) the one with the least left is told. Used by the dialects and by
refusals.py.
"""

from collections.abc import Iterable
from typing import Final

from tenancy.claims import Meter, Standing
from tenancy.quotas import MICRO

_KINDS: Final = {
    "requests": (Meter.REQUESTS_PER_MINUTE, Meter.REQUESTS_PER_DAY),
    "tokens": (
        Meter.TOKENS_PER_MINUTE,
        Meter.INPUT_TOKENS_PER_MINUTE,
        Meter.OUTPUT_TOKENS_PER_MINUTE,
        Meter.TOKENS_PER_DAY,
    ),
}


def rate_limit_headers(standings: Iterable[Standing]) -> dict[str, str]:
    """Empty for an account without limits over time."""
    tightest: dict[Meter, Standing] = {}
    for standing in standings:
        meter = standing.claim.meter
        if standing.claim.limit is None or not meter.window_s:
            continue
        if meter not in tightest or remaining(standing) < remaining(tightest[meter]):
            tightest[meter] = standing
    if not tightest:
        return {}
    policies = [f'"{meter}";q={limit(found)};w={meter.window_s}' for meter, found in tightest.items()]
    limits = [f'"{meter}";r={remaining(found)};t={reset_s(found)}' for meter, found in tightest.items()]
    headers = {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(limits)}
    for kind, meters in _KINDS.items():
        found = min((tightest[meter] for meter in meters if meter in tightest), key=remaining, default=None)
        if found is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit(found))
            headers[f"x-ratelimit-remaining-{kind}"] = str(remaining(found))
            headers[f"x-ratelimit-reset-{kind}"] = f"{reset_s(found)}s"
    return headers


def limit(standing: Standing) -> int:
    """In whole requests, tokens or neurons."""
    assert standing.claim.limit is not None, "a standing that is told has a limit"
    return standing.claim.limit // _unit(standing)


def remaining(standing: Standing) -> int:
    assert standing.claim.limit is not None, "a standing that is told has a limit"
    return max(0, standing.claim.limit - standing.used) // _unit(standing)


def reset_s(standing: Standing) -> int:
    return -(-standing.reset_ms // 1_000)


def _unit(standing: Standing) -> int:
    return MICRO if standing.claim.meter is Meter.NEURONS_PER_DAY else 1
