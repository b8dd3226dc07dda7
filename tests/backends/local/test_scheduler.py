from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.detokenizer import TextStream
from backends.local.kv.pages import PageAllocator
from backends.local.kv.prefix import PrefixCache
from backends.local.scheduler import DISPLACED, TOO_BIG, Scheduler, StepPlan
from backends.local.sequence import Failure, Finish, FinishReason, SamplingParams, Sequence
from backends.page_tags.table import TagTable

PAGE = 4
FOREIGN = Failure(500, "integrity_abort", "a page changed hands")


def make_sequence(number: int, prompt: int, output: int, *, priority: int = 0, scope: str = "") -> Sequence:
    return Sequence(
        rid=f"{number:04}",
        prompt_tokens=prompt,
        tokens=[1] * prompt,
        max_new_tokens=output,
        sampling=SamplingParams(),
        text=TextStream([]),
        priority=priority,
        cache_scope=scope,
    )


def make_scheduler(pages: int = 16, running: int = 8, chunk: int = 8, **options: Any) -> Scheduler:
    """Without a prefix cache."""
    return Scheduler(
        PageAllocator(pages, PAGE, tags=TagTable(pages)),
        max_running_requests=running,
        chunked_prefill_size=chunk,
        **options,
    )


def make_caching_scheduler(pages: int = 16, running: int = 8, chunk: int = 8, **options: Any) -> Scheduler:
    allocator = PageAllocator(pages, PAGE, tags=TagTable(pages))
    return Scheduler(
        allocator,
        prefix=PrefixCache(allocator),
        max_running_requests=running,
        chunked_prefill_size=chunk,
        **options,
    )


