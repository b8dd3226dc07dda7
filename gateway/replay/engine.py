"""A simulated engine that admits, decodes and retracts by SGLang's rules, on a step-time profile. For replay only.

Its loop is SGLang's: a prefill batch goes before any decode step; arrivals enter first come, first served while the
prompt and min(ceiling, clip) fit beside what running requests keep reserved, min(left, clip) × new_token_ratio each;
long prompts go in chunks. The ratio falls with every decode step. When a step's pages can't be had, requests are
retracted, fewest outputs first, and wait to be prefilled again. Decode steps between two events are taken in one leap.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.prefixes import BLOCK_TOKENS
from gateway.replay.pool import Pool
from gateway.replay.profiles import Profile
from gateway.replay.requests import Fate, SimulatedRequest

# SGLang's defaults (environ.py and schedule_policy.py of 0.5.17).
_INIT_RATIO = 0.7
_MIN_RATIO_FACTOR = 0.14
_RATIO_DECAY_STEPS = 600
_RETRACT_STEPS = 20
# While somebody waits for memory the queue is looked at again at least this often, for the ratio falls.
_BLOCKED_LEAP = 8


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request inside the engine. tail_tokens: tokens in private pages. start: the decode step of its first token."""

    request: SimulatedRequest
    blocks: tuple[int, ...] = ()  # locked
    tail_tokens: int = 0
    to_prefill: int = 0
    context: int = 0
    start: int = 0


