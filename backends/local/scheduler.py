"""Who runs in the next step. Decides on plain values: no torch, no clock, no thread.

Each step decodes one token for every running sequence that is ready and prefills up to `chunked_prefill_size` prompt
tokens beside them. A sequence enters when the pages of all its tokens are free, less those that the prefix cache has
for it; while it decodes it takes pages one by one. Pages that nobody but the cache holds count as free. When none is
left, the sequence that ranks last is retracted: it waits again, to be computed from its prompt and what it produced
(its full pages stay in the cache as long as nobody needs them).

Rank: priority, where priorities count, then arrival. A sequence is never retracted for one that ranks below it, and
none in the queue is overtaken by a lower one. So the first in rank always advances, and nothing starves but behind an
endless row of higher priorities.
"""

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backends.local.kv.pages import PageAllocator
from backends.local.kv.prefix import PrefixCache
from backends.local.sequence import Failure, Finish, FinishReason, Sequence
from backends.page_tags.table import Claim

DISPLACED = Failure(503, "ServiceUnavailableError", "The request is aborted by a higher priority request.")
TOO_BIG = Failure(500, "InternalServerError", "Out of memory: the request is alone and still needs more KV cache.")
"""Only with pages in quarantine: a request that the whole pool can't hold is refused before it gets here."""


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
    failed: list[Sequence] = field(default_factory=list)
    """Given up, since what is left of the pool is too small for them."""
    ready_to_receive: list[Sequence] = field(default_factory=list)
    """They have pages now for what another process computes."""

    @property
    def empty(self) -> bool:
        return not self.decode and not self.prefill

    def claims(self, page_size: int) -> list[tuple[Sequence, Claim]]:
        """Each sequence of the step with the pages that it reads or writes in it."""
        uses = [(sequence, len(sequence.tokens)) for sequence in self.decode]
        uses += [(chunk.sequence, chunk.end) for chunk in self.prefill]
        return [(sequence, sequence.claim(-(-tokens // page_size))) for sequence, tokens in uses]

    def drop(self, sequence: Sequence) -> None:
        """It does not take part in this step after all."""
        self.decode = [one for one in self.decode if one is not sequence]
        self.prefill = [chunk for chunk in self.prefill if chunk.sequence is not sequence]


class Scheduler:
    """preemption_threshold: None, or by how much a waiting request's priority must exceed a running one's to take its
    pages; None also means that priorities don't count.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        max_running_requests: int,
        chunked_prefill_size: int,
        prefix: PrefixCache | None = None,
        max_queued_requests: int = 256,
        preemption_threshold: int | None = None,
    ) -> None:
        assert max_running_requests > 0
        assert chunked_prefill_size > 0
        self.allocator = allocator
        self.prefix = prefix
        self.waiting: list[Sequence] = []
        self.unplaced = 0
        """Of those that wait, after a plan: whom it had no pages or no slot for. Others wait for the next step."""
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        """Of a prefill process: nobody has asked for their pages yet. They hold none."""
        self.sending: list[Sequence] = []
        """Of a prefill process: computed, and copied out of the pool, but not yet where they are to go."""
        self.transferring: list[Sequence] = []
        """Of a decode process: they have pages, whose content is on its way."""
        self._max_running = max_running_requests
        self._chunk_tokens = chunked_prefill_size
        self._max_queued = max_queued_requests
        self._threshold = preemption_threshold
        self._arrivals = 0

    @property
    def evictable_pages(self) -> int:
        return 0 if self.prefix is None else self.prefix.evictable_pages

    @property
    def available_pages(self) -> int:
        """Free now, or free as soon as they are asked for."""
        return self.allocator.free_pages + self.evictable_pages

    @property
    def held_pages(self) -> int:
        """In use by a sequence, or of no use to anybody (in quarantine)."""
        # A cached page that was freed under the cache counts twice as available until that is found out.
        return max(0, self.allocator.total_pages - self.available_pages)

    def add(self, sequence: Sequence) -> Sequence | None:
        """Let it wait; the sequence that is turned away for it, because the queue is full and it ranks last."""
        self._number(sequence)
        insort(self.waiting, sequence, key=self._rank)
        if self._threshold is None or len(self.waiting) <= self._max_queued:
            return None
        last = self.waiting[-1]
        if last.completion_tokens:
            return None  # its client has a part of the answer
        self.finish(last, Finish(FinishReason.ABORT, failure=DISPLACED))
        return last

    def park(self, sequence: Sequence) -> None:
        """Let it wait until `release`, in nobody's way."""
        self._number(sequence)
        self.parked.append(sequence)

    def release(self, sequence: Sequence) -> None:
        self.parked.remove(sequence)
        insort(self.waiting, sequence, key=self._rank)

    def send(self, sequence: Sequence) -> None:
        """Its pages have been copied out: they are free, and it keeps its place until the copy has arrived."""
        self.running.remove(sequence)
        self._release(sequence)
        self.sending.append(sequence)

    def received(self, sequence: Sequence) -> None:
        """Its pages hold its prompt now: it runs from here on as any other."""
        self.transferring.remove(sequence)
        sequence.awaits_pages = False
        sequence.computed = len(sequence.tokens)
        insort(self.running, sequence, key=self._rank)

    def plan(self) -> StepPlan:
        """The next step; pages for all that it writes are taken."""
        step = StepPlan()
        self._preempt(step)
        self._plan_decode(step)
        budget = self._plan_started_prefill(step)
        left = self._admit(step, budget)
        self.unplaced = len(self.waiting) if left > 0 else 0
        return step

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """Take it out, wherever it is, and free its pages at once; its full ones stay in the prefix cache."""
        self._take_out(sequence, finish)
        self._release(sequence)

    def abort(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        aborted = [sequence for sequence in self.sequences() if matches(sequence)]
        for sequence in aborted:
            self.finish(sequence, Finish(FinishReason.ABORT))
        return aborted

    def contain(self, sequence: Sequence, stale_pages: list[int], failure: Failure) -> None:
        """It holds pages that are no longer its own: it ends, nothing of it is cached, they go out of circulation."""
        self._take_out(sequence, Finish(FinishReason.ABORT, failure=failure))
        if self.prefix is not None:
            self.prefix.condemn(sequence.prefix, stale_pages)
        self.allocator.abort(stale_pages)
        self._free(sequence)

    def cache_prompt(self, sequence: Sequence) -> None:
        """Its prompt is computed: others may use it from now on."""
        self._adopt(sequence)

    def sequences(self) -> Iterator[Sequence]:
        for group in self._groups():
            yield from group

    def check_integrity(self) -> None:
        holders = [*self.running, *self.transferring]
        owned = [sequence.own_claim for sequence in holders]
        if self.prefix is not None:
            self.prefix.check_integrity()
            owned += self.prefix.claims(sequence.prefix for sequence in holders)
        self.allocator.check_integrity(owned)
        for sequence in holders:
            assert len(sequence.pages) == len(sequence.tags), "a page without a tag"
            assert sequence.computed >= sequence.shared_pages * self.allocator.page_size, "a shared page is not full"
        for sequence in (*self.waiting, *self.parked, *self.sending):
            assert not sequence.pages, "a sequence that does not run holds pages"
            assert sequence.prefix is None, "a sequence that does not run holds cached pages"
        assert self._places == len(holders) + len(self.sending) <= self._max_running
        for group in (self.running, self.waiting):
            ranks = [self._rank(sequence) for sequence in group]
            assert ranks == sorted(ranks), "out of order"

    @property
    def _places(self) -> int:
        """How many of `max_running_requests` are taken: a process that sends slowly is not to fill its memory."""
        return len(self.running) + len(self.transferring) + len(self.sending)

    def _groups(self) -> tuple[list[Sequence], ...]:
        return self.running, self.transferring, self.sending, self.waiting, self.parked

    def _number(self, sequence: Sequence) -> None:
        needed = sequence.prompt_tokens + sequence.max_new_tokens
        assert needed <= self.allocator.total_tokens, "a sequence that can never fit must be refused before"
        sequence.number = self._arrivals
        self._arrivals += 1

    def _rank(self, sequence: Sequence) -> tuple[int, int]:
        """Less is sooner."""
        return (0 if self._threshold is None else -sequence.priority, sequence.number)

    def _preempt(self, step: StepPlan) -> None:
        """The first in the queue takes the place of running ones that rank far enough below it, if that suffices."""
        if self._threshold is None or not self.waiting:
            return
        head = self.waiting[0]
        needed = self.allocator.pages_for(len(head.tokens))
        victims: list[Sequence] = []
        freed = 0
        for sequence in reversed(self.running):
            running = self._places - len(victims)
            if needed + running <= self.available_pages + freed and running < self._max_running:
                break
            if head.priority - sequence.priority < self._threshold:
                return
            victims.append(sequence)
            freed += len(sequence.pages) - sequence.shared_pages
        for victim in victims:
            self._retract(victim)
        step.retracted += victims

    def _plan_decode(self, step: StepPlan) -> None:
        for sequence in list(self.running):
            if sequence.uncomputed != 1 or sequence not in self.running:
                continue
            if self._grow(sequence, step):
                step.decode.append(sequence)

    def _grow(self, sequence: Sequence, step: StepPlan) -> bool:
        """Make room for its next token, at the expense of lower ranks; False when it had to yield itself."""
        missing = self.allocator.pages_for(len(sequence.tokens)) - len(sequence.pages)
        assert missing <= 1
        while not self._make_free(missing):
            victim = self.running[-1]
            if victim is sequence and self.transferring:
                return False  # it waits for a page, as it is: what arrives for a later one can be retracted then
            self._retract(victim)
            step.retracted.append(victim)
            if victim is sequence:
                return False
        if missing:
            self._take_pages(sequence, missing)
        return True

    def _make_free(self, pages: int) -> bool:
        """Evict until so many pages are free."""
        if self.allocator.free_pages >= pages:
            return True
        return self.prefix is not None and self.prefix.evict(pages)

    def _take_pages(self, sequence: Sequence, count: int) -> None:
        claim = self.allocator.allocate(count)
        assert claim is not None
        sequence.pages += claim.pages
        sequence.tags += claim.tags

    def _retract(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._release(victim)
        victim.retractions += 1
        insort(self.waiting, victim, key=self._rank)

    def _take_out(self, sequence: Sequence, finish: Finish) -> None:
        assert sequence.finish is None
        sequence.finish = finish
        next(group for group in self._groups() if sequence in group).remove(sequence)

    def _adopt(self, sequence: Sequence) -> None:
        if self.prefix is not None:
            known = sequence.tokens[: sequence.computed]
            sequence.prefix = self.prefix.adopt(
                sequence.cache_scope, known, sequence.prefix, sequence.pages, sequence.tags
            )

    def _release(self, sequence: Sequence) -> None:
        self._adopt(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.allocator.free(sequence.own_claim)
        if self.prefix is not None:
            self.prefix.unlock(sequence.prefix)
        sequence.pages, sequence.tags, sequence.prefix = [], [], None
        sequence.computed = 0

    def _plan_started_prefill(self, step: StepPlan) -> int:
        budget = self._chunk_tokens
        for sequence in self.running:
            if sequence.uncomputed > 1 and budget > 0:
                budget -= self._add_chunk(step, sequence, budget)
        return budget

    def _admit(self, step: StepPlan, budget: int) -> int:
        """In order of rank: a head that does not fit blocks the rest, or small requests would starve it.

        What is left of the budget.
        """
        while self.waiting and budget > 0 and self._places < self._max_running and not step.retracted:
            sequence = self.waiting[0]
            if not self._place(sequence):
                if self.running or self.transferring:
                    return budget
                self.finish(sequence, Finish(FinishReason.ABORT, failure=TOO_BIG))
                step.failed.append(sequence)
                continue
            self.waiting.pop(0)
            if sequence.awaits_pages:
                self.transferring.append(sequence)
                step.ready_to_receive.append(sequence)
                continue
            insort(self.running, sequence, key=self._rank)
            budget -= self._add_chunk(step, sequence, budget)
        return budget

    def _place(self, sequence: Sequence) -> bool:
        """Give it the cached pages of its tokens and new ones for the rest; False, and nothing, without room."""
        prefix = None if self.prefix is None else self.prefix.lock_longest(sequence.cache_scope, sequence.tokens)
        cached = 0 if prefix is None else prefix.depth
        needed = self.allocator.pages_for(len(sequence.tokens)) - cached
        # One page of air for each running sequence, lest the newcomer be retracted within its first page.
        if needed + len(self.running) + len(self.transferring) > self.available_pages or not self._make_free(needed):
            if self.prefix is not None:
                self.prefix.unlock(prefix)
            return False
        if self.prefix is not None and prefix is not None:
            held = self.prefix.claim(prefix)
            sequence.pages, sequence.tags, sequence.prefix = list(held.pages), list(held.tags), prefix
        self._take_pages(sequence, needed)
        sequence.computed = cached * self.allocator.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        return True

    def _add_chunk(self, step: StepPlan, sequence: Sequence, budget: int) -> int:
        count = min(budget, sequence.uncomputed)
        step.prefill.append(Chunk(sequence, sequence.computed, count))
        return count
