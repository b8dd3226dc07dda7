from hypothesis import given
from hypothesis import strategies as st

from backends.local.detokenizer import TextStream
from backends.local.kv.pages import PageAllocator
from backends.local.scheduler import Scheduler, StepPlan
from backends.local.sequence import Finish, FinishReason, SamplingParams, Sequence

PAGE = 4


def make_sequence(number: int, prompt: int, output: int) -> Sequence:
    return Sequence(
        rid=f"{number:04}",
        prompt_tokens=prompt,
        tokens=[1] * prompt,
        max_new_tokens=output,
        sampling=SamplingParams(),
        text=TextStream([]),
    )


def make_scheduler(pages: int = 16, running: int = 8, chunk: int = 8) -> Scheduler:
    return Scheduler(PageAllocator(pages, PAGE), max_running_requests=running, chunked_prefill_size=chunk)


def execute(scheduler: Scheduler, plan: StepPlan) -> None:
    """What the engine does with a plan, without a model."""
    for sequence in plan.decode:
        sequence.computed += 1
        produce(scheduler, sequence)
    for chunk in plan.prefill:
        chunk.sequence.computed = chunk.end
        if chunk.end == len(chunk.sequence.tokens):
            produce(scheduler, chunk.sequence)


def produce(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.tokens.append(1)
    if sequence.completion_tokens == sequence.max_new_tokens:
        scheduler.finish(sequence, Finish(FinishReason.LENGTH))


def check(scheduler: Scheduler, plan: StepPlan, chunk: int) -> None:
    scheduler.check_integrity()
    order = [sequence.rid for sequence in scheduler.sequences()]
    assert order == sorted(order), "every running request arrived before every waiting one"
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
        while pending and pending[0][1] <= 0:
            scheduler.add(pending.pop(0)[0])
        if pending:
            pending[0] = (pending[0][0], pending[0][1] - 1)
        oldest = next(scheduler.sequences(), None)
        plan = scheduler.plan()
        check(scheduler, plan, chunk)
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


def test_no_more_run_at_once_than_allowed() -> None:
    scheduler = make_scheduler(running=2)
    for number in range(4):
        scheduler.add(make_sequence(number, 1, 5))
    scheduler.plan()
    assert len(scheduler.running) == 2