@dataclass(slots=True)
class Totals:
    """What the engine has done. wasted_tokens: prefilled or decoded again after a retraction."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    retractions: int = 0
    retracted_tokens: int = 0
    wasted_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Moment:
    """What an iteration of the engine did, as far as others can see it."""

    first: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)
    prefilled_tokens: int = 0
    attended: float = 0.0
    steps: int = 0
    seconds: float = 0.0


class Engine:
    """clock: where its own loop stands. An iteration is not interrupted, so it may be ahead of who drives it."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.clock = 0.0
        self.pool = Pool(profile.total_tokens, profile.page_tokens)
        self.totals = Totals()
        self._page = profile.page_tokens
        self._ratio_start = min(1.0, _INIT_RATIO * profile.conservativeness)
        self._ratio_least = self._ratio_start * _MIN_RATIO_FACTOR
        self._ratio_decay = (self._ratio_start - self._ratio_least) / _RATIO_DECAY_STEPS
        self.new_token_ratio = self._ratio_start
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._chunked: _Sequence | None = None
        self._ends: list[tuple[int, str]] = []
        self._step = 0
        self._kv_tokens = 0  # context of all running requests, read in each step
        # Running requests by the step, modulo the page, at which they need a page.
        self._phases = [0] * self._page

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._chunked)

    @property
    def running_count(self) -> int:
        return len(self._running) + (self._chunked is not None)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def left_waiting(self) -> Iterator[str]:
        """Those who waited through the last iteration for the first time."""
        for sequence in self._waiting:
            if sequence.request.prefill_at is None:
                yield sequence.request.id

    def produced(self, request: SimulatedRequest) -> int:
        """Output tokens by now."""
        sequence = self._running.get(request.id)
        if sequence is None:
            return request.produced
        return request.produced + self._step - sequence.start

    def residents(self) -> Iterator[tuple[int, int]]:
        """Of each running request: its private tokens in whole pages, and what it truly has still to produce."""
        for sequence in self._running.values():
            grown = self._step - sequence.start
            pages = -(-(sequence.tail_tokens + grown) // self._page)
            yield pages * self._page, sequence.request.output_tokens - sequence.request.produced - grown

    def submit(self, request: SimulatedRequest, now: float) -> None:
        if self.idle:
            self.clock = max(self.clock, now)
            self.new_token_ratio = self._ratio_start  # SGLang starts anew when it has been idle
        request.sent_at = now
        request.fate = Fate.SENT
        self._waiting.append(_Sequence(request))

    def run(self, until: float) -> Moment | None:
        """One iteration, or None if the clock has reached `until` or nothing is to do."""
        if self.clock >= until or self.idle:
            return None
        batch = self._prefill_batch()
        if batch:
            return self._prefill(batch)
        if self._running:
            return self._decode(until)
        raise AssertionError("a request that fits an empty pool always starts")

    # Prefill

    def _prefill_batch(self) -> list[tuple[_Sequence, int]]:
        """Sequences and how many of their tokens are prefilled now."""
        batch: list[tuple[_Sequence, int]] = []
        budget = self.profile.chunk_tokens
        if self._chunked is not None:
            tokens = self._take_chunk(self._chunked, budget)
            batch.append((self._chunked, tokens))
            budget -= tokens
            if self._chunked.to_prefill:
                return batch
        if not self._waiting:
            return batch
        rem = self._reserve_free()
        while self._waiting and budget > 0 and len(self._running) + len(batch) < self.profile.running_max:
            sequence = self._waiting[0]
            need, matched = self._need(sequence)
            alone = not self._running and not batch
            if need >= rem - self._pinned(sequence, matched) and not alone:
                break
            self._waiting.popleft()
            self._start(sequence, matched)
            tokens = self._take_chunk(sequence, budget)
            batch.append((sequence, tokens))
            budget -= tokens
            rem -= need
            if sequence.to_prefill:
                self._chunked = sequence
                break
        return batch

    def _reserve_free(self) -> float:
        clip, step = self.profile.clip_tokens, self._step
        reserved = sum(
            min(sequence.request.ceiling - sequence.request.produced - step + sequence.start, clip)
            for sequence in self._running.values()
        )
        chunked = self._chunked
        if chunked is not None:
            reserved += chunked.to_prefill + min(chunked.request.ceiling - chunked.request.produced, clip)
        return self.pool.available_pages * self._page - reserved * self.new_token_ratio

    def _need(self, sequence: _Sequence) -> tuple[int, int]:
        """Tokens that must fit for it to start, and how many cached blocks it begins with."""
        request = sequence.request
        # The last prompt token is always computed: its logits give the first output.
        most = (request.prompt_tokens - 1) // BLOCK_TOKENS
        matched = min(most, self.pool.matched(request.blocks))
        extend = request.prompt_tokens + request.produced - matched * BLOCK_TOKENS
        return extend + min(request.ceiling - request.produced, self.profile.clip_tokens), matched

    def _pinned(self, sequence: _Sequence, matched: int) -> int:
        """Tokens that locking its cached prefix takes from the evictable ones."""
        return self.pool.matched_evictable(sequence.request.blocks, matched) * BLOCK_TOKENS

    def _start(self, sequence: _Sequence, matched: int) -> None:
        request = sequence.request
        sequence.blocks = request.blocks[:matched]
        self.pool.lock(sequence.blocks)
        sequence.context = matched * BLOCK_TOKENS
        sequence.to_prefill = request.prompt_tokens + request.produced - sequence.context
        if request.prefill_at is None:
            request.prefill_at = self.clock
            request.cached_tokens = sequence.context

    def _take_chunk(self, sequence: _Sequence, budget: int) -> int:
        room = (self.pool.available_pages + self._pages(sequence.tail_tokens)) * self._page - sequence.tail_tokens
        tokens = min(sequence.to_prefill, budget, room)
        if tokens < min(sequence.to_prefill, budget):
            # Decoding took what the chunk needs: running requests give way, as in SGLang.
            while self._running and tokens < min(sequence.to_prefill, budget):
                self._retract_one()
                free = self.pool.available_pages + self._pages(sequence.tail_tokens)
                tokens = min(sequence.to_prefill, budget, free * self._page - sequence.tail_tokens)
        before = self._pages(sequence.tail_tokens)
        sequence.tail_tokens += tokens
        sequence.to_prefill -= tokens
        self.pool.take(self._pages(sequence.tail_tokens) - before)
        return tokens

    def _prefill(self, batch: list[tuple[_Sequence, int]]) -> Moment:
        attended = 0.0
        total = 0
        for sequence, tokens in batch:
            attended += tokens * (sequence.context + tokens / 2)
            sequence.context += tokens
            total += tokens
        moment = Moment(prefilled_tokens=total, attended=attended, seconds=self.profile.steps.prefill(total, attended))
        self._pass(moment)
        self.totals.prefilled_tokens += total
        for sequence, _ in batch:
            if not sequence.to_prefill:
                self._begin_decoding(sequence, moment)
        return moment

    def _begin_decoding(self, sequence: _Sequence, moment: Moment) -> None:
        """Its prefill is over, which gave one token."""
        request = sequence.request
        if sequence is self._chunked:
            self._chunked = None
        own = request.blocks[len(sequence.blocks) :]
        self.pool.keep(own)
        sequence.tail_tokens -= len(own) * BLOCK_TOKENS
        sequence.blocks = request.blocks
        if request.first_at is None:
            request.first_at = self.clock
            moment.first.append(request)
        request.produced += 1
        self.totals.decoded_tokens += 1
        if request.produced >= request.output_tokens:
            self._finish(sequence, moment)
            return
        sequence.start = self._step
        self._running[request.id] = sequence
        self._kv_tokens += request.prompt_tokens + request.produced
        self._phases[(sequence.tail_tokens - self._step) % self._page] += 1
        heapq.heappush(self._ends, (self._step + request.output_tokens - request.produced, request.id))

    # Decode

    def _decode(self, until: float) -> Moment:
        count = self._leap(until)
        if count < 1:
            self._make_room()
            count = 1
        self.pool.take(self._new_pages(count))
        streams = len(self._running)
        moment = Moment(steps=count, seconds=self._decode_s(count))
        self._step += count
        self._kv_tokens += count * streams
        self._pass(moment)
        self.totals.steps += count
        self.totals.decoded_tokens += count * streams
        self.new_token_ratio = max(self._ratio_least, self.new_token_ratio - count * self._ratio_decay)
        while self._ends and self._ends[0][0] <= self._step:
            end, request_id = heapq.heappop(self._ends)
            sequence = self._running.get(request_id)
            if sequence is not None and end == sequence.start + self._left(sequence):
                self._stop(sequence)
                self._finish(sequence, moment)
        return moment

    @staticmethod
    def _left(sequence: _Sequence) -> int:
        return sequence.request.output_tokens - sequence.request.produced

    def _leap(self, until: float) -> int:
        """Steps until the next end, the time `until`, or the pool's; 0 if not even one step's pages are there."""
        while self._ends:
            end, request_id = self._ends[0]
            sequence = self._running.get(request_id)
            if sequence is not None and end == sequence.start + self._left(sequence):
                break
            heapq.heappop(self._ends)  # retracted meanwhile
        count = self._ends[0][0] - self._step
        if self._waiting:
            count = min(count, _BLOCKED_LEAP)
        if until < math.inf:
            count = min(count, max(1, math.ceil((until - self.clock) / self._decode_s(1))))
        available = self.pool.available_pages
        while count and self._new_pages(count) > available:
            count = min(count - 1, available * self._page // len(self._running))
        return count

    def _decode_s(self, count: int) -> float:
        streams, steps = len(self._running), self.profile.steps
        return count * steps.decode(streams, self._kv_tokens) + steps.per_kv_token * streams * count * (count - 1) / 2

    def _new_pages(self, count: int) -> int:
        """Pages that running requests need in the next `count` steps. One is needed where the tail fills its pages."""
        turns, rest = divmod(count, self._page)
        pages = turns * len(self._running)
        for step in range(self._step, self._step + rest):
            pages += self._phases[-step % self._page]
        return pages

    # Leaving

    def _stop(self, sequence: _Sequence) -> None:
        """Out of the running ones; its outputs so far become its own."""
        request = sequence.request
        del self._running[request.id]
        grown = self._step - sequence.start
        self._phases[(sequence.tail_tokens - sequence.start) % self._page] -= 1
        sequence.tail_tokens += grown
        request.produced += grown
        self._kv_tokens -= request.prompt_tokens + request.produced

    def _finish(self, sequence: _Sequence, moment: Moment) -> None:
        request = sequence.request
        request.finished_at = self.clock
        request.fate = Fate.FINISHED
        self._release(sequence)
        moment.finished.append(request)

    def _release(self, sequence: _Sequence) -> None:
        self.pool.give_back(self._pages(sequence.tail_tokens))
        self.pool.unlock(sequence.blocks)
        sequence.blocks, sequence.tail_tokens, sequence.context = (), 0, 0

    def _make_room(self) -> None:
        """Retract at least one, then until the others have room for twenty steps; the last one stays."""
        assert len(self._running) > 1, "a request that fits the pool alone is never retracted"
        self._retract_one()
        while len(self._running) > 1 and (
            self.pool.available_pages * self._page < _RETRACT_STEPS * len(self._running)
            or self._new_pages(1) > self.pool.available_pages
        ):
            self._retract_one()
        self._forgive_after_retraction()

    def _retract_one(self) -> None:
        """Fewest outputs first, of equals the longest prompt; it waits again, behind the others."""
        sequence = min(
            self._running.values(),
            key=lambda each: (each.request.produced + self._step - each.start, -each.request.prompt_tokens),
        )
        self._stop(sequence)
        self._release(sequence)
        request = sequence.request
        request.retractions += 1
        self.totals.retractions += 1
        self.totals.retracted_tokens += request.produced
        self.totals.wasted_tokens += request.prompt_tokens + request.produced
        self._waiting.append(_Sequence(request))

    def _forgive_after_retraction(self) -> None:
        produced = ceiling = 0
        for sequence in self._running.values():
            produced += sequence.request.produced + self._step - sequence.start
            ceiling += sequence.request.ceiling
        ratio = (produced + _RETRACT_STEPS * len(self._running)) / max(1, ceiling)
        self.new_token_ratio = min(1.0, ratio)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def _pass(self, moment: Moment) -> None:
        self.clock += moment.seconds
        self.totals.busy_s += moment.seconds
