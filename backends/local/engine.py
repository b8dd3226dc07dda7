"""One step after the other: plan, compute, sample, report. `worker.py` drives it in its thread, tests directly.

Owns everything that belongs to running requests. Knows no HTTP, no thread and no clock but the one handed in.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from backends.local.detokenizer import TextStream
from backends.local.errors import StartError
from backends.local.kv.pages import PageAllocator
from backends.local.kv.pool import KVPool, stored_dtype
from backends.local.kv.prefix import PrefixCache
from backends.local.kv.transport import layout_of, pack, packed_bytes, unpack
from backends.local.models.llama import Llama, LlamaConfig
from backends.local.pair.handover import GARBLED, Handover, checksum, digest
from backends.local.runner import ModelRunner
from backends.local.sampling import Sampled, Sampler
from backends.local.scheduler import Scheduler, StepPlan
from backends.local.sequence import Failure, Finish, FinishReason, SamplingParams, Sequence, TokenLogprob
from backends.local.settings import EngineSettings, Role
from backends.local.threads import ThreadChooser
from backends.page_tags import ABORT_MESSAGE, ABORT_STATUS, ABORT_TYPE
from backends.page_tags.check import StepCheck
from backends.page_tags.table import TagTable

log = structlog.get_logger(__name__)

INTEGRITY_ABORT = Failure(int(ABORT_STATUS), ABORT_TYPE, ABORT_MESSAGE)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one step did for one request."""

    rid: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    first_token_seconds: float | None = None
    """Set on the first token: how long it took from arrival."""
    gap_seconds: float | None = None
    """Set on all later ones: how long after the token before."""
    cached_tokens: int = 0
    """Of the prompt's."""


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """A request of a decode process has pages for its prompt: what is to be on them may come."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class PagesReady:
    """A request of a prefill process is computed: its pages are to go to the decode process."""

    rid: str
    handover: Handover


Event = TokenEvent | PagesWanted | PagesReady


@dataclass(slots=True)
class Totals:
    """Counts since the start; they only grow."""

    prompt_tokens: int = 0
    """Of requests that produced a token; computing them again after a retraction does not count."""
    cached_tokens: int = 0
    """Of these prompt tokens: those that were found in the prefix cache."""
    generated_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    retractions: int = 0


class Engine:
    def __init__(self, model: Llama, settings: EngineSettings, clock: Callable[[], float]) -> None:
        config = model.config
        pages = pool_pages(config, settings)
        tags = TagTable(pages) if settings.page_tags else None
        self._check = None if tags is None else StepCheck(tags)
        self.allocator = PageAllocator(pages, settings.page_size, tags=tags)
        self.scheduler = Scheduler(
            self.allocator,
            prefix=None if settings.disable_radix_cache else PrefixCache(self.allocator),
            max_running_requests=settings.max_running_requests,
            max_queued_requests=settings.max_queued_requests,
            chunked_prefill_size=settings.chunked_prefill_size,
            preemption_threshold=settings.preemption_threshold,
        )
        self._prefills = settings.role is Role.PREFILL
        self.totals = Totals()
        self.stalled = False
        """The latest step could do nothing: every page is held for what other processes have not sent yet."""
        self._pool = KVPool(
            layers=config.layers,
            pages=pages,
            page_size=settings.page_size,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            dtype=config.dtype,
            stored=stored_dtype(settings.kv_cache_dtype, config.dtype),
        )
        # A set number of threads is kept; otherwise the engine finds out what the machine bears.
        threads = ThreadChooser(torch.get_num_threads()) if settings.threads is None else None
        self._runner = ModelRunner(
            model,
            self._pool,
            prefill_weights=settings.prefill_weights,
            decode_weights=settings.decode_weights,
            threads=threads,
            clock=clock,
        )
        self.weight_bytes = model.weight_bytes
        self._sampler = Sampler(config.vocabulary)
        self._clock = clock

    @property
    def idle(self) -> bool:
        """Nothing can be computed now; other processes may still be waited for."""
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def pairs_checked(self) -> int:
        """(page, tag) pairs compared since the start."""
        return 0 if self._check is None else self._check.pairs_checked

    def submit(self, sequence: Sequence) -> list[TokenEvent]:
        """Let it wait; the last event of one that was turned away for it, if any was."""
        if self._prefills and sequence.bootstrap is not None:
            self.scheduler.park(sequence)
            return []
        displaced = self.scheduler.add(sequence)
        return [] if displaced is None else [self._given_up(displaced)]

    def abort(self, matches: Callable[[Sequence], bool]) -> list[TokenEvent]:
        """End all that match; their pages are free when this returns."""
        return [self._given_up(sequence) for sequence in self.scheduler.abort(matches)]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        plan = self.scheduler.plan()
        self.totals.retractions += len(plan.retracted)
        self.stalled = plan.empty and not (plan.retracted or plan.failed or plan.ready_to_receive)
        events: list[Event] = [self._given_up(sequence) for sequence in plan.failed]
        events += [PagesWanted(sequence) for sequence in plan.ready_to_receive]
        events += self._stop_holders_of_foreign_pages(plan)
        if plan.empty:
            return events
        sequences, logits = self._runner.run(plan)
        self._record_progress(plan)
        if logits is None:
            return events
        sampled = self._sampler.sample(logits, sequences)
        now = self._clock()
        for sequence, one in zip(sequences, sampled, strict=True):
            hands_over = self._prefills and sequence.bootstrap is not None
            events.append(self._hand_over(sequence, one) if hands_over else self._append(sequence, one, now))
        return events

    def decode_joined(self, rid: str) -> None:
        """Somebody waits for the pages of this request of a prefill process."""
        for sequence in _named(rid, self.scheduler.parked):
            self.scheduler.release(sequence)

    def pages_sent(self, rid: str) -> list[TokenEvent]:
        """The other process has them: the request ends here, with the one token that it sampled."""
        events = []
        for sequence in _named(rid, self.scheduler.sending):
            text, _ = _advance_text(sequence, sequence.tokens[-1])
            self.scheduler.finish(sequence, Finish(FinishReason.LENGTH))
            self._sampler.forget(sequence)
            self.totals.finished_requests += 1
            events.append(_event(sequence, text))
        return events

    def receive(self, rid: str, handover: Handover) -> list[TokenEvent]:
        """A prompt's pages have come. Pages change hands here, so their tags are compared before they are written."""
        return [
            event for sequence in _named(rid, self.scheduler.transferring) for event in self._take(sequence, handover)
        ]

    def fail(self, rid: str, failure: Failure) -> list[TokenEvent]:
        """Give up a request for a reason that lies outside."""
        events = []
        for sequence in _named(rid, list(self.scheduler.sequences())):
            self.scheduler.finish(sequence, Finish(FinishReason.ABORT, failure=failure))
            events.append(self._given_up(sequence))
        return events

    def flush_cache(self) -> None:
        """Forget every cached prefix that no request holds."""
        if self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()

    def warm_up(self) -> None:
        """Run every product once, lest the first request pay for oneDNN's code generation; in as many threads as the
        caller has set.
        """
        chooser, self._runner.threads = self._runner.threads, None
        text = TextStream([])
        sampling = SamplingParams(temperature=0.0)
        self.submit(Sequence(rid="", prompt_tokens=1, tokens=[0], max_new_tokens=2, sampling=sampling, text=text))
        while not self.idle:
            self.step()
        self.flush_cache()
        self.totals = Totals()
        self._runner.threads = chooser

    def check_integrity(self) -> None:
        """An idle engine's pages in use are thus exactly those of its prefix cache."""
        self.scheduler.check_integrity()

    def _stop_holders_of_foreign_pages(self, plan: StepPlan) -> list[TokenEvent]:
        """Compare what the step's sequences remember of their pages with the pages' tags, all at once, before anything
        is read or written. A sequence with a page that is not its own any more is taken out of the step and ends.
        """
        if self._check is None or plan.empty:
            return []
        claims = plan.claims(self.allocator.page_size)
        stale = self._check.stale_pages([claim for _, claim in claims])
        events = []
        for position, pages in stale.items():
            sequence, _ = claims[position]
            plan.drop(sequence)
            self.scheduler.contain(sequence, pages, INTEGRITY_ABORT)
            log.error("page_changed_hands", rid=sequence.rid, pages=pages)
            events.append(self._given_up(sequence))
        return events

    def _hand_over(self, sequence: Sequence, sampled: Sampled) -> PagesReady:
        data = pack(self._pool, sequence.pages)
        handover = Handover(
            prompt_digest=digest(sequence.tokens),
            layout=layout_of(self._pool),
            first_token=sampled.token_id,
            logprob=sampled.logprob,
            cached_tokens=sequence.cached_tokens or 0,
            data=data,
            checksum=checksum(data),
        )
        self.scheduler.send(sequence)
        sequence.tokens.append(sampled.token_id)
        self.totals.prompt_tokens += sequence.prompt_tokens
        self.totals.cached_tokens += sequence.cached_tokens or 0
        self.totals.generated_tokens += 1
        return PagesReady(sequence.rid, handover)

    def _take(self, sequence: Sequence, handover: Handover) -> list[TokenEvent]:
        stale = None if self._check is None else self._check.stale_pages([sequence.claim(len(sequence.pages))])
        if stale:
            self.scheduler.contain(sequence, stale[0], INTEGRITY_ABORT)
            log.error("page_changed_hands", rid=sequence.rid, pages=stale[0])
            return [self._given_up(sequence)]
        size = packed_bytes(self._pool, len(sequence.pages))
        if not handover.belongs_to(sequence.tokens, layout_of(self._pool), size):
            log.error("pages_garbled", rid=sequence.rid)
            return self.fail(sequence.rid, GARBLED)
        assert isinstance(handover.data, bytearray)
        unpack(self._pool, sequence.pages, handover.data, skip=sequence.shared_pages)
        self.scheduler.received(sequence)
        self.scheduler.cache_prompt(sequence)
        sequence.cached_tokens = handover.cached_tokens
        if not sequence.sampling.greedy:
            sequence.rng.random()  # the draw that the other process made of the same stream
        return [self._append(sequence, Sampled(handover.first_token, handover.logprob), self._clock())]

    def _given_up(self, sequence: Sequence) -> TokenEvent:
        self._sampler.forget(sequence)
        self.totals.aborted_requests += 1
        return _event(sequence, sequence.text.flush())

    def _record_progress(self, plan: StepPlan) -> None:
        for sequence in plan.decode:
            sequence.computed += 1
        for chunk in plan.prefill:
            chunk.sequence.computed = chunk.end
            if chunk.completes:
                self.scheduler.cache_prompt(chunk.sequence)

    def _append(self, sequence: Sequence, sampled: Sampled, now: float) -> TokenEvent:
        sequence.tokens.append(sampled.token_id)
        self.totals.generated_tokens += 1
        first_token_seconds = gap_seconds = None
        if sequence.last_token_at is None:
            first_token_seconds = now - sequence.arrived_at
            self.totals.prompt_tokens += sequence.prompt_tokens
            self.totals.cached_tokens += sequence.cached_tokens or 0
        else:
            gap_seconds = now - sequence.last_token_at
        sequence.last_token_at = now
        text, finish = _advance_text(sequence, sampled.token_id)
        if finish is not None:
            self.scheduler.finish(sequence, finish)
            self._sampler.forget(sequence)
            self.totals.finished_requests += 1
        return _event(sequence, text, sampled.logprob, first_token_seconds, gap_seconds)


