"""Checking a form may take seconds: every route does so while others are answered."""

import asyncio
import threading
from typing import Any

import pytest
from starlette.types import ASGIApp

from api import answer_form
from backends import grammar
from tests.api.exchange import get, post
from tests.doubles.waiting import eventually
from tests.fakes import ACCOUNT, MODEL, Fakes, text_completion

_SCHEMA = {"name": "x", "schema": {"type": "integer"}}
_FORM = {"type": "json_schema", "json_schema": _SCHEMA}
_CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, **_CHAT, "response_format": _FORM},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "regex": "[0-9]+"},
    "/v1/responses": {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_schema", **_SCHEMA}}},
    f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}": {**_CHAT, "guided_json": {"type": "integer"}},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_others_are_answered_while_a_form_is_checked(
    app: ASGIApp, fakes: Fakes, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/v1/completions":
        fakes.pipeline.completes = text_completion()
    checking, may_end = threading.Event(), threading.Event()

    def slow(_grammar: str) -> None:
        checking.set()
        assert may_end.wait(30), "nothing else was answered meanwhile"

    monkeypatch.setattr(grammar, "check", slow)
    for remembers in ("_schema_fault", "_form_fault"):
        monkeypatch.setattr(answer_form, remembers, getattr(answer_form, remembers).__wrapped__)
    formed = asyncio.create_task(post(app, path, ROUTES[path]))
    await eventually(checking.is_set)
    assert (await get(app, "/health/live")).status == 200
    may_end.set()
    assert (await formed).status == 200
