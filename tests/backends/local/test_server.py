"""The engine's process over HTTP: what a gateway, a client and a supervisor see of it."""

import asyncio
import contextlib
import io
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import pytest

from backends.local.tokenizer import Tokenizer
from tests.backends.local.conftest import PAGE_BYTES
from tests.doubles.waiting import PATIENCE_S, eventually_async
from tests.engines import LocalEngine, engine_command, free_port, start_local_engine

pytestmark = pytest.mark.engine

PROMPT = [1, 50, 60, 70, 200, 9, 300]
ENDLESS = 2000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        return await self.post_raw(path, orjson.dumps(body))

    async def post_raw(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + path, data=io.BytesIO(body)) as response:
            return response.status, orjson.loads(await response.read() or b"{}")

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            return orjson.loads(await response.read())

    async def load(self) -> dict[str, Any]:
        entry = (await self.get("/v1/loads"))["loads"][0]
        assert isinstance(entry, dict)
        return entry

    async def ask(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        status, answer = await self.post(path, **(generation(path) | fields))
        assert status == 200, answer
        return answer

    async def text(self, **fields: Any) -> str:
        content = (await self.ask(**fields))["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    async def events(self, path: str = CHAT, **fields: Any) -> list[bytes]:
        async with self.stream(path, **fields) as events:
            return [event async for event in events]

    @contextlib.asynccontextmanager
    async def stream(self, path: str = CHAT, **fields: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        body = orjson.dumps(generation(path) | {"stream": True} | fields)
        response = await self.session.post(self.url + path, data=body)
        try:
            assert response.status == 200
            yield self._events(response)
        finally:
            response.close()

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async for line in response.content:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").removesuffix(b"\n")
            else:
                assert line == b"\n"

    async def wait_for(self, *, within_s: float = PATIENCE_S, **wanted: int) -> float:
        """Seconds until `/v1/loads` says so."""
        began = time.monotonic()
        while True:
            load = await self.load()
            if all(load[name] == value for name, value in wanted.items()):
                return time.monotonic() - began
            assert time.monotonic() - began < within_s, {name: load[name] for name in wanted}
            await asyncio.sleep(0.005)


def generation(path: str) -> dict[str, Any]:
    prompt = {"input_ids": PROMPT} if path == CHAT else {"prompt": PROMPT}
    return prompt | {"temperature": 0.0}


@pytest.fixture(scope="module")
def process(tiny_checkpoint: Path) -> Iterator[LocalEngine]:
    with start_local_engine(
        tiny_checkpoint, served_model_name="tiny", kv_cache_bytes=8 << 20, max_running_requests=4
    ) as engine:
        yield engine


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


@pytest.fixture
async def client(process: LocalEngine, session: aiohttp.ClientSession) -> AsyncIterator[Client]:
    client = Client(process.url, session)
    yield client
    await client.wait_for(num_running_reqs=0, num_waiting_reqs=0, num_used_tokens=0)


class TestStreams:
    async def test_a_chat_stream_has_sglang_s_keys_in_sglang_s_order(self, client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        first, *contents, finish, usage, done = await client.events(max_tokens=3, rid="golden", stream_options=options)
        created = orjson.loads(first)["created"]
        head = f'{{"id":"golden","object":"chat.completion.chunk","created":{created},"model":"tiny","choices":'
        tail = '"logprobs":null,"finish_reason":null,"matched_stop":null}]'
        assert first.decode() == head + '[{"index":0,"delta":{"role":"assistant","content":""},' + tail + "}"
        assert contents
        for content in contents:
            text = orjson.dumps(orjson.loads(content)["choices"][0]["delta"]["content"]).decode()
            produced = orjson.loads(content)["usage"]["completion_tokens"]
            assert content.decode() == (
                f'{head}[{{"index":0,"delta":{{"content":{text}}},{tail},"usage":{{"prompt_tokens":7,'
                f'"total_tokens":{7 + produced},"completion_tokens":{produced},'
                '"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0}}'
            )
        assert finish.decode() == (
            head + '[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","matched_stop":null}]}'
        )
        assert usage.decode() == (
            head + '[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,'
            '"prompt_tokens_details":{"cached_tokens":0},"reasoning_tokens":0}}'
        )
        assert done == b"[DONE]"

    async def test_a_completion_stream_carries_text(self, client: Client) -> None:
        *chunks, done = await client.events(TEXT, max_tokens=5)
        assert done == b"[DONE]"
        parsed = [orjson.loads(chunk) for chunk in chunks]
        assert {chunk["object"] for chunk in parsed} == {"text_completion"}
        assert all(list(chunk) == ["id", "object", "created", "model", "choices"] for chunk in parsed)
        text = "".join(chunk["choices"][0]["text"] for chunk in parsed)
        assert text == (await client.ask(TEXT, max_tokens=5))["choices"][0]["text"]

    async def test_a_stream_s_logprobs_are_the_whole_answer_s(self, client: Client) -> None:
        fields: dict[str, Any] = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
        whole = (await client.ask(**fields))["choices"][0]["logprobs"]["content"]
        chunks = [orjson.loads(event) for event in (await client.events(**fields))[:-1]]
        streamed = [
            entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
        assert len(whole) == 6
        for entry in whole:
            assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy takes the most likely"
            assert entry["logprob"] <= 0

    async def test_stop_strings_never_show_in_a_stream(self, client: Client) -> None:
        text = await client.text(max_tokens=30)
        stop = text[6:9]
        events = [orjson.loads(event) for event in (await client.events(max_tokens=30, stop=stop))[:-1]]
        shown = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert shown == text[: text.find(stop)]
        assert events[-1]["choices"][0] | {"delta": 0, "index": 0} == {
            "index": 0, "delta": 0, "logprobs": None, "finish_reason": "stop", "matched_stop": stop,
        }  # fmt: skip


class TestAnswers:
    async def test_messages_and_their_token_ids_give_the_same_answer(
        self, client: Client, tiny_tokenizer: Tokenizer
    ) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "gate"}]}]
        ids = tiny_tokenizer.encode_chat([{"role": "user", "content": "the gate"}])
        status, rendered = await client.post(CHAT, messages=messages, max_tokens=8, temperature=0)
        assert status == 200
        _, given = await client.post(CHAT, input_ids=ids, max_tokens=8, temperature=0)
        assert rendered["choices"] == given["choices"]
        assert rendered["usage"]["prompt_tokens"] == len(ids)

    async def test_a_text_prompt_is_tokenised(self, client: Client, tiny_tokenizer: Tokenizer) -> None:
        status, answer = await client.post(TEXT, prompt="the pages", temperature=0)
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == len(tiny_tokenizer.encode("the pages"))
        assert answer["usage"]["completion_tokens"] == 16, "SGLang's default for plain completions"

    async def test_a_seed_gives_the_same_text_whoever_else_runs(self, client: Client) -> None:
        fields = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
        alone = await client.text(**fields)
        others = [client.text(temperature=1.0, max_tokens=30, top_p=0.9) for _ in range(5)]
        crowded, *_ = await asyncio.gather(client.text(**fields), *others)
        assert crowded == alone
        assert await client.text(**fields | {"seed": 8}) != alone

    async def test_a_too_large_output_limit_is_clipped_to_the_context(self, client: Client) -> None:
        usage = (await client.ask(max_tokens=10**9, ignore_eos=True))["usage"]
        assert usage["total_tokens"] == 2048

    async def test_null_means_absent(self, client: Client) -> None:
        fields = dict.fromkeys(("top_p", "top_k", "seed", "stop", "logit_bias", "n", "logprobs", "stream_options"))
        assert await client.text(max_tokens=5, **fields) == await client.text(max_tokens=5)

    async def test_unknown_fields_are_ignored(self, client: Client) -> None:
        assert (await client.ask(max_tokens=1, cache_salt="a", extra_key="b", priority=3, tools=[]))["id"]


class TestPrefixCache:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_prompt_is_found_again_under_its_own_salt_only(self, client: Client, *, stream: bool) -> None:
        async def cached(**salt: str) -> int:
            fields: dict[str, Any] = {"input_ids": list(range(3, 100)), "max_tokens": 3} | salt
            if stream:
                events = await client.events(**fields, stream_options={"include_usage": True})
                usage = orjson.loads(events[-2])["usage"]
            else:
                usage = (await client.ask(**fields))["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        name = f"{stream}"
        assert [await cached(cache_salt=name), await cached(cache_salt=name)] == [0, 96]
        assert await cached(cache_salt=name, extra_key="x") == 0
        assert await cached(extra_key=name) == 0
        assert await cached(cache_salt=name, extra_key="x") == 96
        load = await client.load()
        assert load["num_used_tokens"] == 0
        assert load["cache_hit_rate"] > 0
        assert (await client.post("/flush_cache"))[0] == 200
        assert await cached(cache_salt=name) == 0

    async def test_two_hundred_clients_that_leave_anywhere_leave_no_request_behind(self, client: Client) -> None:
        async def leave_after(events: int) -> None:
            async with client.stream(max_tokens=ENDLESS, input_ids=list(range(3, 70 + events))) as stream:
                for _ in range(events):
                    await anext(stream)

        for _ in range(10):
            await asyncio.gather(*(leave_after(at % 7) for at in range(20)))
        await client.wait_for(num_running_reqs=0, num_waiting_reqs=0, num_used_tokens=0)


class TestRefusals:
    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 2}, {"temperature": -0.1}, {"temperature": "warm"}, {"top_p": 0}, {"top_p": 1.01}, {"top_k": -2},
            {"min_p": 2}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"frequency_penalty": 3}, {"repetition_penalty": 0},
            {"logit_bias": {"384": 1}}, {"logit_bias": {"x": 1}}, {"stop": ["a"] * 33}, {"stop": 3},
            {"stop_token_ids": [-1]}, {"logprobs": True, "top_logprobs": 21}, {"input_ids": []}, {"input_ids": [384]},
            {"input_ids": [-1]}, {"input_ids": [1.5]}, {"input_ids": [1] * 2048}, {"input_ids": None},
            {"stream_options": 1}, {"rid": ""},
        ],
    )  # fmt: skip
    async def test_bad_fields_are_400_in_sglang_s_shape(self, client: Client, fields: dict[str, Any]) -> None:
        status, error = await client.post(CHAT, **(generation(CHAT) | fields))
        assert status == 400
        assert list(error) == ["object", "message", "type", "param", "code"]
        assert (error["object"], error["type"], error["code"]) == ("error", "BadRequestError", 400)
        assert error["message"]

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"null", b'{"input_ids":[1],"temperature":NaN}', b'{"input_ids":[1],"temperature":1e400}',
         b"[" * 100_000, b'{"messages":[{"content":"x"}]}', b'{"messages":[]}', b"\xff\xfe",
         b'{"messages":[{"role":"user","content":[{"type":"image"}]}]}'],
    )  # fmt: skip
    async def test_bad_bodies_are_400(self, client: Client, body: bytes) -> None:
        status, error = await client.post_raw(CHAT, body)
        assert (status, error["code"]) == (400, 400)

    async def test_a_body_beyond_all_bounds_is_413(self, client: Client) -> None:
        status, error = await client.post_raw(CHAT, b'{"x":"' + b"x" * (17 << 20) + b'"}')
        assert (status, error["code"]) == (413, 413)

    async def test_a_live_rid_can_t_be_used_twice_and_an_ended_one_can(self, client: Client) -> None:
        async with client.stream(rid="twice", max_tokens=ENDLESS) as events:
            await anext(events)
            status, error = await client.post(CHAT, **generation(CHAT), rid="twice")
            assert (status, "twice" in error["message"]) == (400, True)
        await client.wait_for(num_running_reqs=0)
        assert (await client.ask(rid="twice", max_tokens=1))["id"] == "twice"


