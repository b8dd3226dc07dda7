"""Keys and prompts are found nowhere afterwards: not in a log, the spool, the database, an error, a metric or a page.

A real process serves; clients send marked keys and prompts, well and badly, and the process is killed. Then every byte
that it wrote or answered is searched for them. What a client asks to be kept (files, batches, responses) is in the
database, and there alone.
"""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually_async
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process

_PROMPT = "xylophonecanaryprompt"
_KEPT = "marimbacanarykept"
# As text and as tokens: either would give the prompt away.
_TOKENS = [411, 97, 388, 203, 59, 311]
_MARKS = (_PROMPT, "411,97,388", "411, 97, 388")
_MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


class _Client:
    """Sends whatever it is told and keeps all that was answered."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url
        self.told: list[tuple[str, str]] = []

    async def send(self, method: str, path: str, body: object = None, **options: Any) -> Any:
        """key: of the bearer. The answer's JSON, if it is some."""
        headers = {"authorization": f"Bearer {options.pop('key')}", "content-type": "application/json"}
        data = body if isinstance(body, bytes) else None if body is None else orjson.dumps(body)
        async with self._session.request(
            method, self._base_url + path, data=data, headers=headers | options.pop("headers", {}), **options
        ) as response:
            text = await response.text()
        self.told.append((f"{method} {path}", f"{sorted(response.headers.items())}\n{text}"))
        return json.loads(text) if "json" in response.headers.get("content-type", "") else text


async def _use_it_well_and_badly(client: _Client, engine: ScriptedEngine, base: dict[str, str]) -> None:
    key, account = base["api_key"], f"/client/v4/accounts/{base['account_id']}"
    messages = [{"role": "user", "content": _PROMPT}]
    chat = {"model": _MODEL, "messages": messages, "max_tokens": 5, "user": "u"}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", {"model": _MODEL, "prompt": _PROMPT, "max_tokens": 5}),
        ("/v1/completions", {"model": _MODEL, "prompt": _TOKENS, "max_tokens": 5}),
        ("/v1/responses", {"model": _MODEL, "input": _PROMPT, "max_output_tokens": 5}),
        (f"{account}/ai/run/{_MODEL}", {"prompt": _PROMPT, "max_tokens": 5}),
        (f"{account}/ai/run/{_MODEL}", {"messages": messages, "stream": True}),
        # Badly: whatever is said about a body must not repeat it.
        ("/v1/chat/completions", chat | {"temperature": _PROMPT}),
        ("/v1/chat/completions", chat | {"response_format": {"type": _PROMPT}}),
        ("/v1/chat/completions", chat | {"messages": [{"role": _PROMPT, "content": _PROMPT}]}),
        ("/v1/chat/completions", chat | {"tools": [{"type": "function", "function": {"name": _PROMPT + "!"}}]}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": _PROMPT * 5_000}]}),
        ("/v1/chat/completions", b'{"messages": "' + _PROMPT.encode()),
        ("/v1/completions", {"model": _MODEL, "prompt": [*_TOKENS, 10**9]}),
        (f"{account}/ai/run/{_MODEL}", {"prompt": {"x": _PROMPT}}),
    ):
        await client.send("POST", path, body, key=key)
    await client.send("POST", "/v1/chat/completions", chat, key=key, headers={"idempotency-key": "once"})
    for script in (
        {"refuse": Refusal(400, _PROMPT.encode())},
        {"refuse": Refusal(503, b"busy")},
        {"die_after": 1},
        {"error_after": 1},
    ):
        engine.steer(**script)
        await client.send("POST", "/v1/chat/completions", chat, key=key)
    engine.steer()


async def _have_it_kept(client: _Client, base: dict[str, str]) -> None:
    """Files, batches, queued and background runs, and responses, well and badly."""
    key, account = base["api_key"], f"/client/v4/accounts/{base['account_id']}"
    messages = [{"role": "user", "content": _KEPT}]
    line: dict[str, Any] = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    good = orjson.dumps(line | {"body": {"model": _MODEL, "messages": messages, "max_tokens": 3}})
    ordered = []
    for lines in (
        good,
        orjson.dumps(line | {"body": {"model": _MODEL, "messages": _KEPT}}),
        orjson.dumps(line | {"url": _KEPT}),
        b'{"' + _KEPT.encode(),
    ):
        uploaded = await client.send("POST", "/v1/files", _form(lines), key=key, headers=_MULTIPART)
        if "id" in uploaded:
            order = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            ordered.append(await client.send("POST", "/v1/batches", order, key=key))
    queue = f"{account}/ai/run/{_MODEL}?queueRequest=true"
    await client.send("POST", queue, {"requests": [{"prompt": _KEPT, "max_tokens": 3}]}, key=key)
    await client.send("POST", queue, {"requests": [{"prompt": {"x": _KEPT}}]}, key=key)
    background = {"model": _MODEL, "input": {"prompt": _KEPT}, "options": {"background": True}}
    await client.send("POST", f"{account}/ai/run", background, key=key)
    response = {"model": _MODEL, "input": _KEPT, "max_output_tokens": 3, "store": True}
    kept = await client.send("POST", "/v1/responses", response, key=key)
    again = response | {"previous_response_id": kept["id"]}
    await client.send("POST", "/v1/responses", again, key=key)
    await client.send("POST", "/v1/responses", response | {"tools": _KEPT}, key=key)
    for path in (f"/v1/responses/{kept['id']}", "/v1/files", f"{account}/ai/batches"):
        await client.send("GET", path, key=key)

    async def ended() -> bool:
        found = await client.send("GET", "/v1/batches", key=key)
        states = {batch["id"]: batch["status"] for batch in found["data"]}
        return {states[one["id"]] for one in ordered if "id" in one} <= {"completed", "failed"}

    await eventually_async(ended, within_s=30, what="ended batches")


