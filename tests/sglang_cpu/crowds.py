"""What page tags must leave alone and what they must stop, asked of any real SGLang by the tests of each page size.

Requests go to the engine itself (a pair's to both halves), by the contract's own client.
"""

import asyncio
import random
import secrets

import aiohttp
import orjson

from backends.page_tags import ABORT_MESSAGE
from backends.sglang.probe import read_reports
from tests.backends import test_engine_contract as contract
from tests.sglang_cpu.server import FAULTY_RID

CHAT = contract.PATHS[0]
AT_ONCE = 24
# Minutes of which nothing is heard are a fault, however busy the machine is.
CROWD_S_MAX = 180.0


def own_connections() -> aiohttp.ClientSession:
    """A connection a request: SGLang closes one that was idle for five seconds, perhaps just as it is used again."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def is_left_alone(engine: contract.Engine, *, requests: int) -> None:
    """Shared, cut and extended prompts; streams that are left; a pool that must evict. The tags stop nobody."""
    drawn = random.Random(7)
    stems = [[drawn.randrange(3, 362) for _ in range(length)] for length in (17, 64, 130, 400, 700)]
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        stem = drawn.choice(stems)
        cut = drawn.choice([len(stem), drawn.randrange(1, len(stem))])
        prompt = stem[:cut] + [drawn.randrange(3, 362) for _ in range(drawn.choice([0, 1, 3, 20]))]
        tokens, leaves = drawn.choice([1, 1, 2, 3, 17]), drawn.random() < 0.1
        async with at_once:
            if leaves:
                async with engine.open_stream(CHAT, input_ids=prompt, max_tokens=tokens, rid=contract.rid()) as open_:
                    await anext(open_)
                return
            answer = await engine.ask(CHAT, input_ids=prompt, max_tokens=tokens, rid=contract.rid())
            assert answer["choices"][0]["finish_reason"] == "length"

    async with asyncio.timeout(CROWD_S_MAX), asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(one(), name=f"request {number}")


async def tags_say(url: str) -> dict[str, int]:
    """The plugin's own counts, of one server."""
    said = (await read_reports(url, within_s=60)).server_info["internal_states"][0]["page_tags"]
    assert said["active"] is True
    assert isinstance(said, dict)
    return said


async def a_lost_page_stops_its_request_alone(engine: contract.Engine) -> None:
    """A page is freed under two requests, one whole and one streamed; others with like prompts run beside them."""
    prompts = [[*range(5, 60), 60 + number] for number in range(5)]

    async def text(prompt: list[int]) -> str:
        return contract.said(await engine.ask(CHAT, input_ids=prompt, max_tokens=24))

    async def victim(prompt: list[int], *, stream: bool) -> tuple[int, bytes]:
        rid = FAULTY_RID + secrets.token_hex(15)
        body = contract.call(CHAT, input_ids=prompt, max_tokens=24, rid=rid, stream=stream)
        async with engine.session.post(engine.url + CHAT, json=body) as response:
            return response.status, await response.read()

    before = await tags_say(engine.url)
    clean = [await text(prompt) for prompt in prompts]
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(text(prompt), name="other") for prompt in prompts]
        stopped = group.create_task(victim(prompts[0], stream=False), name="victim")
        cut_off = group.create_task(victim(prompts[1], stream=True), name="streamed victim")
    assert [other.result() for other in others] == clean
    status, said = stopped.result()
    assert (status, ABORT_MESSAGE.encode() in said) == (500, True)
    seen = _delivered(cut_off.result()[1])
    assert clean[1].startswith(seen)
    assert len(seen) < len(clean[1])
    assert ABORT_MESSAGE.encode() in cut_off.result()[1]
    assert b'"finish_reason":"' not in cut_off.result()[1]
    after = await tags_say(engine.url)
    for count in ("requests_aborted", "pages_quarantined"):
        assert after[count] == before[count] + 2
    # The server goes on, its pool two pages smaller.
    assert await text(prompts[0]) == clean[0]


def _delivered(stream: bytes) -> str:
    """The text that a client of this stream has seen."""
    events = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in orjson.loads(event).get("choices", ())
    )
