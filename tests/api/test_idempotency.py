"""Idempotency-Key over the whole application: one key, one run, one charge, in every dialect."""

from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp

from billing.errors import BillingUnavailable, InsufficientCredits, RecordDelayed
from billing.kept_answers import KeptAnswers
from gateway.errors import GenerationCutOff, GenerationFailed
from tenancy.claims import Claim, Meter, Standing
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tests.api.exchange import Exchange, exchange, post
from tests.fakes import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT, Fakes, chat_completion, principal, text_completion, until
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import clock, database, database_url, migrated_file

__all__ = ["clock", "database", "database_url", "migrated_file"]

CHAT = "/v1/chat/completions"
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    f"/client/v4/accounts/{ACCOUNT}/ai/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/completions": {"model": MODEL, "prompt": "hi"},
    RUN: {"prompt": "hi"},
}


@pytest.fixture(autouse=True)
def kept(fakes: Fakes, database: Database, clock: SettableClock) -> KeptAnswers:
    answers = KeptAnswers(
        database, clock=clock, kept_s=60, answer_bytes_max=10_000, keys_per_account_max=100, account_bytes_max=10**6
    )
    fakes.kept_answers = answers
    return answers


async def send(app: ASGIApp, path: str = CHAT, key: str = "k1", **changes: Any) -> Exchange:
    return await post(app, path, {**ROUTES[path], **changes}, headers={"idempotency-key": key})


@pytest.mark.parametrize("path", ROUTES)
class TestEveryRoute:
    async def test_the_same_request_gets_the_same_answer_and_runs_once(
        self, app: ASGIApp, fakes: Fakes, path: str
    ) -> None:
        if path == "/v1/completions":
            fakes.pipeline.completes = text_completion()
        first, again = [await send(app, path) for _ in range(2)]
        assert (first.status, again.status) == (200, 200)
        assert again.body == first.body
        assert again.headers["idempotent-replayed"] == "true"
        assert "idempotent-replayed" not in first.headers
        for name in ("content-type", "cf-ai-neurons", "content-length"):
            assert again.headers[name] == first.headers[name]
        assert len(fakes.pipeline.requests) == 1

    async def test_another_body_is_422(self, app: ASGIApp, fakes: Fakes, path: str) -> None:
        if path == "/v1/completions":
            fakes.pipeline.completes = text_completion()
        await send(app, path)
        refused = await send(app, path, temperature=0.5)
        assert refused.status == 422
        assert len(fakes.pipeline.requests) == 1

    async def test_a_stream_is_not_run_again(self, app: ASGIApp, fakes: Fakes, path: str) -> None:
        first = await send(app, path, stream=True)
        again = await send(app, path, stream=True)
        assert (first.status, again.status) == (200, 409)
        assert fakes.pipeline.requests[0].id in again.body.decode()
        assert again.headers["x-should-retry"] == "false"
        assert len(fakes.pipeline.requests) == 1

    async def test_without_a_key_two_requests_run_twice(self, app: ASGIApp, fakes: Fakes, path: str) -> None:
        if path == "/v1/completions":
            fakes.pipeline.completes = text_completion()
        for _ in range(2):
            assert (await post(app, path, ROUTES[path])).status == 200
        assert len(fakes.pipeline.requests) == 2


async def test_while_it_runs_a_second_one_is_told_to_wait(app: ASGIApp, fakes: Fakes) -> None:
    fakes.pipeline.completes = None
    running = exchange(app, "POST", CHAT, body=ROUTES[CHAT], headers={"idempotency-key": "k1"}).start()
    await until(lambda: len(fakes.pipeline.requests) == 1)
    second = await send(app)
    assert (second.status, second.json["error"]["code"]) == (409, "request_in_progress")
    assert second.headers["retry-after"] == "1"
    assert running.task is not None
    running.task.cancel()


async def test_a_client_that_left_finds_its_answer_when_it_comes_back(app: ASGIApp, fakes: Fakes) -> None:
    gate = fakes.pipeline.hold_answers()
    leaving = exchange(app, "POST", CHAT, body=ROUTES[CHAT], headers={"idempotency-key": "k1"}).start()
    await until(lambda: len(fakes.pipeline.requests) == 1)
    leaving.leave()
    gate.set()
    await leaving.ended()
    assert fakes.pipeline.cancelled == 0
    again = await send(app)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json["choices"][0]["message"]["content"] == "Paris."


@pytest.mark.parametrize(
    "error", [InsufficientCredits("none left"), GenerationFailed("broke"), BillingUnavailable("full")]
)
async def test_what_cost_nothing_may_be_tried_again(app: ASGIApp, fakes: Fakes, error: Exception) -> None:
    fakes.pipeline.completes = error
    assert (await send(app)).status >= 400
    fakes.pipeline.completes = chat_completion()
    answer = await send(app)
    assert (answer.status, "idempotent-replayed" in answer.headers) == (200, False)


@pytest.mark.parametrize("error", [RecordDelayed(), GenerationCutOff("cut"), RuntimeError("a bug")])
async def test_what_may_have_cost_something_is_not_run_again(app: ASGIApp, fakes: Fakes, error: Exception) -> None:
    fakes.pipeline.completes = error
    assert (await send(app)).status in {500, 502, 503}
    fakes.pipeline.completes = chat_completion()
    assert (await send(app)).status == 409


async def test_invalid_bodies_take_no_key(app: ASGIApp) -> None:
    assert (await send(app, temperature="hot")).status == 400
    assert (await send(app)).status == 200


async def test_keys_are_each_accounts_own(app: ASGIApp, fakes: Fakes) -> None:
    fakes.authenticator.keys["theirs"] = principal(*_scopes(fakes), account_id=OTHER_ACCOUNT)
    await send(app)
    theirs = await post(app, CHAT, ROUTES[CHAT], headers={"idempotency-key": "k1"}, key="theirs")
    assert "idempotent-replayed" not in theirs.headers
    assert len(fakes.pipeline.requests) == 2


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "schlüssel"])
async def test_a_key_that_can_not_be_honoured_is_refused(app: ASGIApp, fakes: Fakes, key: str) -> None:
    refused = await send(app, key=key)
    assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_idempotency_key")
    assert fakes.pipeline.requests == []


async def test_an_answer_that_can_not_be_kept_is_given_all_the_same(
    app: ASGIApp, fakes: Fakes, kept: KeptAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: object) -> None:
        raise TenancyUnavailable("away")

    monkeypatch.setattr(kept, "keep", away)
    assert (await send(app)).status == 200
    assert (await send(app)).status == 409


def _scopes(fakes: Fakes) -> Any:
    known: Any = fakes.authenticator.keys[KEY]
    return known.scopes


async def test_how_limits_stood_is_told_once(app: ASGIApp, fakes: Fakes) -> None:
    claim = Claim(Meter.REQUESTS_PER_MINUTE, "account", 1, 60, 5_000, 12)
    fakes.pipeline.completes = replace(chat_completion(), standings=(Standing(claim, used=1, reset_ms=5_000),))
    first, again = [await send(app) for _ in range(2)]
    limits = {"ratelimit", "ratelimit-policy", "x-ratelimit-remaining-requests"}
    assert limits <= first.headers.keys()
    assert not limits & again.headers.keys()
