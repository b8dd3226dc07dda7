"""Checking a form may take seconds: every route does so while others are answered."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp

from api import answer_form
from api.intake import Arrival
from api.openai.batch_form import OpenAIForm
from api.workers_ai.batch_form import WorkersForm
from backends import grammar
from gateway.batches.batch import Batch, FormName, Line
from gateway.batches.form import Later
from gateway.decision import Decision
from tenancy.principal import Principal
from tests.api.exchange import get, post
from tests.doubles.waiting import eventually
from tests.fakes import ACCOUNT, MODEL, Fakes, principal, text_completion

_SCHEMA = {"name": "x", "schema": {"type": "integer"}}
_FORM = {"type": "json_schema", "json_schema": _SCHEMA}
_CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, **_CHAT, "response_format": _FORM},
    "/v1/completions": {"model": MODEL, "prompt": "hi", "regex": "[0-9]+"},
    "/v1/responses": {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_schema", **_SCHEMA}}},
    f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}": {**_CHAT, "guided_json": {"type": "integer"}},
}
# The same words stand in every dialect's body.
ALSO: dict[str, dict[str, Any]] = {"/v1/responses": {"model": MODEL, "input": "hi", "guided_json": {"type": "integer"}}}
LINES: dict[str, tuple[FormName, dict[str, Any]]] = {
    "/v1/chat/completions": (FormName.OPENAI, ROUTES["/v1/chat/completions"]),
    "/v1/completions": (FormName.OPENAI, ROUTES["/v1/completions"]),
    "run": (FormName.WORKERS_AI, {**_CHAT, "response_format": _FORM}),
}


@pytest.mark.parametrize(("path", "body"), [*ROUTES.items(), *ALSO.items()])
async def test_others_are_answered_while_a_form_is_checked(
    app: ASGIApp, fakes: Fakes, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
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
    formed = asyncio.create_task(post(app, path, body))
    await eventually(checking.is_set)
    assert (await get(app, "/health/live")).status == 200
    may_end.set()
    assert (await formed).status == 200


class Work:
    """Of lines that find no room once they have been read."""

    LATER = Later(1.0, account_alone=False)

    async def bearer(self, _batch: Batch) -> Principal:
        return principal()

    def arrival(self, _batch: Batch, line: Line, bearer: Principal) -> Arrival:
        return Arrival(line.request_id, bearer, 0, 1.0, 8, "", Decision())

    def embeds(self, _model: str) -> bool:
        return False

    async def generate(self, *_: object, **__: object) -> Later:
        return self.LATER


async def nothing(_answer: bytes) -> None:
    """No answer is kept."""


@pytest.mark.parametrize("endpoint", LINES)
async def test_a_batch_s_line_has_its_form_checked_beside_the_event_loop(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked_in: list[threading.Thread] = []
    monkeypatch.setattr(grammar, "check", lambda _grammar: checked_in.append(threading.current_thread()))
    for remembers in ("_schema_fault", "_form_fault"):
        monkeypatch.setattr(answer_form, remembers, getattr(answer_form, remembers).__wrapped__)
    form, body = LINES[endpoint]
    batch: Any = SimpleNamespace(id="batch", form=form, endpoint=endpoint, model=MODEL)
    line = Line("batch", ACCOUNT, 0, None, orjson.dumps(body), "request", 0)
    work: Any = Work()
    dialect = OpenAIForm(work) if form is FormName.OPENAI else WorkersForm(work)
    assert await dialect.run(batch, line, nothing, lambda: None) is Work.LATER
    assert checked_in
    assert threading.main_thread() not in checked_in
