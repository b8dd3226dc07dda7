"""Prompts that the engine has computed before: cheaper for the account that sent them, unknown to every other."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tenancy.provisioning import issue_key, open_account
from tests.e2e.dialects import CHAT, COMPLETIONS
from tests.e2e.local_service import running_local_service
from tests.e2e.service import Service

WORDS = "the pages are the scarce thing, so the gate is driven by pages. " * 12


@pytest.fixture
async def local(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Service]:
    """A gateway in front of the real local engine."""
    async with running_local_service(tmp_path / "home", checkpoint, kv_cache_bytes=8 << 20) as service:
        yield service


async def other_account(service: Service) -> tuple[str, str]:
    """Another account and a key of its."""
    database = service.services.database
    account = open_account(database, "other", clock=time.time_ns)
    key = issue_key(
        database,
        open_pepper(service.services.settings.pepper_path),
        account.id,
        name="other",
        kind=KeyKind.INFERENCE,
        clock=time.time_ns,
    )
    return account.id, key.text


@pytest.mark.engine
@pytest.mark.parametrize("stream", [False, True])
async def test_an_account_s_second_identical_prompt_is_cached_and_costs_less_and_another_s_is_not(
    local: Service, *, stream: bool
) -> None:
    _, key = await other_account(local)
    body = CHAT.body(
        local, messages=[{"role": "user", "content": WORDS}], temperature=0, stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip

    async def ask(key: str | None = None) -> dict[str, Any]:
        answer = await local.post(CHAT.path(local), body, key=key)
        assert answer.status == 200, answer.body
        if stream:
            return {"usage": orjson.loads(answer.events()[-2])["usage"], "id": orjson.loads(answer.events()[0])["id"]}
        return answer.json()

    first, second, stranger = await ask(), await ask(), await ask(key)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, stranger)]
    prompt = first["usage"]["prompt_tokens"]
    assert cached == [0, (prompt - 1) // 16 * 16, 0]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == stranger["usage"]["prompt_tokens"]
    paid, less = await local.record(first["id"]), await local.record(second["id"])
    assert (paid["cached_tokens"], less["cached_tokens"]) == (0, cached[1])
    assert paid["completion_tokens"] == less["completion_tokens"]
    assert less["cost_nano"] < paid["cost_nano"]
    assert stranger["usage"] == first["usage"], "cost included"
    await local.oracle(rows=2)


async def test_each_account_has_a_salt_of_its_own_and_keeps_it(service: Service) -> None:
    account_id, key = await other_account(service)
    for dialect in (CHAT, COMPLETIONS):
        for chosen in (None, key, None):
            assert (await service.post(dialect.path(service), dialect.body(service), key=chosen)).status == 200
    mine, theirs, again, *others = [received.body["cache_salt"] for received in service.engine.requests]
    assert mine == again != theirs
    assert others == [mine, theirs, mine]
    assert service.account_id not in mine
    assert account_id not in theirs