def page_bytes(config: LlamaConfig, settings: EngineSettings) -> int:
    return KVPool.page_bytes(
        layers=config.layers,
        page_size=settings.page_size,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        stored=stored_dtype(settings.kv_cache_dtype, config.dtype),
    )


def pool_pages(config: LlamaConfig, settings: EngineSettings) -> int:
    """How many pages the set number of tokens or bytes gives; known before any weight is read."""
    if settings.max_total_tokens is not None:
        pages = settings.max_total_tokens // settings.page_size
        if pages < 1:
            raise StartError(f"--max-total-tokens {settings.max_total_tokens} is less than one page.")
        return pages
    size = page_bytes(config, settings)
    pages = settings.kv_cache_bytes // size
    if pages < 1:
        raise StartError(f"--kv-cache-bytes {settings.kv_cache_bytes} is less than one page of {size} bytes.")
    return pages


def _named(rid: str, sequences: list[Sequence]) -> list[Sequence]:
    """The one with this id, if it is still there."""
    return [sequence for sequence in sequences if sequence.rid == rid]


def _advance_text(sequence: Sequence, token: int) -> tuple[str, Finish | None]:
    """What the token shows, and whether it ends the answer. A token that stops is not shown itself."""
    if token in sequence.stop_token_ids:
        return sequence.text.flush(), Finish(FinishReason.STOP, token)
    text = sequence.text.push(token)
    finish = _guided(sequence, token)
    if finish is not None:
        return text + sequence.text.flush(), finish
    if sequence.text.matched_stop is None and sequence.completion_tokens >= sequence.max_new_tokens:
        finish = Finish(FinishReason.LENGTH)
        text += sequence.text.flush()
    if sequence.text.matched_stop is not None:
        finish = Finish(FinishReason.STOP, sequence.text.matched_stop)
    return text, finish


_TOO_COSTLY = Failure(400, "BadRequestError", "The grammar of this request turned out too costly while it ran.")


def _guided(sequence: Sequence, token: int) -> Finish | None:
    """The end of an answer whose grammar leaves nothing more to say, or that can't be held to it any more."""
    guide = sequence.guide
    if guide is None:
        return None
    guide.take(token)
    if guide.failed:
        return Finish(FinishReason.ABORT, failure=_TOO_COSTLY)
    return Finish(FinishReason.STOP, token) if guide.complete else None


def _event(
    sequence: Sequence,
    text: str,
    logprob: TokenLogprob | None = None,
    first_token_seconds: float | None = None,
    gap_seconds: float | None = None,
) -> TokenEvent:
    return TokenEvent(
        sequence.rid,
        text,
        sequence.prompt_tokens,
        sequence.completion_tokens,
        logprob,
        sequence.finish,
        first_token_seconds,
        gap_seconds,
        sequence.cached_tokens or 0,
    )
