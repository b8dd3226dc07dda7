"""What a line of a batch's file may be is said when the file is checked, before anything is built from it."""

import json

import pytest

from api.openai.batch_input import LINE_BYTES_MAX, BatchInput


def line(custom_id: str, prompt: str) -> bytes:
    body = {"model": "m", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}).encode()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (line("a", "a" * LINE_BYTES_MAX), "invalid_json_line"),
        (line("a\0b", "a"), "invalid_custom_id"),
    ],
    ids=["larger than a request", "a name that PostgreSQL can't hold"],
)
def test_a_line_that_could_not_be_kept_or_run_is_an_error_of_its_own(text: bytes, code: str) -> None:
    read = BatchInput("/v1/completions", 10)
    assert read.see(0, line("good", "a")) is not None
    assert read.see(1, text) is None
    assert [(error["code"], error["line"]) for error in read.errors] == [(code, 2)]
