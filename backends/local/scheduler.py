"""Who runs in the next step. Decides on plain values: no torch, no clock, no thread.

Each step decodes one token for every running sequence that is ready and prefills up to `chunked_prefill_size` prompt
tokens beside them. A sequence enters when the pages of all its tokens are free; while it decodes it takes pages one by
one. When none is left, the latest arrival is retracted: its pages are freed and it waits at the queue's front, to be
computed again from its prompt and what it produced.

Invariants: every running sequence arrived before every waiting one, and both are in order of arrival. So the earliest
one is never retracted for another, always advances, and nothing starves.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backends.local.kv.pages import PageAllocator
from backends.local.sequence import Finish, FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of one sequence's tokens to be computed this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def completes(self) -> bool:
        """After it, all known tokens are computed and the next one can be sampled."""
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    decode: list[Sequence] = field(default_factory=list)
    """One uncomputed token each."""
    prefill: list[Chunk] = field(default_factory=list)
    retracted: list[Sequence] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.decode and not self.prefill


class Scheduler:
    def __init__(self, allocator: PageAllocator, *, max_running_requests: int, chunked_prefill_size: int) -> None:
        assert max_running_requests > 0
        assert chunked_prefill_size > 0
        self.allocator = allocator
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_running = max_running_requests
        self._chunk_tokens = chunked_prefill_size

    def add(self, sequence: Sequence) -> None:
        needed = sequence.prompt_tokens + sequence.max_new_tokens
        assert needed <= self.allocator.total_tokens, "a sequence that can never fit must be refused before"
        self.waiting.append(sequence)

    def plan(self) -> StepPlan:
        """The next step; pages for all that it writes are taken."""
        step = StepPlan()
        self._plan_decode(step)
        budget = self._plan_started_prefill(step)
        self._admit(step, budget)
        return step

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """Take it out, wherever it is, and free its pages at once."""
        assert sequence.finish is None
        sequence.finish = finish
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._free(sequence)

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        aborted = [sequence for sequence in self.sequences() if matches(sequence)]
        for sequence in aborted:
            self.finish(sequence, Finish(FinishReason.ABORT))
        return aborted

    def sequences(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def check_integrity(self) -> None:
        self.allocator.check_integrity(sequence.pages for sequence in self.running)
        assert not any(sequence.pages for sequence in self.waiting), "a waiting sequence holds pages"
        assert len(self.running) <= self._max_running

    def _plan_decode(self, step: StepPlan) -> None:
        for sequence in list(self.running):
            if sequence.uncomputed != 1 or sequence not in self.running:
                continue
            if self._grow(sequence, step):
                step.decode.append(sequence)

    def _grow(self, sequence: Sequence, step: StepPlan) -> bool:
        """Make room for its next token, at the expense of later arrivals; False when it had to yield itself."""
        missing = self.allocator.pages_for(len(sequence.tokens)) - len(sequence.pages)
        assert missing <= 1
        while missing > self.allocator.free_pages:
            victim = self.running[-1]
            self._retract(victim)
            step.retracted.append(victim)
            if victim is sequence:
                return False
        if missing:
            pages = self.allocator.allocate(missing)
            assert pages is not None
            sequence.pages += pages
        return True

    def _retract(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._free(victim)
        victim.retractions += 1
        self.waiting.appendleft(victim)

    def _free(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def _plan_started_prefill(self, step: StepPlan) -> int:
        budget = self._chunk_tokens
        for sequence in self.running:
            if sequence.uncomputed > 1 and budget > 0:
                budget -= self._add_chunk(step, sequence, budget)
        return budget

    def _admit(self, step: StepPlan, budget: int) -> None:
        """First come, first served: a head that does not fit blocks the rest, or small requests would starve it."""
        while self.waiting and budget > 0 and len(self.running) < self._max_running and not step.retracted:
            sequence = self.waiting[0]
            needed = self.allocator.pages_for(len(sequence.tokens))
            # One page of air for each running sequence, lest the newcomer be retracted within its first page.
            if needed + len(self.running) > self.allocator.free_pages:
                return
            pages = self.allocator.allocate(needed)
            assert pages is not None
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.pages = pages
            budget -= self._add_chunk(step, sequence, budget)

    def _add_chunk(self, step: StepPlan, sequence: Sequence, budget: int) -> int:
        count = min(budget, sequence.uncomputed)
        step.prefill.append(Chunk(sequence, sequence.computed, count))
        return count
