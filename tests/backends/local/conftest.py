"""A tiny checkpoint for all tests of the local engine, and engines on it: in this process or in one of their own."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from backends.local.detokenizer import TextStream
from backends.local.engine import Engine, TokenEvent
from backends.local.loading import load_engine
from backends.local.sequence import SamplingParams, Sequence
from backends.local.settings import EngineSettings
from backends.local.tokenizer import Tokenizer
from tests.engines import LocalEngine, build_tiny_checkpoint, start_local_engine

PAGE_BYTES = 2 * 16 * 2 * 2 * 16 * 8  # layers, tokens, keys and values, heads, head size, float64


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny products lose by being split, most of all on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float64, where the shape of a batch changes no output: its rounding never decides a draw."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", torch_dtype="float64")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer(tiny_checkpoint)


@pytest.fixture
def local_engine(tiny_checkpoint: Path) -> Callable[..., AbstractContextManager[LocalEngine]]:
    """`with local_engine(max_running_requests=1) as engine:` starts a process on the tiny checkpoint."""

    def start(**flags: Any) -> AbstractContextManager[LocalEngine]:
        return start_local_engine(tiny_checkpoint, **flags)

    return start


class TinyEngine:
    """An engine in this process, its page accounts checked after every step."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.events: list[TokenEvent] = []
        self._names = itertools.count()

    def submit(self, prompt: list[int], max_new_tokens: int = 8, stop: tuple[str, ...] = (), **given: Any) -> Sequence:
        sequence = self.sequence(prompt, max_new_tokens, stop, **given)
        self.engine.submit(sequence)
        return sequence

    def sequence(
        self, prompt: list[int], max_new_tokens: int = 8, stop: tuple[str, ...] = (), **given: Any
    ) -> Sequence:
        """Greedy unless told otherwise."""
        rid = given.pop("rid", f"r{next(self._names)}")
        scope = given.pop("cache_scope", "")
        stop_token_ids = frozenset(given.pop("stop_token_ids", ()))
        return Sequence(
            rid=rid,
            prompt_tokens=len(prompt),
            tokens=list(prompt),
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(**({"temperature": 0.0} | given)),
            text=TextStream(self.tokenizer.token_bytes, stop),
            stop_token_ids=stop_token_ids,
            cache_scope=scope,
        )

    def step(self) -> list[TokenEvent]:
        events = [event for event in self.engine.step() if isinstance(event, TokenEvent)]
        self.engine.check_integrity()
        self.events += events
        return events

    def drain(self, steps_max: int = 5000) -> None:
        for _ in range(steps_max):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def decode(self, tokens: list[int]) -> str:
        stream = TextStream(self.tokenizer.token_bytes)
        return "".join([stream.push(token) for token in tokens] + [stream.flush()])

    def text(self, sequence: Sequence) -> str:
        return "".join(event.text for event in self.events if event.rid == sequence.rid)


class StartTiny(Protocol):
    def __call__(self, *, pages: int = ..., running: int = ..., chunk: int = ..., **settings: Any) -> TinyEngine: ...


@pytest.fixture
def tiny_engine(tiny_checkpoint: Path, tiny_tokenizer: Tokenizer) -> Iterator[StartTiny]:
    """`tiny_engine(pages=8)`; every one that was started must be idle, with no page in use, when the test ends."""
    started: list[TinyEngine] = []

    def start(*, pages: int = 256, running: int = 32, chunk: int = 512, **more: Any) -> TinyEngine:
        settings = EngineSettings(
            model_path=tiny_checkpoint,
            served_model_name="tiny",
            kv_cache_bytes=pages * PAGE_BYTES,
            max_running_requests=running,
            chunked_prefill_size=chunk,
            threads=1,
            **more,
        )
        clock = itertools.count(1000)
        tiny = TinyEngine(load_engine(settings, lambda: float(next(clock))), tiny_tokenizer)
        started.append(tiny)
        return tiny

    yield start
    for tiny in started:
        assert tiny.engine.idle
        tiny.engine.check_integrity()