class TestEnds:
    async def test_an_abort_by_prefix_ends_streams_and_whole_answers_with_their_usage(self, client: Client) -> None:
        whole = asyncio.create_task(client.ask(rid="abc-1", max_tokens=ENDLESS), name="whole")
        other = asyncio.create_task(client.ask(rid="xyz-1", max_tokens=300), name="other")
        async with client.stream(rid="abc-2", max_tokens=ENDLESS, stream_options={"include_usage": True}) as events:
            await anext(events)
            await client.wait_for(num_running_reqs=3)
            status, _ = await client.post("/abort_request", rid="abc")
            assert status == 200
            *_, finish, usage, done = [event async for event in events]
        assert done == b"[DONE]"
        assert orjson.loads(finish)["choices"][0]["finish_reason"] == "abort"
        assert orjson.loads(usage)["usage"]["prompt_tokens"] == len(PROMPT)
        answer = await whole
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer["usage"]["completion_tokens"] < ENDLESS
        assert (await other)["choices"][0]["finish_reason"] == "length"

    async def test_abort_all_ends_the_waiting_ones_too(self, client: Client) -> None:
        asked = [asyncio.create_task(client.ask(max_tokens=ENDLESS), name=f"ask-{at}") for at in range(7)]
        await client.wait_for(num_running_reqs=4, num_waiting_reqs=3)
        await client.post("/abort_request", abort_all=True)
        answers = await asyncio.gather(*asked)
        assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"abort"}
        assert [answer["usage"]["completion_tokens"] for answer in answers].count(0) == 3

    @pytest.mark.parametrize("stream", [True, False])
    async def test_a_client_that_leaves_frees_its_pages(self, client: Client, *, stream: bool) -> None:
        body = generation(CHAT) | {"max_tokens": ENDLESS, "stream": stream}
        asking = asyncio.create_task(client.session.post(client.url + CHAT, json=body), name="leaving")
        await client.wait_for(num_running_reqs=1)
        if stream:
            (await asking).close()
        asking.cancel()
        assert await client.wait_for(num_running_reqs=0, num_used_tokens=0) < 1.5

    async def test_a_client_that_leaves_takes_nobody_along(self, client: Client) -> None:
        """A departure ends one id, unlike an abort, which ends all that begin with it."""
        longer = asyncio.create_task(client.ask(rid="leave-2", max_tokens=400), name="longer")
        async with client.stream(rid="leave", max_tokens=ENDLESS) as events:
            await anext(events)
        assert (await longer)["choices"][0]["finish_reason"] == "length"

    async def test_an_abort_of_nothing_is_fine_and_an_empty_one_is_refused(self, client: Client) -> None:
        assert (await client.post("/abort_request", rid="nobody"))[0] == 200
        assert (await client.post("/abort_request"))[0] == 400


