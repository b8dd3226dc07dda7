"""Ten thousand bugs in the book-keeping of pages, under load: every one that would have been read is caught, no foreign
token leaves, and all other requests say what they say without faults. And as many requests without a false alarm.

The model is tiny, random and in float64, where the shape of a batch changes no output: texts can be compared exactly.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from backends.local.detokenizer import TextStream
from backends.local.engine import INTEGRITY_ABORT, Engine, Event, PagesReady, PagesWanted, TokenEvent
from backends.local.loading import load_engine
from backends.local.pair.handover import Handover
from backends.local.sequence import Bootstrap, Finish, FinishReason, SamplingParams, Sequence
from backends.local.settings import EngineSettings, Role
from backends.local.tokenizer import Tokenizer
from tests.backends.local.faults import Faults
from tests.engines import build_tiny_checkpoint

pytestmark = [pytest.mark.load, pytest.mark.timeout(600)]

FAULTS = 9_000
TRANSFER_FAULTS = 1_000
REQUESTS = 10_000
ROUND = 60  # faults that one engine takes before it is replaced, as an engine with so many would be
PAGE = 4
OUTPUT = 10
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


class Load:
    """An endless mix of near-identical prompts, and what each says when nothing goes wrong."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.tokenizer = Tokenizer(checkpoint)
        self.random = random.Random(20)
        stems = [[self.random.randrange(3, 384) for _ in range(24)] for _ in range(8)]
        self.prompts = [
            (*stem[: self.random.randrange(1, 25)], self.random.randrange(3, 384)) for stem in stems for _ in range(40)
        ]
        self._names = itertools.count()
        self.said = self._without_faults()

    def engine(self, *, pages: int = 160, **settings: Any) -> Engine:
        chosen = EngineSettings(
            model_path=self._checkpoint,
            served_model_name="tiny",
            max_total_tokens=pages * PAGE,
            page_size=PAGE,
            max_running_requests=32,
            chunked_prefill_size=64,
            threads=1,
            **settings,
        )
        clock = itertools.count()
        return load_engine(chosen, lambda: float(next(clock)))

    def sequence(self, **fields: Any) -> Sequence:
        prompt = self.random.choice(self.prompts)
        return Sequence(
            rid=str(next(self._names)),
            prompt_tokens=len(prompt),
            tokens=list(prompt),
            max_new_tokens=OUTPUT,
            sampling=SamplingParams(temperature=0.0),
            text=TextStream(self.tokenizer.token_bytes),
            cache_scope=self.random.choice("ab"),
            **fields,
        )

    def judge(self, sequence: Sequence, victims: set[str]) -> bool:
        """Was it stopped? Whatever it said must be its own; only a victim may be stopped."""
        prompt, output = tuple(sequence.tokens[: sequence.prompt_tokens]), sequence.tokens[sequence.prompt_tokens :]
        said = self.said[prompt]
        assert output == said[: len(output)], f"{sequence.rid} said something foreign"
        if sequence.finish == Finish(FinishReason.LENGTH):
            assert output == said
            return False
        assert sequence.finish == Finish(FinishReason.ABORT, failure=INTEGRITY_ABORT)
        assert sequence.rid in victims, f"{sequence.rid} was stopped for nothing"
        return True

    def _without_faults(self) -> dict[tuple[int, ...], list[int]]:
        engine = self.engine(pages=4096, page_tags=False, disable_radix_cache=True)
        asked = []
        for prompt in sorted(set(self.prompts)):
            sequence = self.sequence()
            sequence.tokens, sequence.prompt_tokens = list(prompt), len(prompt)
            engine.submit(sequence)
            asked.append(sequence)
        while not engine.idle:
            engine.step()
        return {tuple(one.tokens[: one.prompt_tokens]): one.tokens[one.prompt_tokens :] for one in asked}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    torch.manual_seed(7)
    # Each caught fault is an error in the log: ten thousand of them are no use to anybody.
    before = structlog.get_config()
    structlog.configure(processors=[_silent])
    yield Load(build_tiny_checkpoint(tmp_path_factory.mktemp("faults") / "tiny", torch_dtype="float64", **SMALL))
    structlog.configure(**before)


def _silent(_: Any, __: str, ___: Any) -> Any:
    raise structlog.DropEvent


def watch(engine: Engine) -> None:
    """Every step: exactly those are stopped who hold a page that is not theirs, found by comparing one by one."""
    check = engine._stop_holders_of_foreign_pages

    def checked(plan: Any) -> list[TokenEvent]:
        holds = engine.allocator.holds
        wrong = [
            sequence.rid
            for sequence, claim in plan.claims(PAGE)
            if not all(holds(page, tag) for page, tag in zip(claim.pages, claim.tags, strict=True))
        ]
        events = check(plan)
        assert sorted(event.rid for event in events) == sorted(wrong)
        return events

    engine._stop_holders_of_foreign_pages = checked  # type: ignore[method-assign]  # seen from outside, nothing else


