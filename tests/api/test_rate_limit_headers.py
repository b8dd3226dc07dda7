"""Limits as headers: the same numbers in the IETF's words and in OpenAI's."""

import pytest
from fastapi import FastAPI

from api.rate_limit_headers import rate_limit_headers
from gateway.request import Completion
from tenancy.claims import Claim, Meter, Standing
from tenancy.errors import ConcurrencyExceeded, NeuronsExceeded, RateExceeded, RequestExceedsQuota
from tenancy.quotas import FREE_PLAN, MICRO, Amounts, Quota, claims
from tests.api.exchange import post
from tests.fakes import ACCOUNT, CREATED, MODEL, SETTLEMENT, Fakes, FakeStream, chat_completion

CHAT = "/v1/chat/completions"
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


def standing(meter: Meter, limit: int, used: int, reset_ms: int = 60_001, model: str | None = None) -> Standing:
    quota = Quota(meter, limit, model=model)
    (claim,) = claims([quota], None, key_id="k", project_id="p", model=model or "m", amounts=Amounts())[1:]
    return Standing(claim, used, reset_ms)


STANDINGS = (
    Standing(Claim(Meter.CONCURRENCY, "open", 1, 4, 0, 0), 1, 0),
    standing(Meter.REQUESTS_PER_MINUTE, 60, 1),
    standing(Meter.TOKENS_PER_MINUTE, 1_000, 100),
    standing(Meter.OUTPUT_TOKENS_PER_MINUTE, 500, 450),
)
HEADERS = {
    "ratelimit-policy": '"requests_per_minute";q=60;w=60, "tokens_per_minute";q=1000;w=60, '
    '"output_tokens_per_minute";q=500;w=60',
    "ratelimit": '"requests_per_minute";r=59;t=61, "tokens_per_minute";r=900;t=61, '
    '"output_tokens_per_minute";r=50;t=61',
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "61s",
    "x-ratelimit-limit-tokens": "500",
    "x-ratelimit-remaining-tokens": "50",
    "x-ratelimit-reset-tokens": "61s",
}


def test_all_limits_are_told_and_the_tightest_of_a_kind_in_openais_words() -> None:
    assert rate_limit_headers(STANDINGS) == HEADERS


def test_an_account_without_limits_is_told_none() -> None:
    assert rate_limit_headers(STANDINGS[:1]) == {}


def test_of_two_rules_for_one_meter_the_one_with_less_left_is_told() -> None:
    rules = [standing(Meter.REQUESTS_PER_MINUTE, 60, 1), standing(Meter.REQUESTS_PER_MINUTE, 10, 8, model="m")]
    assert rate_limit_headers(rules)["ratelimit"] == '"requests_per_minute";r=2;t=61'


def test_neurons_are_whole_ones_and_what_is_left_is_rounded_down() -> None:
    (claim,) = claims([FREE_PLAN], None, key_id="k", project_id="p", model="m", amounts=Amounts())[1:]
    headers = rate_limit_headers([Standing(claim, 1, 1_000)])
    assert headers["ratelimit-policy"] == '"neurons_per_day";q=10000;w=86400'
    assert headers["ratelimit"] == '"neurons_per_day";r=9999;t=1'
    assert rate_limit_headers([Standing(claim, 10_001 * MICRO, 0)])["ratelimit"] == '"neurons_per_day";r=0;t=0'


@pytest.mark.parametrize("path", [CHAT, RUN])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_carries_them(app: FastAPI, fakes: Fakes, path: str, *, stream: bool) -> None:
    completion = chat_completion()
    fakes.pipeline.completes = Completion(CREATED, completion.choices, completion.cap, SETTLEMENT, STANDINGS)
    assert isinstance(fakes.pipeline.streams, FakeStream)
    fakes.pipeline.streams.standings = STANDINGS
    answer = await post(app, path, {**BODY, "stream": stream})
    assert answer.status == 200
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize(
    ("path", "error", "number", "words"),
    [
        (
            CHAT,
            RateExceeded("No.", meter=Meter.REQUESTS_PER_MINUTE, standings=STANDINGS, retry_after_s=7),
            3021,
            ("requests_per_minute_exceeded", "7"),
        ),
        (RUN, RateExceeded("No.", standings=STANDINGS, retry_after_s=7), 3021, (None, "7")),
        (RUN, ConcurrencyExceeded("No.", standings=STANDINGS), 3021, (None, "1")),
        (RUN, NeuronsExceeded("No.", standings=STANDINGS, retry_after_s=7), 3036, (None, None)),
        (CHAT, NeuronsExceeded("No.", standings=STANDINGS), 3036, ("neurons_per_day_exceeded", None)),
        (CHAT, RequestExceedsQuota("No.", standings=STANDINGS), 3021, ("request_exceeds_quota", None)),
    ],
)
async def test_every_refusal_has_its_code_and_says_whether_to_retry(
    request: pytest.FixtureRequest, path: str, error: Exception, number: int, words: tuple[str | None, str | None]
) -> None:
    """words: the code in OpenAI's dialect, and Retry-After."""
    app, fakes, (code, retry) = request.getfixturevalue("app"), request.getfixturevalue("fakes"), words
    fakes.pipeline.completes = error
    answer = await post(app, path, BODY)
    assert (answer.status, answer.json["errors"][0]["code"]) == (429, number)
    assert answer.json.get("error", {}).get("code") == code
    assert answer.headers.get("retry-after") == retry
    assert answer.headers.get("x-should-retry") == (None if retry else "false")
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