class TestReports:
    async def test_loads_add_up_while_requests_run_and_wait(self, client: Client) -> None:
        asked = [asyncio.create_task(client.ask(max_tokens=ENDLESS), name=f"ask-{at}") for at in range(6)]
        await client.wait_for(num_running_reqs=4, num_waiting_reqs=2)
        load = await client.load()
        assert 0 < load["num_used_tokens"] <= load["max_total_num_tokens"]
        assert load["num_used_tokens"] % 16 == 0
        assert load["num_waiting_uncached_tokens"] == 2 * len(PROMPT)
        assert load["token_usage"] == pytest.approx(load["num_used_tokens"] / load["max_total_num_tokens"], abs=1e-4)
        now = time.time()

        async def is_renewed() -> bool:
            return bool((await client.load())["timestamp"] > now)

        await eventually_async(is_renewed, what="a report of after now, by the same clock")
        await client.post("/abort_request", abort_all=True)
        await asyncio.gather(*asked)

    async def test_loads_have_the_keys_that_sglang_s_have(self, client: Client) -> None:
        wanted = {
            "timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens",
            "num_used_tokens", "num_total_tokens", "max_total_num_tokens", "max_running_requests", "token_usage",
            "gen_throughput", "memory", "disaggregation", "queues",
        }  # fmt: skip
        assert wanted <= set(await client.load())

    async def test_metrics_have_sglang_s_names_and_add_up(self, client: Client) -> None:
        await client.ask(max_tokens=4)
        async with client.session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
        pool = sum(values[f"sglang:kv_{kind}_tokens"] for kind in ("available", "evictable", "used"))
        assert pool == values["sglang:max_total_num_tokens"] == 8192
        assert values["sglang:page_size"] == 16
        assert values["sglang:generation_tokens_total"] >= 4
        assert values["sglang:prompt_tokens_total"] >= len(PROMPT)
        assert values["sglang:time_to_first_token_seconds_count"] >= 1
        assert values["sglang:inter_token_latency_seconds_count"] >= 3
        assert not any("_created" in name for name in values)
        assert values["pagegate:page_tags_active"] == 1
        assert values["pagegate:page_tags_pairs_checked_total"] > 0
        assert values["pagegate:page_tags_requests_aborted_total"] == 0

    async def test_server_info_names_arguments_and_epoch(self, client: Client, process: LocalEngine) -> None:
        info = await client.get("/server_info")
        assert info["page_size"] == 16
        assert info["kv_cache_dtype"] == "float64"
        assert info["context_length"] == 2048
        assert info["max_total_num_tokens"] == 8192
        assert len(info["epoch"]) == 16
        assert info == await client.get("/server_info")

    async def test_health_generates_and_models_are_listed(self, client: Client) -> None:
        async with client.session.get(client.url + "/health_generate") as response:
            assert response.status == 200
        assert (await client.get("/v1/models"))["data"][0]["id"] == "tiny"
        assert (await client.get("/model_info"))["is_generation"] is True

    async def test_logs_are_json_and_never_carry_text(self, client: Client, process: LocalEngine) -> None:
        secret = "the scarce 北京"
        await client.post(
            CHAT, messages=[{"role": "user", "content": secret}], max_tokens=2, rid="logged", ignore_eos=True
        )
        await client.post(CHAT, messages=[{"role": secret, "content": 3}])
        text = process.log.read_text()
        lines = [orjson.loads(line) for line in text.splitlines()]
        ended = [line for line in lines if line.get("rid") == "logged"]
        assert [(line["event"], line["reason"], line["completion_tokens"]) for line in ended] == [
            ("request_ended", "length", 2)
        ]
        assert secret not in text
        assert "北" not in text


