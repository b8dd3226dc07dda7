"""The thread that owns torch. It takes commands from a queue, steps the engine, and hands events and reports out.

The event loop calls `submit`, `abort` and reads `report`; nothing else crosses. One thread steps the engine, so its
parts need no locks. When a step raises, our code is wrong: the failure is logged and the process ends.

An engine lives from its load to the release of its memory, and the next one is another: nothing of the pages, their
tags and their prefixes goes from one to the other, which a new epoch tells whoever held something there.
"""

import gc
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import structlog

from backends.local.engine import Engine, Event, TokenEvent, Totals
from backends.local.errors import BusyError, NotReadyError, ReleasedError, StartError
from backends.local.memory import give_back_freed
from backends.local.pair.handover import Handover
from backends.local.sequence import Failure, Finish, FinishReason, Sequence

log = structlog.get_logger(__name__)

THROUGHPUT_WINDOW_SECONDS = 1.0
STALL_SECONDS = 0.05
"""How long an engine that can only wait for other processes sleeps, unless it is told something."""


@dataclass(frozen=True, slots=True)
class TagCounts:
    """What page tags have found since the start."""

    pairs_checked: int = 0
    requests_aborted: int = 0
    handovers_refused: int = 0
    pages_quarantined: int = 0
    overflowing: bool = False
    """More pages are in quarantine than chance explains: the engine should be restarted."""


@dataclass(frozen=True, slots=True)
class PairQueues:
    """Requests of a half of a pair that wait for the other one, by what for."""

    bootstrap: int = 0
    """Prefill: nobody has asked for their pages yet."""
    inflight: int = 0
    """Prefill: their pages are on their way."""
    prealloc: int = 0
    """Decode: they have no pages yet."""
    transfer: int = 0
    """Decode: they have pages, and nothing on them."""

    @property
    def total(self) -> int:
        return self.bootstrap + self.inflight + self.transfer


@dataclass(frozen=True, slots=True)
class Report:
    """The engine's state after its latest step."""

    taken_at: float
    epoch: str = ""
    """Differs with every load, so that a gateway notices that what it held is gone."""
    released: bool = False
    """There are neither weights nor pages: since a release, until they have been taken back."""
    running: int = 0
    waiting: int = 0
    unplaced: int = 0
    """Of those that wait: they have been looked at, and there were no pages or no slot for them."""
    waiting_tokens: int = 0
    """Tokens that waiting requests still have to compute."""
    retracted_waiting: int = 0
    pair: PairQueues = field(default_factory=PairQueues)
    used_pages: int = 0
    """In use by requests, or in quarantine; without those that only the prefix cache holds."""
    evictable_pages: int = 0
    withheld_pages: int = 0
    """In quarantine, and no request holds them."""
    lowest_waiting_priority: int | None = None
    tags: TagCounts = field(default_factory=TagCounts)
    weight_bytes: int = 0
    """Of all copies in memory."""
    tokens_per_second: float = 0.0
    totals: Totals = field(default_factory=Totals)


@dataclass(frozen=True, slots=True)
class _Submit:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class _Abort:
    rid: str
    prefix: bool

    def matches(self, sequence: Sequence) -> bool:
        return sequence.rid.startswith(self.rid) if self.prefix else sequence.rid == self.rid


@dataclass(frozen=True, slots=True)
class _Deed:
    """Something else that is to be done between two steps."""

    done_by: Callable[[Engine], list[TokenEvent]]


@dataclass(frozen=True, slots=True)
class _Release:
    done: "Future[None]"


@dataclass(frozen=True, slots=True)
class _Resume:
    done: "Future[None]"


class _Stop:
    pass


_Command = _Submit | _Abort | _Deed | _Release | _Resume | _Stop


