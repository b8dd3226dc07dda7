import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.local.engine import Engine, Event, TokenEvent
from backends.local.errors import NotReadyError, StartError
from backends.local.guide import Guides
from backends.local.intake import Intake, Limits
from backends.local.live import LiveRequests
from backends.local.schemas import ChatBody
from backends.local.sequence import FinishReason
from backends.local.tokenizer import Tokenizer
from backends.local.worker import Worker
from tests.backends.local.conftest import StartTiny, TinyEngine

PROMPT = [1, 50, 60]
SECONDS_MAX = 10.0


class Harness:
    """A worker, and what it hands out."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self.events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self.failed = threading.Event()
        self.worker = Worker(
            load,
            deliver=self.receive,
            fail=self.failed.set,
            clock=lambda: 5.0,
        )

    def receive(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, TokenEvent)
            self.events.put(event)

    def until_finished(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while not events or events[-1].finish is None:
            events.append(self.events.get(timeout=SECONDS_MAX))
        return events


@contextmanager
def running(tiny: TinyEngine) -> Iterator[Harness]:
    harness = Harness(lambda: tiny.engine)
    harness.worker.start()
    try:
        yield harness
    finally:
        harness.worker.stop(SECONDS_MAX)


def test_it_steps_what_is_submitted_and_reports_when_all_is_done(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequence = tiny.sequence(PROMPT, 5)
    with running(tiny) as harness:
        harness.worker.submit(sequence)
        events = harness.until_finished()
    assert [event.completion_tokens for event in events] == [1, 2, 3, 4, 5]
    report = harness.worker.report
    assert (report.running, report.waiting, report.used_pages) == (0, 0, 0)
    assert report.totals.generated_tokens == 5


def test_an_abort_ends_one_id_and_an_abort_by_prefix_all_that_begin_with_it(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequences = [tiny.sequence(PROMPT, 1900, rid=rid) for rid in ("a", "ab", "b")]
    with running(tiny) as harness:
        for sequence in sequences:
            harness.worker.submit(sequence)
        harness.worker.abort("a")
        assert {event.rid for event in harness.until_finished() if event.finish} == {"a"}
        harness.worker.abort_prefix("")
        ended = [*harness.until_finished(), *harness.until_finished()]
    assert {event.rid for event in ended if event.finish} == {"ab", "b"}
    assert all(event.finish is None or event.finish.reason is FinishReason.ABORT for event in ended)


def test_an_engine_that_can_t_load_is_reported_without_a_traceback() -> None:
    def load() -> Engine:
        raise StartError("no such folder")

    harness = Harness(load)
    harness.worker.start()
    assert harness.failed.wait(SECONDS_MAX)
    assert not harness.worker.ready


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_invariant_fails_the_process(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    sequence = tiny.sequence(PROMPT, 5)
    lost = tiny.engine.allocator._free.pop()
    with running(tiny) as harness:
        harness.worker.submit(sequence)
        assert harness.failed.wait(SECONDS_MAX)
    tiny.engine.allocator._free.append(lost)


async def test_before_the_model_is_loaded_requests_are_refused(tiny_tokenizer: Tokenizer) -> None:
    harness = Harness(lambda: pytest.fail("never started"))
    intake = Intake(
        limits=Limits(context_tokens=64, pool_tokens=64, vocabulary=384, queued_requests=4),
        tokenizer=tiny_tokenizer,
        guides=Guides(Path("/nowhere"), 384, [2]),
        worker=harness.worker,
        live=LiveRequests(),
        executor=None,  # type: ignore[arg-type]  # nothing is tokenised here
        clock=lambda: 0.0,
    )
    with pytest.raises(NotReadyError):
        await intake.accept(ChatBody(input_ids=[1]))
