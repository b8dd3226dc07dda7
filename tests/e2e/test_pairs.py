"""Prefill/decode pairs behind the gateway: one answer, one end, nothing left at either half, whoever fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import ScriptedPair, model, scripted_pair
from tests.e2e.dialects import CHAT, COMPLETIONS, RUN, Dialect, dialect_name
from tests.e2e.ledger import expected_cost_nano
from tests.e2e.service import Answer, Service, deployed_service

DIALECTS = [CHAT, COMPLETIONS, RUN]


@pytest.fixture
async def pair() -> AsyncIterator[ScriptedPair]:
    async with scripted_pair() as pair:
        yield pair


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, pair: ScriptedPair) -> AsyncIterator[Service]:
    async with pair_service(tmp_path, checkpoint, pair) as service:
        yield service


@contextlib.asynccontextmanager
async def pair_service(
    tmp_path: Path, checkpoint: Path, *pairs: ScriptedPair, **settings: Any
) -> AsyncIterator[Service]:
    deployed = model(checkpoint, pairs=pairs)
    async with deployed_service(tmp_path, checkpoint, pairs[0].decode, deployed, **settings) as service:
        yield service


async def ask(service: Service, dialect: Dialect, **fields: Any) -> Answer:
    return await service.post(dialect.path(service), dialect.body(service, **fields))


async def clean(service: Service, pair: ScriptedPair, *, rows: int) -> dict[str, Any]:
    """Nothing is held or running anywhere; the newest record."""
    await eventually(lambda: not pair.prefill.live and not pair.decode.live, what="two idle halves")
    await service.oracle(rows=rows)
    return (await service.records())[0]


async def wasted(service: Service) -> float:
    text = (await service.send("GET", "/metrics")).body.decode()
    found = [line for line in text.splitlines() if line.startswith("pagegate_wasted_prefill_tokens_total{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@pytest.mark.parametrize("fields", [{"max_tokens": 8}, {"max_tokens": 8, "stream": True}], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
class TestAnAnswer:
    async def test_decode_answers_and_both_halves_had_the_same_body_in_a_room_of_ours(
        self, service: Service, pair: ScriptedPair, dialect: Dialect, fields: dict[str, Any]
    ) -> None:
        answer = await ask(service, dialect, **fields)
        assert answer.status == 200, answer.body
        assert b"w7 " in answer.body
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["completion_tokens"]) == ("finished", 8)
        ((prefilled,), (decoded,)) = pair.prefill.requests, pair.decode.requests
        assert prefilled.body == decoded.body
        assert (decoded.body["bootstrap_host"], decoded.body["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert 0 <= decoded.body["bootstrap_room"] < 1 << 63
        assert await wasted(service) == 0

    async def test_what_prefill_found_in_its_cache_is_told_and_billed_as_cached(
        self, service: Service, pair: ScriptedPair, dialect: Dialect, fields: dict[str, Any]
    ) -> None:
        pair.prefill.steer(usage={"cached_tokens": 3})
        await ask(service, dialect, **fields)
        row = await clean(service, pair, rows=1)
        assert row["cached_tokens"] == 3
        assert row["cost_nano"] == expected_cost_nano(service, row)

    async def test_a_prefill_that_fails_ends_both_and_nobody_pays(
        self, service: Service, pair: ScriptedPair, dialect: Dialect, fields: dict[str, Any]
    ) -> None:
        pair.prefill.steer(ttft_s=0.05, error_after=0)
        answer = await ask(service, dialect, **fields)
        assert answer.status >= 500
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["cost_nano"], row["completion_tokens"]) == ("upstream_failed", 0, 0)

    async def test_a_decode_that_dies_before_its_first_token_wastes_a_prefill_and_ends_both(
        self, service: Service, pair: ScriptedPair, dialect: Dialect, fields: dict[str, Any]
    ) -> None:
        pair.decode.steer(ttft_s=0.1, error_after=0)
        answer = await ask(service, dialect, **fields)
        assert answer.status >= 500 or b"You are not charged" in answer.body
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)
        assert await wasted(service) == len(
            pair.decode.requests[0].body.get("input_ids") or pair.decode.requests[0].body["prompt"]
        )


class TestFailures:
    async def test_a_decode_that_dies_in_mid_stream_ends_the_stream_with_an_error_and_is_not_started_anew(
        self, service: Service, pair: ScriptedPair
    ) -> None:
        pair.decode.steer(die_after=20)
        answer = await ask(service, CHAT, stream=True, max_tokens=60)
        assert answer.status == 200
        assert b"w19 " in answer.body
        assert b"error" in answer.events()[-1] or b"error" in answer.events()[-2]
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)
        assert len(pair.decode.requests) == 1

    @pytest.mark.parametrize("fields", [{"stream": True}, {}], ids=["streamed", "whole"])
    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_a_half_that_hangs_before_the_first_token_is_given_up_after_the_bound(
        self, tmp_path: Path, checkpoint: Path, pair: ScriptedPair, half: str, fields: dict[str, Any]
    ) -> None:
        async with pair_service(tmp_path, checkpoint, pair, backends={"silence_s_max": 0.5}) as service:
            getattr(pair, half).steer(hang_after=0)
            answer = await ask(service, CHAT, max_tokens=8, **fields)
            assert answer.status >= 500 or b"error" in answer.body
            row = await clean(service, pair, rows=1)
            assert (row["outcome"], row["code"], row["cost_nano"]) == ("upstream_failed", "engine_timeout", 0)

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_a_half_that_refuses_the_request_as_wrong_says_so_for_both(
        self, service: Service, pair: ScriptedPair, half: str
    ) -> None:
        getattr(pair, half).steer(refuse=Refusal(400, b'{"message": "secret words of the engine"}'))
        answer = await ask(service, CHAT, max_tokens=8)
        assert answer.status == 400
        assert b"secret" not in answer.body
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["cost_nano"]) == ("refused", 0)

    async def test_a_client_that_leaves_stops_both_halves_while_prefill_computes(
        self, service: Service, pair: ScriptedPair
    ) -> None:
        pair.prefill.steer(ttft_s=20)
        asking = asyncio.create_task(ask(service, CHAT, stream=True, max_tokens=8))
        await eventually(lambda: bool(pair.prefill.live and pair.decode.live), what="a request at both halves")
        asking.cancel()
        row = await clean(service, pair, rows=1)
        assert (row["outcome"], row["completion_tokens"]) == ("client_disconnected", 0)
        assert set(pair.prefill.aborts) == set(pair.decode.aborts) == {row["id"]}

    async def test_a_client_that_leaves_in_mid_stream_pays_for_what_decode_produced(
        self, service: Service, pair: ScriptedPair
    ) -> None:
        pair.decode.steer(itl_ms=10)
        async with service.open_stream(CHAT.path(service), CHAT.body(service, stream=True, max_tokens=900)) as response:
            while b"w5 " not in await response.content.readline():
                pass
        row = await clean(service, pair, rows=1)
        assert row["outcome"] == "client_disconnected"
        assert 6 <= row["completion_tokens"] < 900
        assert row["cost_nano"] == expected_cost_nano(service, row)

    async def test_a_storm_of_clients_that_leave_strands_nobody_in_a_room(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with scripted_pair() as pair, pair_service(tmp_path, checkpoint, pair) as service:
            pair.prefill.steer(ttft_s=0.05)
            pair.decode.steer(itl_ms=5)

            async def leave(after_s: float) -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(after_s):
                        await ask(service, CHAT, stream=True, max_tokens=400)

            await asyncio.gather(*(leave(0.3 + number / 400) for number in range(100)))
            idle = lambda: not pair.prefill.live and not pair.decode.live  # noqa: E731 - read twice
            await eventually(idle, within_s=20, what="two idle halves")
            await eventually_async(service.is_clean, within_s=20, what="a clean service")
            rows = await service.records()  # some had not been placed yet when they left
            assert {row["outcome"] for row in rows} <= {"client_disconnected", "finished"}
            pair.prefill.steer()
            pair.decode.steer()
            assert (await ask(service, CHAT, max_tokens=4)).status == 200


class TestPlacement:
    async def test_the_models_page_says_each_halfs_precision(self, service: Service) -> None:
        card = orjson.loads((await service.send("GET", f"/v1/models/{service.model}")).body)
        assert card["precisions"] == {"prefill_weights": "fp8", "decode_weights": "int4", "kv_cache": "bf16"}

    async def test_a_pair_whose_halves_keep_pages_differently_is_not_used_and_it_is_said_why(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with scripted_pair() as good, scripted_pair(page_tokens=32) as bad:
            deployed = model(checkpoint, pairs=[bad, good])
            async with deployed_service(tmp_path, checkpoint, good.decode, deployed) as service:
                for _ in range(3):
                    assert (await ask(service, CHAT, max_tokens=4)).status == 200
                assert not bad.decode.requests
                assert not bad.prefill.requests

    async def test_a_prompt_waits_until_prefill_has_room_though_decode_has(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        """Prefill's pool holds one such prompt; two run at once only because its pages go back when they are sent."""
        async with scripted_pair() as pair, pair_service(tmp_path, checkpoint, pair) as service:
            pair.prefill.pool_tokens = 512
            pair.prefill.steer(ttft_s=0.2)
            pair.decode.steer(itl_ms=1)
            await eventually(lambda: _prefill_pages(service) == 32, what="a report of the smaller pool")
            long = [{"role": "user", "content": "the pages are the scarce thing " * 40}]
            asked = [asyncio.create_task(ask(service, CHAT, messages=long, max_tokens=400)) for _ in range(3)]
            answers = await asyncio.gather(*asked)
            assert [answer.status for answer in answers] == [200] * 3
            await clean(service, pair, rows=3)
            assert pair.prefill.peak_used_tokens <= 512
            assert pair.decode.peak_used_tokens > 512

    async def test_a_prompt_over_prefills_whole_pool_is_told_so_at_once(self, tmp_path: Path, checkpoint: Path) -> None:
        async with scripted_pair() as pair, pair_service(tmp_path, checkpoint, pair) as service:
            pair.prefill.pool_tokens = 64
            service.services.fleet.of(service.model).replicas[0].prefills[0].info = None
            await eventually(lambda: _prefill_pages(service) == 4, what="a report of the smaller pool")
            long = [{"role": "user", "content": "the pages are the scarce thing " * 40}]
            answer = await ask(service, CHAT, messages=long, max_tokens=4)
            assert answer.status == 400
            assert orjson.loads(answer.body)["error"]["code"] == "context_length_exceeded"
            await service.oracle(rows=0)

    async def test_a_prefill_that_can_not_be_reached_sends_the_request_to_another_pair_and_tells_its_decode(
        self, tmp_path: Path, checkpoint: Path
    ) -> None:
        async with scripted_pair() as broken, scripted_pair() as good:
            deployed = model(checkpoint, pairs=[broken, good])
            async with deployed_service(tmp_path, checkpoint, good.decode, deployed) as service:
                broken.prefill.steer(die_after=0)
                answers = await asyncio.gather(*(ask(service, CHAT, max_tokens=4) for _ in range(4)))
                assert [answer.status for answer in answers] == [200] * 4
                await clean(service, good, rows=4)
                assert not broken.decode.live
                assert len(broken.decode.aborts) == len(broken.decode.requests)


def _prefill_pages(service: Service) -> int:
    half = service.services.fleet.of(service.model).replicas[0].prefills[0]
    return 0 if half.snapshot is None or half.info is None else half.snapshot.total_pages