class Worker:
    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        deliver: Callable[[list[Event]], None],
        fail: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`deliver` and `fail` are called in the worker's thread."""
        self._load = load
        self._deliver = deliver
        self._fail = fail
        self._clock = clock
        # Bounded by its writers: a request enters once, and only after the intake counted it.
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)
        self._epoch = _new_epoch()
        self._report = Report(taken_at=clock(), epoch=self._epoch)
        self._throughput = _Throughput(clock())
        self._ready = threading.Event()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    def must_be_ready(self) -> None:
        """Raises NotReadyError or ReleasedError."""
        if not self.ready:
            raise ReleasedError if self._report.released else NotReadyError

    @property
    def report(self) -> Report:
        """An idle engine's state does not age: its report is as of now."""
        if self._report.running or self._report.waiting:
            return self._report
        return replace(self._report, taken_at=self._clock(), tokens_per_second=0.0)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Ask it to end after the step in hand, and wait so long for it."""
        self._inbox.put(_Stop())
        self._thread.join(timeout_seconds)

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(_Submit(sequence))

    def abort(self, rid: str) -> None:
        """End the request with this id, if it still runs."""
        self._inbox.put(_Abort(rid, prefix=False))

    def abort_prefix(self, rid_prefix: str) -> None:
        """End all requests whose id starts so; the empty prefix means all."""
        self._inbox.put(_Abort(rid_prefix, prefix=True))

    def release(self) -> "Future[None]":
        """Give up weights and pages; done when the memory is free. BusyError: something runs or waits, nothing is given
        up. At once where it is so already.
        """
        done: Future[None] = Future()
        self._inbox.put(_Release(done))
        return done

    def resume(self) -> "Future[None]":
        """Take them back; done when requests are served again. One that fails ends the process, as a start does."""
        done: Future[None] = Future()
        self._inbox.put(_Resume(done))
        return done

    def flush_cache(self) -> None:
        """Forget every cached prefix that no request holds."""

        def flush(engine: Engine) -> list[TokenEvent]:
            engine.flush_cache()
            return []

        self._inbox.put(_Deed(flush))

    def decode_joined(self, rid: str) -> None:
        """Of a prefill process: somebody waits for this request's pages."""

        def join(engine: Engine) -> list[TokenEvent]:
            engine.decode_joined(rid)
            return []

        self._inbox.put(_Deed(join))

    def pages_sent(self, rid: str) -> None:
        """Of a prefill process: they have arrived."""
        self._inbox.put(_Deed(lambda engine: engine.pages_sent(rid)))

    def receive(self, rid: str, handover: Handover) -> None:
        """Of a decode process: this request's pages have come."""
        self._inbox.put(_Deed(lambda engine: engine.receive(rid, handover)))

    def fail(self, rid: str, failure: Failure) -> None:
        """Give a request up for a reason outside; without effect once it has ended."""
        self._inbox.put(_Deed(lambda engine: engine.fail(rid, failure)))

    def _run(self) -> None:
        try:
            resumed: Future[None] | None = None
            while (released := self._live(resumed)) is not None:
                self._give_up_memory()
                released.set_result(None)
                if (resumed := self._rest()) is None:
                    return
                self._epoch = _new_epoch()
        except StartError as error:
            log.error("engine_cannot_start", reason=str(error))  # noqa: TRY400  one sentence for the operator, no traceback
            self._fail()
        except BaseException:
            log.exception("engine_worker_failed")
            self._fail()
            raise

    def _live(self, resumed: "Future[None] | None") -> "Future[None] | None":
        """One engine from its load to its release, whose future is returned; None: the process is to end."""
        began = self._clock()
        engine = self._load()
        self._publish(engine, [])
        self._ready.set()
        took = round(self._clock() - began, 2)
        log.info("engine_ready", load_seconds=took, pages=engine.allocator.total_pages, epoch=self._epoch)
        if resumed is not None:
            resumed.set_result(None)
        return self._serve(engine)

    def _serve(self, engine: Engine) -> "Future[None] | None":
        while True:
            events, order = self._obey(engine)
            if isinstance(order, _Stop):
                return None
            if isinstance(order, _Release):
                self._publish(engine, events)
                return order.done
            events += engine.step()
            self._publish(engine, events)
            # After a page has changed hands wrongly the accounts are known to be off; /health says when it is too much.
            if engine.idle and not len(engine.allocator.quarantine):
                engine.check_integrity()

    def _obey(self, engine: Engine) -> tuple[list[Event], _Release | _Stop | None]:
        """Carry out what was asked since the last step; an idle engine sleeps here until something is. What ends it is
        returned.
        """
        events: list[Event] = []
        wait = engine.idle or engine.stalled
        timeout = None if engine.idle else STALL_SECONDS
        while True:
            try:
                command = self._inbox.get(block=wait, timeout=timeout)
            except Empty:
                return events, None
            wait = False
            match command:
                case _Submit(sequence):
                    events += engine.submit(sequence)
                case _Abort():
                    events += engine.abort(command.matches)
                case _Deed(done_by):
                    events += done_by(engine)
                case _Resume(done):
                    _fulfil(done)
                case _Release(done):
                    if done.set_running_or_notify_cancel() and _lets_go(engine, done):
                        return events, command
                case _Stop():
                    return events, command

    def _give_up_memory(self) -> None:
        """The engine has just gone out of scope."""
        self._ready.clear()
        gc.collect()
        give_back_freed()
        self._report = Report(taken_at=self._clock(), epoch=self._epoch, released=True)
        log.info("engine_released")

    def _rest(self) -> "Future[None] | None":
        """Without an engine, until it is to be loaded again: who asked for that. None: the process is to end."""
        while True:
            match self._inbox.get():
                case _Submit(sequence):
                    self._deliver([_turned_away(sequence)])
                case _Release(done):
                    _fulfil(done)
                case _Resume(done):
                    if done.set_running_or_notify_cancel():
                        return done
                case _Stop():
                    return None
                case _Abort() | _Deed():
                    pass  # nothing is there that it could concern

    def _publish(self, engine: Engine, events: list[Event]) -> None:
        now = self._clock()
        waiting = engine.scheduler.waiting
        self._report = Report(
            taken_at=now,
            epoch=self._epoch,
            running=len(engine.scheduler.running),
            waiting=len(waiting),
            unplaced=engine.scheduler.unplaced,
            waiting_tokens=sum(sequence.uncomputed for sequence in waiting),
            pair=PairQueues(
                bootstrap=len(engine.scheduler.parked),
                inflight=len(engine.scheduler.sending),
                prealloc=sum(sequence.awaits_pages for sequence in waiting),
                transfer=len(engine.scheduler.transferring),
            ),
            retracted_waiting=sum(sequence.retractions > 0 for sequence in waiting),
            used_pages=engine.scheduler.held_pages,
            evictable_pages=engine.scheduler.evictable_pages,
            withheld_pages=engine.allocator.withheld_pages,
            lowest_waiting_priority=min((sequence.priority for sequence in waiting), default=None),
            tags=_tag_counts(engine),
            weight_bytes=engine.weight_bytes,
            tokens_per_second=self._throughput.measure(engine.totals.generated_tokens, now),
            totals=replace(engine.totals),
        )
        if events:
            self._deliver(events)


