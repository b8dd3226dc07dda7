import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.local.engine import Engine, Event, TokenEvent
from backends.local.errors import BusyError, NotReadyError, ReleasedError, StartError
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


class TestRelease:
    def test_an_idle_engine_gives_up_its_memory_and_takes_it_back_as_another(self, tiny_engine: StartTiny) -> None:
        first, second = tiny_engine(), tiny_engine()
        loads = iter([first.engine, second.engine])
        harness = Harness(lambda: next(loads))
        harness.worker.start()
        harness.worker.resume().result(SECONDS_MAX)  # of what was never released
        epoch = harness.worker.report.epoch
        harness.worker.release().result(SECONDS_MAX)
        harness.worker.release().result(SECONDS_MAX)
        released = harness.worker.report
        assert (released.released, released.weight_bytes, released.epoch) == (True, 0, epoch)
        with pytest.raises(ReleasedError):
            harness.worker.must_be_ready()
        harness.worker.resume().result(SECONDS_MAX)
        assert harness.worker.ready
        assert not harness.worker.report.released
        assert harness.worker.report.epoch not in {"", epoch}
        harness.worker.submit(second.sequence(PROMPT, 3))
        assert harness.until_finished()[-1].completion_tokens == 3
        harness.worker.stop(SECONDS_MAX)

    def test_a_busy_engine_gives_nothing_up(self, tiny_engine: StartTiny) -> None:
        tiny = tiny_engine()
        with running(tiny) as harness:
            harness.worker.submit(tiny.sequence(PROMPT, 1000, rid="long"))
            harness.events.get(timeout=SECONDS_MAX)
            with pytest.raises(BusyError):
                harness.worker.release().result(SECONDS_MAX)
            assert not harness.worker.report.released
            harness.worker.abort("long")
            harness.until_finished()

    def test_who_came_in_just_before_is_turned_away(self, tiny_engine: StartTiny) -> None:
        tiny = tiny_engine()
        with running(tiny) as harness:
            harness.worker.release().result(SECONDS_MAX)
            harness.worker.submit(tiny.sequence(PROMPT, 5, rid="late"))
            harness.worker.abort("late")
            harness.worker.flush_cache()
            [event] = harness.until_finished()
        assert event.finish is not None
        assert event.finish.failure is not None
        assert (event.rid, event.finish.failure.status) == ("late", 503)
        assert not harness.worker._thread.is_alive()  # told to end without an engine, it ended

    def test_an_order_that_nobody_waits_for_any_more_is_not_carried_out(self, tiny_engine: StartTiny) -> None:
        tiny = tiny_engine()
        harness = Harness(lambda: tiny.engine)
        given_up = harness.worker.release()
        assert given_up.cancel()
        harness.worker.start()
        harness.worker.submit(tiny.sequence(PROMPT, 2))
        harness.until_finished()
        assert not harness.worker.report.released
        harness.worker.stop(SECONDS_MAX)

    def test_one_that_can_t_load_again_is_reported_as_at_the_start(self, tiny_engine: StartTiny) -> None:
        tiny = tiny_engine()

        def load() -> Engine:
            if loaded:
                raise StartError("the folder has gone")
            loaded.append(True)
            return tiny.engine

        loaded: list[bool] = []
        harness = Harness(load)
        harness.worker.start()
        harness.worker.release().result(SECONDS_MAX)
        harness.worker.resume()
        assert harness.failed.wait(SECONDS_MAX)


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
