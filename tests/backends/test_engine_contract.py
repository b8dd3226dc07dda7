"""What the gateway relies on in an engine, stated once and run over each: the scripted double and the local one, alone
and as pairs. The real SGLang and a pair of it run the same in tests/sglang_cpu, where they are started.

An engine that passes can stand behind the gateway.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Script
from tests.doubles.waiting import eventually_async
from tests.e2e.deployments import scripted_pair
from tests.engines import build_tiny_checkpoint, start_local_engine, start_local_pair

PROMPT = [5, 6, 7, 8, 9, 10, 11]
# Tokens, nearly all of a context of 2,048: the fastest engine here takes more than a second for them, however long this
# process was not given a core before it stops one in the middle.
LONG_OUTPUT = 1_900
PATHS = ["/v1/chat/completions", "/v1/completions"]


@dataclass(frozen=True)
class Engine:
    """An engine under test, spoken to over HTTP and nothing else."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, orjson.loads(await response.read() or b"{}")

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200, path
            answer = orjson.loads(await response.read())
            assert isinstance(answer, dict)
            return answer

    async def ask(self, path: str = PATHS[0], **fields: Any) -> dict[str, Any]:
        status, answer = await self.post(path, call(path, **fields))
        assert status == 200, answer
        return answer

    async def stream(self, path: str = PATHS[0], **fields: Any) -> list[bytes]:
        """The payloads of a whole stream."""
        async with self.open_stream(path, **fields) as payloads:
            return [payload async for payload in payloads]

    @contextlib.asynccontextmanager
    async def open_stream(self, path: str = PATHS[0], **fields: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """A running stream's payloads; leaving the context drops the connection."""
        body = call(path, stream=True, **fields)
        response = await self.session.post(self.url + path, json=body)
        try:
            assert response.status == 200, await response.read()
            yield payloads_of(response)
        finally:
            response.close()

    async def load(self) -> dict[str, Any]:
        rank = (await self.get("/v1/loads"))["loads"][0]
        assert isinstance(rank, dict)
        return rank

    async def is_idle(self) -> bool:
        load = await self.load()
        return (load["num_running_reqs"], load["num_used_tokens"]) == (0, 0)


@dataclass(frozen=True)
class Pair(Engine):
    """A prefill/decode pair, whose decode half is at `url`: every call goes to both halves, decode's answer counts."""

    prefill_url: str
    bootstrap: tuple[str, int]

    def _met(self, body: dict[str, Any]) -> dict[str, Any]:
        host, port = self.bootstrap
        room = secrets.randbits(63)
        return body | {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}

    @contextlib.asynccontextmanager
    async def _prefilling(self, path: str, body: dict[str, Any]) -> AsyncIterator[None]:
        """The same call at the other half; left when decode has answered."""

        async def compute() -> None:
            async with self.session.post(self.prefill_url + path, json=body) as response:
                await response.read()

        computing = asyncio.create_task(compute(), name="prefill")
        try:
            yield
        finally:
            computing.cancel()
            await asyncio.wait({computing})

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path not in PATHS:
            await self.session.post(self.prefill_url + path, json=body)
            return await super().post(path, body)
        body = self._met(body)
        async with self._prefilling(path, body):
            return await super().post(path, body)

    @contextlib.asynccontextmanager
    async def open_stream(self, path: str = PATHS[0], **fields: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        fields = self._met(fields)
        async with (
            self._prefilling(path, call(path, stream=True, **fields)),
            super().open_stream(path, **fields) as payloads,
        ):
            yield payloads

    async def is_idle(self) -> bool:
        other = Engine(self.prefill_url, self.session)
        return await other.is_idle() and await super().is_idle()


async def payloads_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def call(path: str, **fields: Any) -> dict[str, Any]:
    """A deterministic call with eight tokens of output, unless the fields say otherwise."""
    prompt = {"messages": [{"role": "user", "content": "ignored"}], "input_ids": PROMPT}
    body = {"model": "contract", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | (prompt if path == PATHS[0] else {"prompt": PROMPT}) | fields


def rid() -> str:
    """Of one length, since an abort matches by prefix."""
    return secrets.token_hex(18)


def usage_of(payloads: list[bytes]) -> dict[str, Any]:
    """The usage of a stream's last chunk before [DONE]."""
    assert payloads[-1] == b"[DONE]"
    last = orjson.loads(payloads[-2])
    assert last["choices"] == []
    usage = last["usage"]
    assert isinstance(usage, dict)
    return usage


@pytest.fixture(scope="session")
def local_engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    checkpoint: Path = build_tiny_checkpoint(tmp_path_factory.mktemp("contract") / "tiny")
    with start_local_engine(checkpoint) as engine:
        yield engine.url


@pytest.fixture(scope="session")
def local_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, int]]:
    """The URLs of prefill and decode, and the port at which pages are handed over."""
    checkpoint = build_tiny_checkpoint(tmp_path_factory.mktemp("contract") / "tiny")
    with start_local_pair(checkpoint) as (prefill, decode, port):
        yield prefill.url, decode.url, port


@pytest.fixture(
    params=[
        "double",
        "double-pair",
        pytest.param("local", marks=pytest.mark.engine),
        pytest.param("local-pair", marks=pytest.mark.engine),
    ]
)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        if request.param == "double":
            double = await stack.enter_async_context(ScriptedEngine(Script(itl_ms=2)))
            yield Engine(double.url, session)
        elif request.param == "double-pair":
            halves = await stack.enter_async_context(scripted_pair())
            halves.decode.steer(itl_ms=2)
            yield Pair(halves.decode.url, session, halves.prefill.url, ("127.0.0.1", 8998))
        elif request.param == "local-pair":
            prefill_url, decode_url, port = request.getfixturevalue("local_pair")
            halved = Pair(decode_url, session, prefill_url, ("127.0.0.1", port))
            await eventually_async(halved.is_idle, what="an idle pair")
            yield halved
        else:
            engine = Engine(request.getfixturevalue("local_engine_url"), session)
            await eventually_async(engine.is_idle, what="an idle engine")
            yield engine


@pytest.mark.parametrize("path", PATHS)
class TestAnswers:
    async def test_the_rid_of_a_request_becomes_the_id_of_its_answer(self, engine: Engine, path: str) -> None:
        name = rid()
        assert (await engine.ask(path, rid=name))["id"] == name
        chunks = await engine.stream(path, rid=(streamed := rid()))
        assert {orjson.loads(chunk)["id"] for chunk in chunks[:-1]} == {streamed}

    async def test_prompt_tokens_are_exactly_the_ids_that_were_sent(self, engine: Engine, path: str) -> None:
        usage = (await engine.ask(path))["usage"]
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["total_tokens"] == len(PROMPT) + usage["completion_tokens"]

    async def test_exactly_max_tokens_are_produced_and_the_reason_is_length(self, engine: Engine, path: str) -> None:
        answer = await engine.ask(path, max_tokens=5)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"

    async def test_usage_is_equal_in_a_stream_and_in_a_whole_answer(self, engine: Engine, path: str) -> None:
        whole = (await engine.ask(path))["usage"]
        streamed = usage_of(await engine.stream(path, stream_options={"include_usage": True}))
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert streamed[key] == whole[key]
            assert type(streamed[key]) is int

    async def test_the_text_of_a_stream_is_the_text_of_a_whole_answer(self, engine: Engine, path: str) -> None:
        whole = said(await engine.ask(path))
        chunks = [orjson.loads(chunk) for chunk in (await engine.stream(path))[:-1]]
        assert "".join(streamed(chunk) for chunk in chunks) == whole

    async def test_a_stream_has_one_finish_reason_and_ends_with_done(self, engine: Engine, path: str) -> None:
        payloads = await engine.stream(path, max_tokens=3)
        assert payloads[-1] == b"[DONE]"
        reasons = [orjson.loads(payload)["choices"][0]["finish_reason"] for payload in payloads[:-1]]
        assert [reason for reason in reasons if reason is not None] == ["length"]
        assert reasons[-1] == "length"

    async def test_without_stream_options_a_stream_carries_no_usage(self, engine: Engine, path: str) -> None:
        payloads = await engine.stream(path, max_tokens=3)
        assert all(orjson.loads(payload).get("usage") is None for payload in payloads[:-1])

    async def test_running_usage_grows_with_the_tokens_and_ends_at_the_final_usage(
        self, engine: Engine, path: str
    ) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        payloads = await engine.stream(path, max_tokens=12, stream_options=options)
        final = usage_of(payloads)
        chunks = [orjson.loads(payload) for payload in payloads[:-2]]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if streamed(chunk)]
        assert counts, "every chunk with text carries running usage"
        assert counts == sorted(counts)
        assert counts[-1] <= final["completion_tokens"] == 12

    async def test_usage_is_the_last_key_of_a_chunk(self, engine: Engine, path: str) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for payload in (await engine.stream(path, stream_options=options))[:-1]:
            keys = list(orjson.loads(payload))
            assert keys[:5] == ["id", "object", "created", "model", "choices"]
            assert keys[5:] in ([], ["usage"])

    async def test_a_stop_string_ends_the_text_before_it(self, engine: Engine, path: str) -> None:
        text = said(await engine.ask(path, max_tokens=8))
        stop = text[len(text) // 2 :][:3]
        assert stop
        answer = await engine.ask(path, max_tokens=8, stop=[stop])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert said(answer) == text[: text.find(stop)]


@pytest.mark.parametrize("path", PATHS)
class TestRefusals:
    async def test_bad_input_is_refused_with_a_json_error(self, engine: Engine, path: str) -> None:
        prompt_key = "input_ids" if path == PATHS[0] else "prompt"
        for fields in ({"max_tokens": -1}, {"max_tokens": "many"}, {prompt_key: [1] * 200_000}):
            status, answer = await engine.post(path, call(path, **fields))
            assert 400 <= status < 500, fields
            assert isinstance(answer["message"], str)

    async def test_a_refused_request_leaves_nothing_behind(self, engine: Engine, path: str) -> None:
        status, _ = await engine.post(path, call(path, max_tokens=-1))
        assert status == 400
        await eventually_async(engine.is_idle, within_s=10, what="an idle engine")


@pytest.mark.parametrize("path", PATHS)
class TestStopping:
    async def test_an_abort_ends_the_stream_with_its_reason_and_frees_its_tokens(
        self, engine: Engine, path: str
    ) -> None:
        options = {"include_usage": True}
        async with engine.open_stream(
            path, rid=(name := rid()), max_tokens=LONG_OUTPUT, stream_options=options
        ) as open_:
            received = [await anext(open_), await anext(open_), await anext(open_)]
            assert (await engine.load())["num_used_tokens"] > 0
            await engine.post("/abort_request", {"rid": name})
            async with asyncio.timeout(20):
                received += [payload async for payload in open_]
        reasons = [choice["finish_reason"] for choice in choices(received)]
        assert reasons[-1] == "abort"
        assert 0 < usage_of(received)["completion_tokens"] < LONG_OUTPUT
        await eventually_async(engine.is_idle, within_s=10, what="freed tokens")

    async def test_an_abort_ends_a_whole_answer_with_what_was_produced(self, engine: Engine, path: str) -> None:
        name = rid()
        asking = asyncio.create_task(engine.ask(path, rid=name, max_tokens=LONG_OUTPUT), name="asking")
        await eventually_async(lambda: _runs(engine), within_s=20, what="a running request")
        await engine.post("/abort_request", {"rid": name})
        async with asyncio.timeout(20):
            answer = await asking
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert answer["usage"]["completion_tokens"] < LONG_OUTPUT

    async def test_an_abort_of_another_request_changes_nothing(self, engine: Engine, path: str) -> None:
        asking = asyncio.create_task(engine.ask(path, rid=rid(), max_tokens=200), name="asking")
        await eventually_async(lambda: _runs(engine, asking), within_s=20, what="a running request, or its end")
        await engine.post("/abort_request", {"rid": rid()})
        assert (await asking)["choices"][0]["finish_reason"] == "length"

    async def test_a_client_that_leaves_a_stream_frees_its_tokens(self, engine: Engine, path: str) -> None:
        async with engine.open_stream(path, max_tokens=LONG_OUTPUT) as open_:
            await anext(open_)
            await anext(open_)
        await eventually_async(engine.is_idle, within_s=10, what="freed tokens")


class TestReports:
    async def test_loads_say_what_admission_needs_as_integers(self, engine: Engine) -> None:
        load = await engine.load()
        for key in ("max_total_num_tokens", "num_used_tokens", "num_running_reqs", "num_waiting_reqs"):
            assert type(load[key]) is int, key
        assert load["max_total_num_tokens"] > 0
        assert isinstance(load["timestamp"], float)

    async def test_used_tokens_are_rounded_up_to_whole_pages(self, engine: Engine) -> None:
        page = (await engine.get("/server_info"))["page_size"]
        async with engine.open_stream(max_tokens=LONG_OUTPUT) as open_:
            await anext(open_)
            await anext(open_)
            # Of a pair, the decode half's report is of a moment before the tokens that its router has passed on.
            await eventually_async(lambda: _holds_tokens(engine), what="tokens that are in use")
            assert (await engine.load())["num_used_tokens"] % page == 0

    async def test_server_info_says_the_page_size_and_the_capacity(self, engine: Engine) -> None:
        info = await engine.get("/server_info")
        assert type(info["page_size"]) is int
        assert info["max_total_num_tokens"] == (await engine.load())["max_total_num_tokens"]
        assert info["context_length"] is None or type(info["context_length"]) is int
        assert isinstance(info["kv_cache_dtype"], str)

    async def test_health_and_readiness_are_cheap_and_good(self, engine: Engine) -> None:
        for path in ("/health", "/ready", "/metrics"):
            async with engine.session.get(engine.url + path) as response:
                assert response.status == 200, path


class TestMemory:
    async def test_what_was_given_up_is_taken_back_and_the_old_cache_is_not_met_again(self, engine: Engine) -> None:
        before = await engine.ask()
        await eventually_async(engine.is_idle, what="an idle engine")
        for order in ("/release_memory_occupation", "/resume_memory_occupation"):
            status, _ = await engine.post(order, {})
            assert status == 200, order
        after = await engine.ask()
        assert said(after) == said(before)
        assert not (after["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
        async with engine.session.get(engine.url + "/ready") as response:
            assert response.status == 200


def said(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def streamed(chunk: dict[str, Any]) -> str:
    """The text that one chunk adds."""
    return "".join((c.get("delta", {}).get("content") or "") if "delta" in c else c["text"] for c in chunk["choices"])


def choices(payloads: list[bytes]) -> list[dict[str, Any]]:
    return [choice for payload in payloads if payload != b"[DONE]" for choice in orjson.loads(payload)["choices"]]


async def _holds_tokens(engine: Engine) -> bool:
    return bool((await engine.load())["num_used_tokens"] > 0)


async def _runs(engine: Engine, asking: "asyncio.Task[Any] | None" = None) -> bool:
    """asking: whose end counts, too. A report may be older than a short request."""
    if asking is not None and asking.done():
        return True
    running = (await engine.load())["num_running_reqs"]
    assert isinstance(running, int)
    return running > 0
