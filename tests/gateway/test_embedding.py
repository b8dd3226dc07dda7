"""What is wanted kept of an embedding is kept before its usage record ends: nothing is charged that can be lost."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from billing.price_book import Price
from gateway.call_room import CallRoom
from gateway.embedding import Embedded, EmbeddingRequest, Embeddings
from gateway.errors import GenerationFailed, ModelWarming, PromptTooLong, QueueFull, RegionNotServed
from gateway.regions import DEFAULT_REGION
from tenancy.principal import Principal
from tests.doubles.waiting import eventually
from tests.fakes import ACCOUNT, MODEL, PRICE


class World:
    """An engine, a hold and a durable record that say in which order they were used."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.asked: list[list[list[int]]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.charged: list[bool] = []
        self.ends: list[tuple[str, int]] = []  # how, and of how many tokens
        self.standings = ()
        self.price = PRICE
        self.asleep: Exception | None = None
        self.may_wake = asyncio.Event()
        self.may_wake.set()

    async def awake(self) -> None:
        self.steps.append("awake")
        await self.may_wake.wait()
        if self.asleep is not None:
            raise self.asleep

    def refuse(self, record: Any, _price: object) -> None:
        self.steps.append(record.code)

    def refused(self, *_: object) -> None:
        pass

    async def ask(self, _path: str, body: bytes, **_: object) -> "World":
        self.steps.append("asked")
        self.asked.append(orjson.loads(body)["input"])
        await self.may_answer.wait()
        return self

    async def fields(self) -> dict[str, Any]:
        return {"data": [{"index": at, "embedding": [1.0, *text[1:]]} for at, text in enumerate(self.asked[-1])]}

    def close(self) -> None:
        pass

    def begin(self, _facts: object) -> None:
        pass

    async def finish(self, record: Any, _price: object) -> Any:
        self.steps.append("recorded")
        self.charged.append(record.charged)
        self.ends.append((record.outcome, record.usage.prompt))
        return SimpleNamespace(cost_nano=1, neurons_micro=1)

    async def open(self, *_: object, **__: object) -> "World":
        return self

    async def settle(self, *_: object) -> None:
        self.steps.append("settled")

    def ended(self, *_: object, **__: object) -> None:
        pass

    def price_in_force(self, *_: object, **__: object) -> Price:
        return self.price

    def get_for(self, *_: object) -> Any:
        return SimpleNamespace(context_tokens=16)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(params=[False])
def embeddings(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Embeddings]:
    tokenizer = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    part = cast("Any", world)
    with ThreadPoolExecutor(1) as threads:
        yield Embeddings(
            part,
            tmp_path,
            threads,
            catalogue=part,
            holds=part,
            metering=part,
            price_book=part,
            metrics=part,
            awake=world.awake if request.param else None,
        )


def wanted(regions: frozenset[str] | None = None, *, account: str = ACCOUNT) -> EmbeddingRequest:
    principal = SimpleNamespace(account_id=account, key_id="key", may_use=lambda _model: True, regions=regions)
    return EmbeddingRequest("id", cast("Principal", principal), MODEL, "run", ("a",), 0)


async def test_an_answer_is_kept_before_its_record_ends(world: World, embeddings: Embeddings) -> None:
    async def keep(embedded: Embedded) -> None:
        assert embedded.vectors == ([1.0],)
        assert embedded.settlement.usage.prompt == 1
        world.steps.append("kept")

    await embeddings.embed(wanted(), keep)
    assert world.steps == ["asked", "kept", "recorded", "settled"]
    assert world.charged == [True]


async def test_an_answer_that_can_not_be_kept_is_not_charged(world: World, embeddings: Embeddings) -> None:
    async def keep(_embedded: Embedded) -> None:
        raise GenerationFailed("nowhere to keep it")

    with pytest.raises(GenerationFailed):
        await embeddings.embed(wanted(), keep)
    assert world.charged == [False]


async def test_texts_of_an_account_that_is_bound_elsewhere_never_reach_the_engine(
    world: World, embeddings: Embeddings
) -> None:
    with pytest.raises(RegionNotServed):
        await embeddings.embed(wanted(frozenset({"eu-west"})))
    assert world.steps == []
    assert (await embeddings.embed(wanted(frozenset({DEFAULT_REGION})))).vectors