_MULTIPART = {"content-type": "multipart/form-data; boundary=b"}


def _form(lines: bytes) -> bytes:
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n%b\n\r\n--b--\r\n'
    ) % lines


async def _use_keys_badly(client: _Client, base: dict[str, str]) -> list[str]:
    """Texts of more keys that are a secret."""
    console = f"/console/v1/accounts/{base['account_id']}"
    admin, mistyped = base["admin_key"], base["api_key"][:-1] + ("0" if base["api_key"][-1] != "0" else "1")
    issued = await client.send("POST", f"{console}/keys", {"name": "canary"}, key=admin)
    client.told.pop()  # the one answer that shows it
    rotated = await client.send("POST", f"{console}/keys/{issued['id']}/rotate", {}, key=admin)
    client.told.pop()
    await client.send("DELETE", f"{console}/keys/{rotated['id']}", key=admin)
    for key in (mistyped, rotated["key"], base["api_key"], admin, issued["key"]):
        await client.send("GET", "/v1/models", key=key)
        await client.send("GET", f"{console}/keys", key=key)
        await client.send("GET", f"{console}/usage?key={key}", key=admin)
        await client.send("GET", f"{console}/keys/{key}", key=admin)
        for things in ("projects", "service_accounts", "webhooks", "budgets", "invoices", "members"):
            await client.send("GET", f"{console}/{things}/{key}", key=admin)
            await client.send("DELETE", f"{console}/{things}/{key}", key=admin)
        await client.send("PUT", f"{console}/limits", {"meter": key, "limit": 1}, key=admin)
        await client.send("POST", f"{console}/budgets", {"limit": key, "period": "day"}, key=admin)
        await client.send("PATCH", f"/console/v1/accounts/{key}", {"suspended": True}, key=base["admin_key"])
        for things in ("files", "batches", "responses", "models"):
            await client.send("GET", f"/v1/{things}/{key}", key=base["api_key"])
        await client.send("POST", f"/v1/{key}", {"model": key}, key=key)
        await client.send("POST", "/v1/chat/completions", {"model": key, "messages": []}, key=base["api_key"])
    return [mistyped, issued["key"], rotated["key"], base["api_key"], admin]


async def _look_at_everything(client: _Client, base: dict[str, str]) -> None:
    console = f"/console/v1/accounts/{base['account_id']}"
    for path in ("usage?group_by=model", "costs", "requests?limit=200", "ledger", "keys", "audit", "limits", "wallet"):
        await client.send("GET", f"{console}/{path}", key=base["admin_key"])
    for path in ("", "/projects", "/service_accounts", "/budgets", "/webhooks", "/members", "/invoices", "/latency"):
        await client.send("GET", f"{console}{path}", key=base["admin_key"])
    for path in ("accounts", "model_switches", "batches", "users"):
        await client.send("GET", f"/console/v1/{path}", key=base["admin_key"])
    await client.send("GET", "/dashboard/sign-in", key=base["admin_key"])
    for path in ("/console/v1/audit", "/console/v1/invariants", "/console/v1/capacity", "/metrics", "/openapi.json"):
        await client.send("GET", path, key=base["admin_key"])


def _found_in(process: ServeProcess, marks: list[str]) -> list[tuple[str, str]]:
    """(where, what) of every mark in a file that the process wrote."""
    by_design = {"bootstrap.json"}  # it hands the first keys over, and only its owner can read it
    files = [path for path in process.home.rglob("*") if path.is_file() and path.name not in by_design]
    contents = [(str(path.relative_to(process.home)), path.read_bytes()) for path in files]
    contents.append(("log", process.log.encode()))
    assert {"pagegate.db", "log"} <= {name for name, _ in contents}
    assert any(name.startswith("spool/") for name, _ in contents)
    return [(name, mark) for name, content in contents for mark in marks if mark.encode() in content]


@pytest.mark.timeout(180)
async def test_no_key_and_no_prompt_is_left_anywhere(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> None:
    variables = {"PAGEGATE_ENGINE__URL": engine.url, "PAGEGATE_LOG_LEVEL": "debug"}
    with serve_process(tmp_path / "home", checkpoint, **variables) as process:
        await eventually_async(
            partial(asyncio.to_thread, process.is_ready), within_s=START_S_MAX, what="a ready service"
        )
        base = process.bootstrap()
        async with aiohttp.ClientSession() as session:
            client = _Client(session, process.base_url)
            await _use_it_well_and_badly(client, engine, base)
            await _have_it_kept(client, base)
            secrets = await _use_keys_badly(client, base)
            await _look_at_everything(client, base)
        process.kill()
    # A key's last characters are its hint, and its first ones its kind: what is between is the secret.
    marks = [*_MARKS, *(text[9:45] for text in secrets)]
    assert _found_in(process, marks) == []
    assert {name.partition("-")[0] for name, _ in _found_in(process, [_KEPT])} == {"pagegate.db"}
    repeated = [(asked, mark) for asked, told in client.told for mark in [*marks, _KEPT] if mark in told]
    assert sorted({asked.partition("pg")[0] for asked, _ in repeated}) == []
