"""An error in each dialect: the body, the status, and whether and when to retry."""

from typing import Any

import orjson
import pytest
from starlette.requests import Request

from api.errors import INTERNAL, BodyTooSlow, InputInvalid, MethodNotAllowed
from api.refusals import Dialect, dialect_of, refusal, stream_error
from backends.errors import EngineBroke
from billing.errors import InsufficientCredits, PriceUnavailable
from gateway.errors import CapacityExceeded, Evicted, PromptTooLong
from tenancy.errors import ConcurrencyExceeded, KeyMissing
from tests.fakes import ACCOUNT

OPENAI = "/v1/chat/completions"
NESTED_OPENAI = f"/client/v4/accounts/{ACCOUNT}/ai/v1/models"
WORKERS = f"/client/v4/accounts/{ACCOUNT}/ai/run/@cf/a/b"
CONSOLE = f"/console/v1/accounts/{ACCOUNT}/usage"


def refused(path: str, error: Exception) -> tuple[int, dict[str, str], Any]:
    request = Request({"type": "http", "path": path, "headers": [], "state": {"request_id": "id-1"}})
    answer = refusal(request, error)
    return answer.status_code, dict(answer.headers), orjson.loads(bytes(answer.body))


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        (OPENAI, Dialect.OPENAI),
        ("/v1", Dialect.OPENAI),
        (NESTED_OPENAI, Dialect.OPENAI),
        ("/client/v4/accounts/not-an-id/ai/v1/models", Dialect.OPENAI),
        (WORKERS, Dialect.WORKERS_AI),
        ("/client/v4/accounts/a/ai/v1x", Dialect.WORKERS_AI),
        ("/client/v4/user/tokens/verify", Dialect.WORKERS_AI),
        (CONSOLE, Dialect.CONSOLE),
        ("/v11", Dialect.CONSOLE),
        ("/", Dialect.CONSOLE),
    ],
)
def test_the_path_says_the_dialect(path: str, dialect: Dialect) -> None:
    assert dialect_of(path) is dialect


def test_openai_bodies_hold_both_shapes() -> None:
    status, _, body = refused(OPENAI, InputInvalid(("temperature",), "must be less than or equal to 2."))
    text = "Invalid value at '/temperature': must be less than or equal to 2."
    assert status == 400
    assert body == {
        "error": {
            "message": text,
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_parameter",
        },
        "success": False,
        "errors": [{"code": 5006, "message": text}],
        "result": None,
        "messages": [],
    }


def test_workers_ai_bodies_are_envelopes() -> None:
    status, _, body = refused(WORKERS, PromptTooLong(prompt_tokens=9000, limit_tokens=8191))
    assert status == 413
    assert set(body) == {"result", "success", "errors", "messages"}
    assert body["errors"][0]["code"] == 5021
    assert "9000" in body["errors"][0]["message"]
    assert "8191" in body["errors"][0]["message"]


def test_the_console_speaks_problem_json() -> None:
    status, headers, body = refused(CONSOLE, ConcurrencyExceeded("All slots are taken."))
    assert headers["content-type"] == "application/problem+json"
    assert (status, body["status"], body["code"], body["request_id"]) == (429, 429, "concurrency_exceeded", "id-1")


def test_a_missing_key_is_401_to_openai_and_400_to_workers_ai() -> None:
    error = KeyMissing("Missing.")
    assert refused(OPENAI, error)[0] == 401
    assert refused(NESTED_OPENAI, error)[2]["errors"][0]["code"] == 9106
    status, _, body = refused(WORKERS, error)
    assert (status, body["errors"][0]["code"]) == (400, 9106)


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (CapacityExceeded("Busy.", retry_after_s=7), "7"),
        (Evicted("Too long."), "1"),
        (CapacityExceeded("Busy.", retry_after_s=0), "1"),
        (ConcurrencyExceeded("Taken."), "1"),
    ],
)
def test_a_retry_is_invited_with_a_whole_number_of_seconds(error: Exception, retry_after: str) -> None:
    for path in (OPENAI, WORKERS):
        status, headers, _ = refused(path, error)
        assert (status, headers["retry-after"]) == (429, retry_after)
        assert "x-should-retry" not in headers


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InsufficientCredits("Out of credit.", retry_after_s=5), 402),
        (PriceUnavailable("No price."), 503),
        (PromptTooLong(prompt_tokens=9, limit_tokens=8), 400),
    ],
)
def test_what_a_retry_can_not_help_says_so(error: Exception, status: int) -> None:
    answered, headers, _ = refused(OPENAI, error)
    assert answered == status
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers


def test_an_engines_own_words_stay_inside() -> None:
    for path in (OPENAI, WORKERS, CONSOLE):
        _, _, body = refused(path, EngineBroke("secret: /models/weights on host-7"))
        assert "host-7" not in str(body)
        assert "id-1" in str(body)


def test_a_bug_says_nothing_but_the_request_id() -> None:
    status, _, body = refused(WORKERS, KeyError("private"))
    assert (status, body["errors"]) == (500, [{"code": 3043, "message": f"{INTERNAL.says} Request id: id-1."}])


def test_a_wrong_method_names_the_right_ones() -> None:
    status, headers, body = refused(WORKERS, MethodNotAllowed("GET", "POST"))
    assert (status, headers["allow"], body["errors"][0]["code"]) == (405, "POST", 7001)
    assert body["errors"][0]["message"] == "GET not supported for requested URI."


def test_a_body_that_may_never_come_ends_the_connection() -> None:
    _, headers, _ = refused(OPENAI, BodyTooSlow(30))
    assert headers["connection"] == "close"


def test_in_a_stream_it_is_one_frame_for_both_dialects() -> None:
    frame = stream_error(EngineBroke("secret"), request_id="id-1")
    assert frame.startswith(b"data: {")
    assert frame.endswith(b"}\n\n")
    body = orjson.loads(frame.removeprefix(b"data: "))
    assert body["error"]["type"] == "server_error"
    assert body["success"] is False
    assert body["errors"][0]["code"] == 3043
    assert b"secret" not in frame
