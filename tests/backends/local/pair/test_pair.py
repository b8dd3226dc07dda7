"""A prefill and a decode process on loopback and on a Unix socket: one answer, and one end for both."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from backends.local.pair.frames import SILENCE_S_MAX
from tests.engines import LocalEngine, free_port, start_local_engine

pytestmark = pytest.mark.engine
CHAT = "/v1/chat/completions"
PROMPT = [(7 * at) % 380 + 3 for at in range(75)]
ENDLESS = 1500
LOST = "Lost connection with prefill instance"


@dataclass
class Pair:
    prefill: LocalEngine
    decode: LocalEngine
    bootstrap: dict[str, Any]
    session: aiohttp.ClientSession
    rooms = itertools.count(1)

    def body(self, **fields: Any) -> dict[str, Any]:
        number = next(self.rooms)
        room = {"bootstrap_room": number, "rid": f"request-{number:06}"} | self.bootstrap
        return {"input_ids": PROMPT, "temperature": 0.0, "max_tokens": 12} | room | fields

    async def post(self, engine: LocalEngine, path: str = CHAT, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(engine.url + path, data=orjson.dumps(body)) as response:
            return response.status, orjson.loads(await response.read() or b"{}")

    def start(self, engine: LocalEngine, body: dict[str, Any]) -> "asyncio.Task[tuple[int, dict[str, Any]]]":
        return asyncio.create_task(self.post(engine, **body), name="half")

    async def both(self, **fields: Any) -> tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]:
        """Prefill's answer and decode's to the same body."""
        body = self.body(**fields)
        return await asyncio.gather(self.post(self.prefill, **body), self.post(self.decode, **body))

    async def load(self, engine: LocalEngine) -> dict[str, Any]:
        async with self.session.get(engine.url + "/v1/loads") as response:
            entry = orjson.loads(await response.read())["loads"][0]
            assert isinstance(entry, dict)
            return entry

    async def wait_for(self, engine: LocalEngine, **wanted: int) -> None:
        deadline = time.monotonic() + 40
        while True:
            load = await self.load(engine)
            load |= load["disaggregation"]
            if all(load[name] == value for name, value in wanted.items()):
                return
            assert time.monotonic() < deadline, {name: load[name] for name in wanted}
            await asyncio.sleep(0.005)

    async def comes_to_rest(self) -> None:
        for engine in (self.prefill, self.decode):
            await self.wait_for(
                engine, num_running_reqs=0, num_waiting_reqs=0, num_used_tokens=0, prefill_bootstrap_queue_reqs=0,
                prefill_inflight_queue_reqs=0, decode_prealloc_queue_reqs=0, decode_transfer_queue_reqs=0,
            )  # fmt: skip


@contextlib.contextmanager
def running_prefill(checkpoint: Path, host: str = "127.0.0.1") -> Iterator[tuple[LocalEngine, dict[str, Any]]]:
    """And where a request is to meet it."""
    port = free_port()
    with start_local_engine(
        checkpoint, role="prefill", disaggregation_bootstrap_port=port, disaggregation_bootstrap_host=host,
        kv_cache_bytes=8 << 20,
    ) as prefill:  # fmt: skip
        yield prefill, {"bootstrap_host": host, "bootstrap_port": port}


@contextlib.contextmanager
def running_decode(checkpoint: Path, **given: Any) -> Iterator[LocalEngine]:
    flags: dict[str, Any] = {"role": "decode", "kv_cache_bytes": 8 << 20} | given
    with start_local_engine(checkpoint, **flags) as decode:
        yield decode


@pytest.fixture(scope="module")
def processes(tiny_checkpoint: Path) -> Iterator[tuple[LocalEngine, LocalEngine, dict[str, Any]]]:
    with running_prefill(tiny_checkpoint) as (prefill, bootstrap), running_decode(tiny_checkpoint) as decode:
        yield prefill, decode, bootstrap


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
async def pair(
    processes: tuple[LocalEngine, LocalEngine, dict[str, Any]], session: aiohttp.ClientSession
) -> AsyncIterator[Pair]:
    running = Pair(*processes, session)
    yield running
    await running.comes_to_rest()


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Path) -> Iterator[LocalEngine]:
    """One process that does both."""
    with start_local_engine(tiny_checkpoint, kv_cache_bytes=8 << 20) as engine:
        yield engine


async def test_decode_says_what_one_process_says_and_prefill_says_one_token_of_it(
    pair: Pair, whole: LocalEngine
) -> None:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 5, "top_p": 0.9}
    for given in ({}, drawn, drawn | {"presence_penalty": 1.0}):
        (prefilled, one), (decoded, answer) = await pair.both(**given, max_tokens=30)
        _, alone = await pair.post(whole, input_ids=PROMPT, max_tokens=30, **({"temperature": 0.0} | given))
        assert (prefilled, decoded) == (200, 200)
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["completion_tokens"] == 30
        assert one["usage"]["completion_tokens"] == 1
        assert one["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["message"]["content"].startswith(one["choices"][0]["message"]["content"])


async def test_log_probabilities_of_the_first_token_come_along(pair: Pair, whole: LocalEngine) -> None:
    _, (_, answer) = await pair.both(logprobs=True, top_logprobs=3)
    _, alone = await pair.post(whole, input_ids=PROMPT, temperature=0.0, max_tokens=12, logprobs=True, top_logprobs=3)
    assert answer["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]


async def test_a_stream_carries_every_token_once_and_prefill_s_cached_tokens(pair: Pair) -> None:
    prompt = PROMPT[:65]
    for cached in (0, 64):
        body = pair.body(input_ids=prompt, cache_salt="s", stream=True, stream_options={"include_usage": True})
        prefilling = pair.start(pair.prefill, body | {"stream": False})
        async with pair.session.post(pair.decode.url + CHAT, data=orjson.dumps(body)) as response:
            events = [line[6:] async for line in response.content if line.startswith(b"data: ")]
        chunks = [orjson.loads(event) for event in events[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] == 12
        assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert (await prefilling)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_a_stop_at_the_first_token_ends_it_there(pair: Pair) -> None:
    _, (_, free) = await pair.both(max_tokens=1, logprobs=True)
    first = free["choices"][0]["message"]["content"]
    assert first
    _, (status, stopped) = await pair.both(stop=first[0])
    assert status == 200
    assert (stopped["choices"][0]["message"]["content"], stopped["choices"][0]["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == 1


async def test_thirty_at_once_in_any_order_all_find_their_halves(pair: Pair, whole: LocalEngine) -> None:
    async def one(at: int) -> None:
        body = pair.body(input_ids=PROMPT[at:], max_tokens=10)
        first, second = (pair.prefill, pair.decode) if at % 2 else (pair.decode, pair.prefill)
        earlier = pair.start(first, body)
        await asyncio.sleep(0.01 * (at % 3))
        later = pair.start(second, body)
        decoded = later if second is pair.decode else earlier
        await earlier, await later
        _, alone = await pair.post(whole, input_ids=PROMPT[at:], max_tokens=10, temperature=0.0)
        assert (await decoded)[1]["choices"] == alone["choices"]

    await asyncio.gather(*(one(at) for at in range(30)))


async def test_without_a_room_or_an_address_a_half_answers_400(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        status, error = await pair.post(engine, input_ids=PROMPT, max_tokens=1)
        assert (status, "bootstrap room" in error["message"]) == (400, True)
    status, error = await pair.post(pair.decode, input_ids=PROMPT, bootstrap_room=1)
    assert (status, "bootstrap_host" in error["message"]) == (400, True)


async def test_a_second_request_in_a_live_room_is_400(pair: Pair) -> None:
    body = pair.body()
    waiting = pair.start(pair.prefill, body)
    await pair.wait_for(pair.prefill, prefill_bootstrap_queue_reqs=1)
    status, error = await pair.post(pair.prefill, **body | {"rid": "another"})
    assert (status, "bootstrap_room" in error["message"]) == (400, True)
    assert (await pair.post(pair.decode, **body))[0] == 200
    assert (await waiting)[0] == 200


async def test_a_waiting_half_shows_in_the_loads_and_ends_by_an_abort_of_its_rid_s_beginning(pair: Pair) -> None:
    prefilling = pair.start(pair.prefill, pair.body(rid="abort-me-1"))
    decoding = pair.start(pair.decode, pair.body(rid="abort-me-2"))
    await pair.wait_for(pair.prefill, prefill_bootstrap_queue_reqs=1, num_waiting_reqs=1, num_used_tokens=0)
    await pair.wait_for(pair.decode, decode_transfer_queue_reqs=1, num_waiting_reqs=1, num_used_tokens=80)
    assert (await pair.load(pair.prefill))["disaggregation"]["mode"] == "prefill"
    assert (await pair.load(pair.decode))["disaggregation"]["mode"] == "decode"
    for engine in (pair.prefill, pair.decode):
        assert (await pair.post(engine, "/abort_request", rid="abort-me"))[0] == 200
    for half in (prefilling, decoding):
        status, answer = await half
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")


async def test_an_abort_at_decode_ends_prefill_s_half_too(pair: Pair) -> None:
    body = pair.body(input_ids=PROMPT * 20, rid="long-prompt")
    prefilling = pair.start(pair.prefill, body)
    decoding = pair.start(pair.decode, body)
    await pair.wait_for(pair.decode, decode_transfer_queue_reqs=1)
    await pair.post(pair.decode, "/abort_request", rid="long-prompt")
    assert (await decoding)[1]["choices"][0]["finish_reason"] == "abort"
    status, answer = await prefilling
    # It may have been done before it heard of it.
    assert status == 200 or "Decode instance could be dead" in answer["message"]


async def test_prompts_that_differ_between_the_halves_are_never_mixed(pair: Pair) -> None:
    body = pair.body()
    prefilling = pair.start(pair.prefill, body | {"input_ids": PROMPT[::-1]})
    status, error = await pair.post(pair.decode, **body)
    assert (status, error["message"]) == (500, LOST)
    await pair.post(pair.prefill, "/abort_request", rid=body["rid"])
    assert (await prefilling)[1]["choices"][0]["finish_reason"] == "abort"


async def test_nobody_at_the_address_is_a_lost_prefill(pair: Pair) -> None:
    status, error = await pair.post(pair.decode, **pair.body(bootstrap_port=free_port()))
    assert (status, error["message"], error["type"]) == (500, LOST, "InternalServerError")


async def test_a_client_that_leaves_decode_leaves_nothing_behind(pair: Pair) -> None:
    for _ in range(5):
        body = pair.body(max_tokens=ENDLESS, input_ids=PROMPT[:20])
        halves = [pair.start(pair.prefill, body), pair.start(pair.decode, body)]
        await pair.wait_for(pair.decode, num_running_reqs=1)
        halves[1].cancel()
        await asyncio.gather(*halves, return_exceptions=True)
        await pair.comes_to_rest()


# A half that is like no other, or that dies, is one of its own; the other is everybody's, and has to come to rest too.
async def test_more_than_fits_waits_for_pages_at_decode_and_all_are_served(
    tiny_checkpoint: Path, pair: Pair, whole: LocalEngine
) -> None:
    with running_decode(tiny_checkpoint, kv_cache_bytes=16 * 16 * 1024, max_running_requests=8) as small:
        pair = replace(pair, decode=small)
        answers = await asyncio.gather(*(pair.both(max_tokens=60, input_ids=PROMPT[at:]) for at in range(12)))
        for at, (_, (status, answer)) in enumerate(answers):
            _, alone = await pair.post(whole, input_ids=PROMPT[at:], max_tokens=60, temperature=0.0)
            assert (status, answer["choices"]) == (200, alone["choices"])
        await pair.comes_to_rest()


async def test_pages_travel_over_a_unix_socket(
    tiny_checkpoint: Path, tmp_path: Path, pair: Pair, whole: LocalEngine
) -> None:
    with running_prefill(tiny_checkpoint, f"unix:{tmp_path / 'pages'}") as (prefill, bootstrap):
        pair = replace(pair, prefill=prefill, bootstrap=bootstrap)
        _, (status, answer) = await pair.both()
        _, alone = await pair.post(whole, input_ids=PROMPT, temperature=0.0, max_tokens=12)
        assert (status, answer["choices"]) == (200, alone["choices"])


async def test_caches_of_other_types_are_never_mixed(tiny_checkpoint: Path, pair: Pair) -> None:
    with running_decode(tiny_checkpoint, kv_cache_dtype="fp8_e4m3") as other:
        pair = replace(pair, decode=other)
        body = pair.body()
        prefilling = pair.start(pair.prefill, body)
        status, error = await pair.post(pair.decode, **body)
        assert (status, error["message"]) == (500, LOST)
        assert "the caches differ" in pair.decode.log.read_text()
        await pair.post(pair.prefill, "/abort_request", rid=body["rid"])
        await prefilling


async def test_a_prefill_that_dies_or_stops_fails_what_waits_for_it_and_leaves_what_has_its_pages(
    tiny_checkpoint: Path, pair: Pair
) -> None:
    with running_prefill(tiny_checkpoint) as (prefill, bootstrap):
        pair = replace(pair, prefill=prefill, bootstrap=bootstrap)
        having = pair.body(max_tokens=600, input_ids=PROMPT[:20])
        going_on = pair.start(pair.decode, having)
        assert (await pair.post(pair.prefill, **having))[0] == 200
        waiting = pair.start(pair.decode, pair.body())
        await pair.wait_for(pair.decode, decode_transfer_queue_reqs=1)
        os.kill(pair.prefill.process.pid, signal.SIGKILL)
        status, error = await waiting
        assert (status, error["message"]) == (500, LOST)
        status, answer = await going_on
        assert (status, answer["usage"]["completion_tokens"]) == (200, 600)
        await pair.wait_for(pair.decode, num_running_reqs=0, num_used_tokens=0, num_waiting_reqs=0)


async def test_a_decode_that_dies_frees_prefill(tiny_checkpoint: Path, pair: Pair) -> None:
    with running_decode(tiny_checkpoint) as decode:
        pair = replace(pair, decode=decode)
        body = pair.body(input_ids=PROMPT * 20)
        halves = [pair.start(pair.decode, body), pair.start(pair.prefill, body)]
        await pair.wait_for(pair.decode, decode_transfer_queue_reqs=1)
        os.kill(pair.decode.process.pid, signal.SIGKILL)
        # If decode had not come to the room yet, prefill goes on waiting for it until it is told or its time is over.
        await pair.post(pair.prefill, "/abort_request", rid=body["rid"])
        _, prefilled = await asyncio.gather(*halves, return_exceptions=True)
        assert not isinstance(prefilled, BaseException)
        assert prefilled[0] in {200, 500}
        await pair.wait_for(pair.prefill, num_running_reqs=0, num_used_tokens=0, prefill_inflight_queue_reqs=0)


async def test_a_prefill_that_hangs_is_given_up_and_serves_again_when_it_goes_on(pair: Pair) -> None:
    os.kill(pair.prefill.process.pid, signal.SIGSTOP)
    try:
        body = pair.body()
        prefilling = pair.start(pair.prefill, body)
        async with asyncio.timeout(SILENCE_S_MAX + 30):
            status, error = await pair.post(pair.decode, **body)
        assert (status, error["message"]) == (500, LOST)
    finally:
        os.kill(pair.prefill.process.pid, signal.SIGCONT)
    await pair.post(pair.prefill, "/abort_request", rid=body["rid"])
    assert (await prefilling)[0] in {200, 500}
    _, (status, _) = await pair.both()
    assert status == 200