def execute(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does with a plan, without a model."""
    for sequence in plan.decode:
        sequence.computed += 1
        produce(scheduler, sequence)
    for chunk in plan.prefill:
        chunk.sequence.computed = chunk.end
        if chunk.completes:
            scheduler.cache_prompt(chunk.sequence)
            produce(scheduler, chunk.sequence)


def produce(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.tokens.append(1)
    if sequence.completion_tokens == sequence.max_new_tokens:
        scheduler.finish(sequence, Finish(FinishReason.LENGTH))


def check(scheduler: Scheduler, plan: StepPlan, chunk: int) -> None:
    scheduler.check_integrity()
    allocator = scheduler.allocator
    used = {page for one in scheduler.running for page in one.pages[one.shared_pages :]}
    shared = {page for one in scheduler.running for page in one.pages[: one.shared_pages]}
    assert not used & shared
    free = allocator.free_pages + scheduler.evictable_pages
    assert len(used) + len(shared) + free + allocator.withheld_pages == allocator.total_pages
    assert sum(part.count for part in plan.prefill) <= chunk
    planned = [*plan.decode, *(part.sequence for part in plan.prefill)]
    assert len({id(sequence) for sequence in planned}) == len(planned), "nobody runs twice in a step"
    for sequence in planned:
        assert sequence in scheduler.running
    for sequence in plan.decode:
        assert len(sequence.pages) * PAGE >= len(sequence.tokens), "there is a slot for the token it writes"
    for part in plan.prefill:
        assert part.count > 0
        assert len(part.sequence.pages) * PAGE >= part.end


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=14)


@given(arrivals=requests, pages=st.integers(15, 24), running=st.integers(1, 6), chunk=st.integers(1, 20))
def test_every_request_ends_and_pages_always_add_up(
    arrivals: list[tuple[int, int, int]], pages: int, running: int, chunk: int
) -> None:
    scheduler = make_scheduler(pages, running, chunk)
    pending = [(make_sequence(at, prompt, output), delay) for at, (prompt, output, delay) in enumerate(arrivals)]
    everyone = [sequence for sequence, _ in pending]
    patience = sum(prompt + output + delay for prompt, output, delay in arrivals) * len(arrivals) + 10
    for _ in range(patience):
        if not pending and all(sequence.finish for sequence in everyone):
            break
        while pending and pending[0][1] <= 0:
            scheduler.add(pending.pop(0)[0])
        if pending:
            pending[0] = (pending[0][0], pending[0][1] - 1)
        oldest = next(scheduler.sequences(), None)
        plan = scheduler.plan()
        check(scheduler, plan, chunk)
        order = [sequence.rid for sequence in scheduler.sequences()]
        assert order == sorted(order), "every running request arrived before every waiting one"
        if oldest is not None:
            assert oldest not in plan.retracted, "the earliest arrival is never retracted"
            assert not plan.empty, "work waits, so something runs"
        execute(scheduler, plan)
    assert all(sequence.completion_tokens == sequence.max_new_tokens for sequence in everyone)
    assert scheduler.allocator.used_pages == 0


@given(arrivals=requests, aborted=st.sets(st.integers(0, 13)), after=st.integers(0, 20))
def test_an_abort_at_any_time_frees_all_pages_and_disturbs_nobody(
    arrivals: list[tuple[int, int, int]], aborted: set[int], after: int
) -> None:
    scheduler = make_scheduler(pages=15)
    everyone = [make_sequence(at, prompt, output) for at, (prompt, output, _) in enumerate(arrivals)]
    for sequence in everyone:
        scheduler.add(sequence)
    for _ in range(after):
        execute(scheduler, scheduler.plan())
    names = {f"{number:04}" for number in aborted}
    for sequence in scheduler.abort(lambda one: one.rid in names):
        assert sequence.pages == []
        assert sequence.finish == Finish(FinishReason.ABORT)
    scheduler.check_integrity()
    while scheduler.running or scheduler.waiting:
        execute(scheduler, scheduler.plan())
    for sequence in everyone:
        assert sequence.finish is not None
        if sequence.rid not in names:
            assert sequence.completion_tokens == sequence.max_new_tokens
    assert scheduler.allocator.used_pages == 0


def test_a_long_prompt_is_cut_into_chunks_beside_decoding() -> None:
    scheduler = make_scheduler(chunk=8)
    short, long = make_sequence(0, 3, 10), make_sequence(1, 20, 2)
    scheduler.add(short)
    execute(scheduler, scheduler.plan())
    scheduler.add(long)
    counts = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan.decode == [short]
        counts += [part.count for part in plan.prefill]
        execute(scheduler, plan)
    assert counts == [8, 8, 4]


def test_the_latest_arrival_yields_its_pages_and_is_the_next_to_return() -> None:
    scheduler = make_scheduler(pages=5, chunk=32)
    early, late, waiting = make_sequence(0, 7, 12), make_sequence(1, 4, 8), make_sequence(2, 4, 4)
    for sequence in (early, late, waiting):
        scheduler.add(sequence)
    plan = scheduler.plan()
    while not plan.retracted:
        execute(scheduler, plan)
        plan = scheduler.plan()
    assert plan.retracted == [late]
    assert late.pages == []
    assert late.computed == 0
    assert late.completion_tokens > 0, "what it produced is kept"
    assert list(scheduler.waiting) == [late, waiting]


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = make_scheduler(pages=8, chunk=32)
    running, large, small = make_sequence(0, 16, 8), make_sequence(1, 24, 4), make_sequence(2, 1, 1)
    scheduler.add(running)
    execute(scheduler, scheduler.plan())
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.plan().prefill == []
    assert list(scheduler.waiting) == [large, small]
    assert scheduler.unplaced == 2


def test_no_more_run_at_once_than_allowed() -> None:
    scheduler = make_scheduler(running=2)
    for number in range(4):
        scheduler.add(make_sequence(number, 1, 5))
    scheduler.plan()
    assert len(scheduler.running) == 2
    assert scheduler.unplaced == 2


def test_who_waits_for_the_next_step_alone_is_not_short_of_pages() -> None:
    scheduler = make_scheduler(chunk=8)
    for number in range(4):
        scheduler.add(make_sequence(number, 6, 5))
    execute(scheduler, scheduler.plan())
    assert (len(scheduler.waiting), scheduler.unplaced) == (2, 0)
    execute(scheduler, scheduler.plan())
    scheduler.plan()
    assert (len(scheduler.waiting), scheduler.unplaced) == (0, 0)


@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(1, 30),
            st.integers(1, 20),
            st.integers(0, 4),
            st.sampled_from([-20, 0, 0, 5, 20]),
            st.sampled_from("ab"),
            st.booleans(),
        ),
        min_size=1,
        max_size=14,
    ),
    pages=st.integers(13, 24),
    running=st.integers(1, 6),
    chunk=st.integers(1, 20),
)
def test_with_priorities_shared_prefixes_and_aborts_every_request_ends_and_pages_add_up(
    arrivals: list[tuple[int, int, int, int, str, bool]], pages: int, running: int, chunk: int
) -> None:
    """Prompts of one scope are beginnings of one another, so that they share whatever is cached."""
    scheduler = make_caching_scheduler(pages, running, chunk, preemption_threshold=10)
    everyone, pending = [], []
    for at, (prompt, output, delay, priority, scope, aborted) in enumerate(arrivals):
        sequence = make_sequence(at, prompt, output, priority=priority, scope=scope)
        everyone.append((sequence, aborted))
        pending.append((sequence, delay))
    patience = sum(prompt + output + delay for prompt, output, delay, *_ in arrivals) * len(arrivals) * 2 + 10
    for _ in range(patience):
        if not pending and all(sequence.finish for sequence, _ in everyone):
            break
        while pending and pending[0][1] <= 0:
            scheduler.add(pending.pop(0)[0])
        if pending:
            pending[0] = (pending[0][0], pending[0][1] - 1)
        first = min(scheduler.sequences(), key=scheduler._rank, default=None)
        plan = scheduler.plan()
        check(scheduler, plan, chunk)
        if first is not None:
            assert first not in plan.retracted, "the first in rank is never retracted"
            assert plan.retracted or not plan.empty, "work waits, so something happens"
        execute(scheduler, plan)
        for sequence, aborted in everyone:
            if aborted and sequence.completion_tokens == 2 and sequence.finish is None:
                scheduler.abort(lambda one, rid=sequence.rid: one.rid == rid)  # type: ignore[misc]  # the loop's value
    for sequence, aborted in everyone:
        assert sequence.finish is not None
        assert sequence.completion_tokens == sequence.max_new_tokens or aborted
    assert scheduler.held_pages == 0


@given(arrivals=requests, stale=st.sets(st.integers(0, 13)), after=st.integers(1, 20))
def test_containing_a_request_takes_its_bad_page_out_and_disturbs_nobody(
    arrivals: list[tuple[int, int, int]], stale: set[int], after: int
) -> None:
    scheduler = make_caching_scheduler(pages=40)
    everyone = [make_sequence(at, prompt, output) for at, (prompt, output, _) in enumerate(arrivals)]
    for sequence in everyone:
        scheduler.add(sequence)
    for _ in range(after):
        execute(scheduler, scheduler.plan())
    contained = [
        one for one in everyone if int(one.rid) in stale and one in scheduler.running and len(one.own_claim.pages)
    ]
    for sequence in contained:
        scheduler.contain(sequence, [sequence.own_claim.pages[-1]], FOREIGN)
        assert sequence.finish == Finish(FinishReason.ABORT, failure=FOREIGN)
        scheduler.check_integrity()
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan()
        check(scheduler, plan, 8)
        execute(scheduler, plan)
    assert scheduler.allocator.withheld_pages == len(contained) == scheduler.allocator.quarantine.requests_aborted
    for sequence in everyone:
        done = sequence.completion_tokens == sequence.max_new_tokens
        assert done or sequence in contained or sequence.finish == Finish(FinishReason.ABORT, failure=TOO_BIG)


def run_alone(scheduler: Scheduler, sequence: Sequence) -> int | None:
    scheduler.add(sequence)
    while sequence.finish is None:
        execute(scheduler, scheduler.plan())
    return sequence.cached_tokens


def test_a_prompt_that_was_computed_before_is_found_but_for_its_last_page_at_most() -> None:
    scheduler = make_caching_scheduler()
    assert run_alone(scheduler, make_sequence(0, 11, 2)) == 0
    assert run_alone(scheduler, make_sequence(1, 11, 2)) == 8
    assert run_alone(scheduler, make_sequence(2, 13, 2)) == 12, "outputs are kept, too"
    assert run_alone(scheduler, make_sequence(3, 11, 2, scope="other")) == 0


def test_a_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    scheduler = make_caching_scheduler(chunk=32)
    first, second = make_sequence(0, 9, 20), make_sequence(1, 9, 20)
    scheduler.add(first)
    execute(scheduler, scheduler.plan())
    scheduler.add(second)
    plan = scheduler.plan()
    assert [(chunk.start, chunk.count) for chunk in plan.prefill] == [(8, 1)]
    assert second.pages[:2] == first.pages[:2]
    assert second.cached_tokens == 8


def test_cached_pages_give_way_before_anybody_is_retracted() -> None:
    scheduler = make_caching_scheduler(pages=6, chunk=32)
    run_alone(scheduler, make_sequence(0, 12, 1, scope="old"))
    assert scheduler.evictable_pages == 3
    assert scheduler.available_pages == 6
    running = make_sequence(1, 4, 20)
    scheduler.add(running)
    while running.finish is None:
        plan = scheduler.plan()
        assert not plan.retracted
        execute(scheduler, plan)
    assert scheduler.held_pages == 0


def test_a_retracted_request_finds_again_what_nobody_needed_meanwhile() -> None:
    scheduler = make_caching_scheduler(pages=6, chunk=32)
    early, late = make_sequence(0, 7, 12), make_sequence(1, 8, 6, scope="late")
    scheduler.add(early)
    scheduler.add(late)
    plan = scheduler.plan()
    while not plan.retracted:
        execute(scheduler, plan)
        plan = scheduler.plan()
    assert plan.retracted == [late]
    assert late.pages == []
    assert late.cached_tokens == 0, "what it computed itself is not counted as found"
    while late.finish is None:
        execute(scheduler, plan)
        plan = scheduler.plan()
    assert late.cached_tokens == 0
    assert late.completion_tokens == 6


def test_more_priority_goes_first_in_the_queue() -> None:
    scheduler = make_scheduler(running=1, preemption_threshold=10)
    scheduler.add(make_sequence(0, 4, 20))
    scheduler.plan()
    for number, priority in ((1, 0), (2, 5), (3, 5), (4, -1)):
        scheduler.add(make_sequence(number, 1, 1, priority=priority))
    assert [int(sequence.rid) for sequence in scheduler.waiting] == [2, 3, 1, 4]


def test_without_priority_scheduling_priorities_say_nothing() -> None:
    scheduler = make_scheduler()
    for number, priority in ((0, 0), (1, 50)):
        scheduler.add(make_sequence(number, 1, 1, priority=priority))
    assert [int(sequence.rid) for sequence in scheduler.waiting] == [0, 1]


def test_much_more_priority_takes_a_running_request_s_pages_and_a_little_more_does_not() -> None:
    for priority, preempts in ((10, True), (9, False)):
        scheduler = make_scheduler(pages=8, preemption_threshold=10, chunk=64)
        humble = make_sequence(0, 20, 8)
        scheduler.add(humble)
        execute(scheduler, scheduler.plan())
        proud = make_sequence(1, 20, 4, priority=priority)
        scheduler.add(proud)
        plan = scheduler.plan()
        assert (humble in plan.retracted) is preempts
        execute(scheduler, plan)
        execute(scheduler, scheduler.plan())
        assert (proud in scheduler.running) is preempts


def test_nobody_is_preempted_when_that_would_not_make_room() -> None:
    scheduler = make_scheduler(pages=8, preemption_threshold=10, chunk=64)
    equal, humble = make_sequence(0, 20, 8, priority=20), make_sequence(1, 4, 4)
    scheduler.add(equal)
    scheduler.add(humble)
    execute(scheduler, scheduler.plan())
    scheduler.add(make_sequence(2, 20, 4, priority=20))
    assert scheduler.plan().retracted == []


def test_a_full_queue_turns_away_whoever_ranks_last() -> None:
    scheduler = make_scheduler(running=1, preemption_threshold=10, max_queued_requests=2)
    scheduler.add(make_sequence(0, 4, 20, priority=9))
    scheduler.plan()
    low, middle, high = (make_sequence(number, 1, 1, priority=number) for number in (1, 2, 3))
    assert scheduler.add(low) is None
    assert scheduler.add(high) is None
    assert scheduler.add(middle) is low
    assert low.finish == Finish(FinishReason.ABORT, failure=DISPLACED)
    assert [sequence.priority for sequence in scheduler.waiting] == [3, 2]


def test_a_request_that_has_outgrown_what_quarantine_left_of_the_pool_ends_with_an_error() -> None:
    scheduler = make_scheduler(pages=4, chunk=32)
    scheduler.allocator.refuse([0])
    large, small = make_sequence(0, 8, 8), make_sequence(1, 4, 2)
    scheduler.add(large)
    scheduler.add(small)
    failed = []
    while scheduler.running or scheduler.waiting:
        plan = scheduler.plan()
        failed += plan.failed
        execute(scheduler, plan)
    assert failed == [large]
    assert large.finish == Finish(FinishReason.ABORT, failure=TOO_BIG)
    assert small.completion_tokens == 2


@given(arrivals=requests, pages=st.integers(16, 24), delays=st.lists(st.integers(0, 5), min_size=14, max_size=14))
def test_in_a_decode_process_every_request_whose_pages_come_ends_and_pages_add_up(
    arrivals: list[tuple[int, int, int]], pages: int, delays: list[int]
) -> None:
    scheduler = make_caching_scheduler(pages, running=5)
    everyone = [make_sequence(at, prompt, output) for at, (prompt, output, _) in enumerate(arrivals)]
    for sequence in everyone:
        sequence.awaits_pages = True
        scheduler.add(sequence)
    on_their_way: list[tuple[int, Sequence]] = []
    patience = sum(prompt + output for prompt, output, _ in arrivals) * len(arrivals) + 100
    for step in range(patience):
        if all(sequence.finish for sequence in everyone):
            break
        plan = scheduler.plan()
        check_holders(scheduler)
        on_their_way += [(step + delays[int(sequence.rid)], sequence) for sequence in plan.ready_to_receive]
        execute(scheduler, plan)
        for due, sequence in list(on_their_way):
            if due <= step:
                on_their_way.remove((due, sequence))
                scheduler.received(sequence)
                scheduler.cache_prompt(sequence)
                produce(scheduler, sequence)
    assert all(sequence.completion_tokens == sequence.max_new_tokens for sequence in everyone)
    assert scheduler.held_pages == 0


def check_holders(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    holders = [*scheduler.running, *scheduler.transferring]
    held = {page for one in holders for page in one.pages}
    assert len(held) == scheduler.held_pages
    assert all(sequence.computed == 0 or sequence.prefix for sequence in scheduler.transferring)


@pytest.mark.load
@given(arrivals=requests, seen=st.lists(st.integers(0, 13), max_size=20))
def test_in_a_prefill_process_nothing_is_computed_before_it_is_asked_for_and_copies_keep_a_place(
    arrivals: list[tuple[int, int, int]], seen: list[int]
) -> None:
    scheduler = make_caching_scheduler(40, running=3)
    everyone = [make_sequence(at, prompt, 1) for at, (prompt, _, _) in enumerate(arrivals)]
    for sequence in everyone:
        scheduler.park(sequence)
    asked_for: set[str] = set()
    for number in [*seen, *range(len(everyone))]:
        if number < len(everyone) and everyone[number] in scheduler.parked:
            scheduler.release(everyone[number])
            asked_for.add(everyone[number].rid)
        for _ in range(20):
            plan = scheduler.plan()
            check_holders(scheduler)
            assert {chunk.sequence.rid for chunk in plan.prefill} | {one.rid for one in plan.decode} <= asked_for
            for sequence in plan.decode:
                sequence.computed += 1
                scheduler.send(sequence)
            for chunk in plan.prefill:
                chunk.sequence.computed = chunk.end
                if chunk.completes:
                    scheduler.send(chunk.sequence)
            assert len(scheduler.sending) <= 3
        for sequence in list(scheduler.sending):
            scheduler.finish(sequence, Finish(FinishReason.LENGTH))
    while scheduler.waiting or scheduler.running:
        for chunk in scheduler.plan().prefill:
            chunk.sequence.computed = chunk.end
            if chunk.completes:
                scheduler.finish(chunk.sequence, Finish(FinishReason.LENGTH))
    assert all(sequence.finish for sequence in everyone)
    assert scheduler.held_pages == 0