def test_of_ten_thousand_faults_every_one_that_would_be_read_is_caught(load: Load) -> None:
    injected: dict[str, int] = {}
    stopped = refused = served = 0
    while sum(injected.values()) < FAULTS:
        engine, asked = load.engine(), []
        watch(engine)
        faults = Faults(engine, load.random)
        while sum(faults.injected.values()) < ROUND:
            while len(engine.scheduler.waiting) < 8:
                asked.append(load.sequence())
                engine.submit(asked[-1])
            engine.step()
            for _ in range(load.random.choice((0, 1, 1, 2))):
                faults.inject()
        while not engine.idle:
            engine.step()
        stopped += sum(load.judge(sequence, faults.victims) for sequence in asked)
        served += len(asked)
        refused += engine.allocator.quarantine.handovers_refused
        assert engine.allocator.withheld_pages + engine.allocator.used_pages + engine.allocator.free_pages == 160
        for kind, count in faults.injected.items():
            injected[kind] = injected.get(kind, 0) + count
    assert set(injected) == {
        "live_page_is_reused", "page_is_handed_out_twice", "block_table_is_stale", "prefix_node_is_stale",
        "page_is_freed_while_it_is_shared",
    }  # fmt: skip
    assert min(injected.values()) > FAULTS / 20, injected
    assert stopped > FAULTS / 4
    assert refused > 100
    assert served - stopped > 1_000, "the others went on"


def test_a_page_that_is_recycled_during_its_transfer_is_found_when_its_content_comes(load: Load) -> None:
    """A prefill and a decode engine in one process; faults strike at decode, transfers take their time."""
    injected: dict[str, int] = {}
    stopped = served = 0
    while sum(injected.values()) < TRANSFER_FAULTS:
        prefill = load.engine(role=Role.PREFILL)
        decode = load.engine(role=Role.DECODE, disable_radix_cache=True)
        watch(decode)
        faults = Faults(decode, load.random)
        underway: list[PagesReady] = []
        asked: list[Sequence] = []
        while sum(faults.injected.values()) < ROUND or not (decode.idle and not decode.scheduler.transferring):
            more = sum(faults.injected.values()) < ROUND
            while more and len(decode.scheduler.waiting) < 4:
                asked.append(_both(load, prefill, decode))
            for event in (*prefill.step(), *decode.step()):
                _pass_on(event, prefill, underway)
            for ready in list(underway):
                if load.random.random() < 0.5:
                    underway.remove(ready)
                    handover = ready.handover
                    fields = {name: getattr(handover, name) for name in Handover.__slots__}
                    decode.receive(ready.rid, Handover(**fields | {"data": bytearray(handover.data)}))
                    prefill.pages_sent(ready.rid)
            if more and load.random.random() < 0.7:
                faults.inject()
        stopped += sum(load.judge(sequence, faults.victims) for sequence in asked)
        served += len(asked)
        for kind, count in faults.injected.items():
            injected[kind] = injected.get(kind, 0) + count
        assert decode.allocator.used_pages == 0
        prefill.check_integrity()
    assert injected["page_is_recycled_during_its_transfer"] > TRANSFER_FAULTS / 10, injected
    assert stopped > TRANSFER_FAULTS / 4
    assert served > stopped


def _both(load: Load, prefill: Engine, decode: Engine) -> Sequence:
    """The same request for both engines; decode's one."""
    room = Bootstrap("here", 1, 1)
    decoding = load.sequence(bootstrap=room, awaits_pages=True)
    prefilling = load.sequence(bootstrap=room)
    prefilling.rid, prefilling.cache_scope, prefilling.max_new_tokens = decoding.rid, decoding.cache_scope, 1
    prefilling.tokens, prefilling.prompt_tokens = list(decoding.tokens), decoding.prompt_tokens
    prefill.submit(prefilling)
    decode.submit(decoding)
    return decoding


def _pass_on(event: Event, prefill: Engine, underway: list[PagesReady]) -> None:
    if isinstance(event, PagesWanted):
        prefill.decode_joined(event.sequence.rid)
    elif isinstance(event, PagesReady):
        underway.append(event)


def test_ten_thousand_requests_without_faults_raise_no_false_alarm(load: Load) -> None:
    """Near-identical prompts, a pool that evicts and retracts, and requests that are left in the middle."""
    engine, left = load.engine(pages=100), 0
    asked: list[Sequence] = []
    while len(asked) < REQUESTS:
        while len(engine.scheduler.waiting) < 16:
            asked.append(load.sequence())
            engine.submit(asked[-1])
        engine.step()
        if load.random.random() < 0.1:
            leaver = load.random.choice(list(engine.scheduler.sequences())).rid
            left += len(engine.abort(lambda one, rid=leaver: one.rid == rid))  # type: ignore[misc]  # the loop's value
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    stopped = [one for one in asked if one.finish == Finish(FinishReason.ABORT)]
    assert len(stopped) == left > 100
    for sequence in asked:
        if sequence not in stopped:
            assert not load.judge(sequence, set())
    quarantine = engine.allocator.quarantine
    assert (quarantine.requests_aborted, quarantine.handovers_refused, len(quarantine)) == (0, 0, 0)
    assert engine.totals.retractions > 100
    assert engine.totals.cached_tokens > 10_000
    assert engine.pairs_checked > 100_000