async def test_a_large_request_is_several_calls_and_one_record(
    world: World, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.embedding._CALL_TOKENS", 4)
    texts = ((1, 0), (1, 1), (0, 1), (1, 0, 1, 0, 1), (1,))
    embedded = await embeddings.embed(replace(wanted(), texts=texts))
    assert world.asked == [[[1, 0], [1, 1]], [[0, 1]], [[1, 0, 1, 0, 1]], [[1]]]
    assert embedded.vectors == tuple([1.0, *text[1:]] for text in texts)
    assert embedded.settlement.usage.prompt == 12
    assert world.steps == ["asked"] * 4 + ["recorded", "settled"]


async def test_another_account_has_its_turn_between_the_calls_of_a_large_request(
    world: World, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.embedding._CALL_TOKENS", 1)
    room = CallRoom(calls_max=1, waiting_max=8)
    monkeypatch.setattr(embeddings, "_room", room)
    world.may_answer.clear()
    large = asyncio.create_task(embeddings.embed(replace(wanted(), texts=((0,),) * 3)))
    await eventually(lambda: bool(world.asked), what="the first call")
    small = asyncio.create_task(embeddings.embed(replace(wanted(account="another"), texts=((1,),))))
    await eventually(lambda: room.waiting == 1, what="another account that waits")
    world.may_answer.set()
    await asyncio.gather(large, small)
    assert world.asked == [[[0]], [[1]], [[0]], [[0]]]


@pytest.mark.parametrize("kept", [False, True], ids=["nobody else", "kept"])
async def test_for_a_caller_who_left_no_further_call_is_made_and_those_that_were_are_paid(
    world: World, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch, *, kept: bool
) -> None:
    async def keep(_embedded: Embedded) -> None:
        world.steps.append("kept")

    monkeypatch.setattr("gateway.embedding._CALL_TOKENS", 2)
    world.may_answer.clear()
    asking = asyncio.create_task(embeddings.embed(replace(wanted(), texts=("a", "a", "a")), keep if kept else None))
    await eventually(lambda: world.asked == [[[0], [0]]], within_s=10, what="a first call")
    asking.cancel()
    await asyncio.wait([asking])
    world.may_answer.set()
    await embeddings.drain(within_s=10)
    assert asking.cancelled()
    assert (
        world.steps == ["asked", "asked", "kept", "recorded", "settled"] if kept else ["asked", "recorded", "settled"]
    )
    assert world.ends == [("finished", 3) if kept else ("client_disconnected", 2)]


async def test_texts_beyond_what_a_request_may_hold_are_not_all_tokenised(
    world: World, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.embedding.TOKENS_MAX", 100)
    said = "The inputs together have more than 128 tokens; this model takes at most 100 (in one request)."
    with pytest.raises(PromptTooLong, match=re.escape(said)):
        await embeddings.embed(replace(wanted(), texts=("a",) * 1_000))
    assert world.steps == []


@pytest.mark.parametrize("words", [20, 200])
async def test_an_input_beyond_the_context_is_told_so_and_that_no_output_is_counted(
    embeddings: Embeddings, words: int
) -> None:
    said = f"An input has {words} tokens; this model takes at most 16 (its context)."
    with pytest.raises(PromptTooLong, match=re.escape(said)):
        await embeddings.embed(replace(wanted(), texts=("a", "a " * words)))


@pytest.mark.parametrize("embeddings", [True], indirect=True)
async def test_an_engine_that_sleeps_is_awake_before_anything_is_held_or_the_request_is_refused(
    world: World, embeddings: Embeddings
) -> None:
    await embeddings.embed(wanted())
    assert world.steps == ["awake", "asked", "recorded", "settled"]
    world.steps.clear()
    world.asleep = ModelWarming("asleep", retry_after_s=7)
    with pytest.raises(ModelWarming):
        await embeddings.embed(wanted())
    assert world.steps == ["awake", "model_warming"]
    assert embeddings.idle


@pytest.mark.parametrize("embeddings", [True], indirect=True)
async def test_one_account_may_have_half_of_those_who_wait_for_an_engine_to_wake(
    world: World, embeddings: Embeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.embedding._WAITING_MAX", 4)
    world.may_wake.clear()
    tasks = [asyncio.create_task(embeddings.embed(wanted())) for _ in range(2)]
    await eventually(lambda: world.steps == ["awake"] * 2, what="two that wait")
    with pytest.raises(QueueFull):
        async with asyncio.timeout(5):
            await embeddings.embed(wanted())
    tasks += [asyncio.create_task(embeddings.embed(wanted(account=account))) for account in ("another", "third")]
    await eventually(lambda: world.steps == ["awake"] * 4, what="others that wait")
    with pytest.raises(QueueFull):
        async with asyncio.timeout(5):
            await embeddings.embed(wanted(account="fourth"))
    world.may_wake.set()
    await asyncio.gather(*tasks)
    assert embeddings.idle