def _new_epoch() -> str:
    return secrets.token_hex(8)


def _fulfil(done: "Future[None]") -> None:
    """It was so already."""
    if done.set_running_or_notify_cancel():
        done.set_result(None)


def _lets_go(engine: Engine, done: "Future[None]") -> bool:
    """Has it nothing to lose? Requests that wait for the other half of a pair count."""
    if next(iter(engine.scheduler.sequences()), None) is None:
        return True
    done.set_exception(BusyError())
    return False


def _turned_away(sequence: Sequence) -> TokenEvent:
    """It was let in just before the engine gave up its memory."""
    error = ReleasedError()
    failure = Failure(error.status, error.kind, str(error))
    finish = Finish(FinishReason.ABORT, failure=failure)
    return TokenEvent(sequence.rid, "", sequence.prompt_tokens, 0, finish=finish)


def _tag_counts(engine: Engine) -> TagCounts:
    quarantine = engine.allocator.quarantine
    return TagCounts(
        pairs_checked=engine.pairs_checked,
        requests_aborted=quarantine.requests_aborted,
        handovers_refused=quarantine.handovers_refused,
        pages_quarantined=len(quarantine),
        overflowing=quarantine.overflowing,
    )


class _Throughput:
    """Tokens a second over the last full window."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._tokens = 0
        self._rate = 0.0

    def measure(self, tokens: int, now: float) -> float:
        elapsed = now - self._since
        if elapsed >= THROUGHPUT_WINDOW_SECONDS:
            self._rate = (tokens - self._tokens) / elapsed
            self._since, self._tokens = now, tokens
        return self._rate