async def test_a_full_queue_is_503(tiny_checkpoint: Path, session: aiohttp.ClientSession) -> None:
    with start_local_engine(tiny_checkpoint, max_running_requests=1, max_queued_requests=1) as engine:
        client = Client(engine.url, session)
        running = asyncio.create_task(client.ask(max_tokens=ENDLESS), name="running")
        await client.wait_for(num_running_reqs=1)
        waiting = asyncio.create_task(client.ask(max_tokens=ENDLESS), name="waiting")
        await client.wait_for(num_running_reqs=1, num_waiting_reqs=1)
        status, error = await client.post(CHAT, **generation(CHAT))
        assert (status, error["code"], error["message"]) == (503, 503, "The request queue is full.")
        await client.post("/abort_request", abort_all=True)
        await asyncio.gather(running, waiting)
        assert (await client.ask(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_a_prompt_beyond_the_pool_is_refused_and_the_output_is_clipped_to_it(
    tiny_checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    with start_local_engine(tiny_checkpoint, kv_cache_bytes=8 * PAGE_BYTES) as engine:
        client = Client(engine.url, session)
        status, error = await client.post(CHAT, input_ids=[5] * 128)
        assert status == 400
        assert "KV cache (128 tokens)" in error["message"]
        assert (await client.ask(ignore_eos=True))["usage"]["total_tokens"] == 128


async def test_the_report_says_how_much_more_an_fp8_cache_holds(
    tiny_checkpoint: Path, session: aiohttp.ClientSession
) -> None:
    pool = 64 * PAGE_BYTES
    with start_local_engine(tiny_checkpoint, kv_cache_bytes=pool, kv_cache_dtype="fp8_e4m3") as engine:
        client = Client(engine.url, session)
        assert (await client.get("/server_info"))["kv_cache_dtype"] == "fp8_e4m3"
        load = await client.load()
        assert load["max_total_num_tokens"] == load["memory"]["token_capacity"] == 64 * 16 * 8 * 16 // 17 // 16 * 16
        assert (await client.ask(max_tokens=4, ignore_eos=True))["usage"]["completion_tokens"] == 4


async def test_every_start_has_an_epoch_of_its_own(tiny_checkpoint: Path, session: aiohttp.ClientSession) -> None:
    with start_local_engine(tiny_checkpoint) as engine:
        epoch = (await Client(engine.url, session).get("/server_info"))["epoch"]
    with start_local_engine(tiny_checkpoint) as engine:
        assert (await Client(engine.url, session).get("/server_info"))["epoch"] != epoch


def test_it_ends_with_its_parent_even_while_it_works(tiny_checkpoint: Path) -> None:
    with start_local_engine(tiny_checkpoint) as engine:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.process.wait(5) == 0


def test_a_killed_parent_leaves_no_orphan(tiny_checkpoint: Path) -> None:
    command = engine_command(tiny_checkpoint, port=free_port())
    program = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=-1); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, alive = psutil.wait_procs([engine], timeout=60)
    assert gone
    assert not alive


@pytest.mark.parametrize(
    ("folder", "kv_cache_bytes", "message"),
    [(None, 100, "less than one page"), (Path("/nowhere"), 1 << 20, "can't be read")],
)
def test_an_engine_that_can_t_start_says_one_sentence(
    tiny_checkpoint: Path, folder: Path | None, kv_cache_bytes: int, message: str
) -> None:
    command = engine_command(
        folder or tiny_checkpoint, port=free_port(), kv_cache_bytes=kv_cache_bytes, exit_with_parent=False
    )
    ended = subprocess.run(command, input=b"", capture_output=True, timeout=90, check=False)
    assert ended.returncode == 1
    (line,) = [orjson.loads(line) for line in ended.stderr.splitlines() if b"cannot_start" in line]
    assert message in line["reason"]
    assert b"Traceback" not in ended.stderr
