"""The thread that owns torch. It takes commands from a queue, steps the engine, and hands events and reports out.

The event loop calls `submit`, `abort` and reads `report`; nothing else crosses. One thread steps the engine, so its
parts need no locks. When a step raises, our code is wrong: the failure is logged and the process ends.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import structlog

from backends.local.engine import Engine, Event, TokenEvent, Totals
from backends.local.errors import StartError
from backends.local.pair.handover import Handover
from backends.local.sequence import Failure, Sequence

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
    running: int = 0
    waiting: int = 0
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


class _Stop:
    pass


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
        self._inbox: SimpleQueue[_Submit | _Abort | _Deed | _Stop] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)
        self._report = Report(taken_at=clock())
        self._throughput = _Throughput(clock())
        self._ready = threading.Event()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

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
            began = self._clock()
            engine = self._load()
            self._publish(engine, [])
            self._ready.set()
            log.info("engine_ready", load_seconds=round(self._clock() - began, 2), pages=engine.allocator.total_pages)
            self._serve(engine)
        except StartError as error:
            log.error("engine_cannot_start", reason=str(error))  # noqa: TRY400  one sentence for the operator, no traceback
            self._fail()
        except BaseException:
            log.exception("engine_worker_failed")
            self._fail()
            raise

    def _serve(self, engine: Engine) -> None:
        while True:
            events, stop = self._obey(engine)
            if stop:
                return
            events += engine.step()
            self._publish(engine, events)
            # After a page has changed hands wrongly the accounts are known to be off; /health says when it is too much.
            if engine.idle and not len(engine.allocator.quarantine):
                engine.check_integrity()

    def _obey(self, engine: Engine) -> tuple[list[Event], bool]:
        """Carry out what was asked since the last step; an idle engine sleeps here until something is."""
        events: list[Event] = []
        wait = engine.idle or engine.stalled
        timeout = None if engine.idle else STALL_SECONDS
        while True:
            try:
                command = self._inbox.get(block=wait, timeout=timeout)
            except Empty:
                return events, False
            wait = False
            match command:
                case _Submit(sequence):
                    events += engine.submit(sequence)
                case _Abort():
                    events += engine.abort(command.matches)
                case _Deed(done_by):
                    events += done_by(engine)
                case _Stop():
                    return events, True

    def _publish(self, engine: Engine, events: list[Event]) -> None:
        now = self._clock()
        waiting = engine.scheduler.waiting
        self._report = Report(
            taken_at=now,
            running=len(engine.scheduler.running),
            waiting=len(waiting),
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
