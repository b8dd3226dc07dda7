"""Keys and prompts are found nowhere afterwards: not in a log, the spool, the database, an error, a metric or a page.

A real process serves; clients send marked keys and prompts, well and badly, and the process is killed. Then every byte
that it wrote or answered is searched for them.
"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process

_PROMPT = "xylophonecanaryprompt"
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
        await client.send("POST", f"/v1/{key}", {"model": key}, key=key)
        await client.send("POST", "/v1/chat/completions", {"model": key, "messages": []}, key=base["api_key"])
    return [mistyped, issued["key"], rotated["key"], base["api_key"], admin]


async def _look_at_everything(client: _Client, base: dict[str, str]) -> None:
    console = f"/console/v1/accounts/{base['account_id']}"
    for path in ("usage?group_by=model", "costs", "requests?limit=200", "ledger", "keys", "audit", "limits", "wallet"):
        await client.send("GET", f"{console}/{path}", key=base["admin_key"])
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
        await eventually(process.is_ready, within_s=START_S_MAX, what="a ready service")
        base = process.bootstrap()
        async with aiohttp.ClientSession() as session:
            client = _Client(session, process.base_url)
            await _use_it_well_and_badly(client, engine, base)
            secrets = await _use_keys_badly(client, base)
            await _look_at_everything(client, base)
        process.kill()
    # A key's last characters are its hint, and its first ones its kind: what is between is the secret.
    marks = [*_MARKS, *(text[9:45] for text in secrets)]
    assert _found_in(process, marks) == []
    repeated = [(asked, mark) for asked, told in client.told for mark in marks if mark in told]
    assert repeated == []  # not to whoever sent it either: answers are logged by others
