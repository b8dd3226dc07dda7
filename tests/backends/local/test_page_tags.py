"""What the engine does when a page changes hands under a request; random faults in numbers are in test_faults.py."""

import pytest

from backends.local.engine import INTEGRITY_ABORT
from backends.local.sequence import Finish, FinishReason, Sequence
from backends.page_tags.table import Claim
from tests.backends.local.conftest import StartTiny, TinyEngine

PROMPT = list(range(10, 50))
OTHER = list(range(100, 140))


def freed_under(tiny: TinyEngine, sequence: Sequence, at: int) -> int:
    """Somebody's bug frees a page that the sequence goes on using."""
    page = sequence.pages[at]
    tiny.engine.allocator.free(Claim([page], [sequence.tags[at]]))
    return page


def steps(tiny: TinyEngine, count: int) -> None:
    for _ in range(count):
        tiny.step()


def test_a_request_whose_page_was_freed_ends_alone_before_it_reads_the_page(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    reference = tiny.submit(OTHER, 20)
    tiny.drain()
    victim, other = tiny.submit(PROMPT, 20, cache_scope="v"), tiny.submit(OTHER, 20, cache_scope="o")
    steps(tiny, 3)
    page = freed_under(tiny, victim, -1)
    known = list(victim.tokens)
    steps(tiny, 1)
    assert victim.finish == Finish(FinishReason.ABORT, failure=INTEGRITY_ABORT)
    assert victim.tokens == known, "the step gave it no token"
    tiny.drain()
    assert other.tokens[40:] == reference.tokens[40:]
    assert page in tiny.engine.allocator.quarantine
    assert tiny.engine.allocator.withheld_pages == 1
    assert tiny.engine.totals.aborted_requests == 1


@pytest.mark.parametrize("at", [0, -1])
def test_a_page_that_another_request_was_given_meanwhile_stays_the_other_s(tiny_engine: StartTiny, at: int) -> None:
    tiny = tiny_engine(disable_radix_cache=True)
    reference = tiny.submit(OTHER, 20)
    tiny.drain()
    victim = tiny.submit(PROMPT, 20)
    steps(tiny, 3)
    page = freed_under(tiny, victim, at)
    thief = tiny.submit(OTHER, 20)
    tiny.engine.scheduler._admit(tiny.engine.scheduler.plan(), 64)
    assert page in thief.pages
    tiny.drain()
    assert victim.finish is not None
    assert victim.finish.failure == INTEGRITY_ABORT
    assert thief.tokens == reference.tokens
    assert tiny.engine.allocator.withheld_pages == 1


def test_a_chunk_of_a_prompt_is_checked_as_a_decoded_token_is(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine(chunk=16)
    victim = tiny.submit(PROMPT, 5)
    steps(tiny, 2)
    assert victim.completion_tokens == 0
    freed_under(tiny, victim, 0)
    tiny.drain()
    assert victim.finish == Finish(FinishReason.ABORT, failure=INTEGRITY_ABORT)
    assert victim.completion_tokens == 0


def test_the_page_that_is_only_written_is_checked_too(tiny_engine: StartTiny) -> None:
    """The newest page holds no token yet: nothing of it is read, but another's tokens would be overwritten."""
    tiny = tiny_engine(disable_radix_cache=True)
    victim = tiny.submit(PROMPT[:16], 5)
    steps(tiny, 1)
    plan = tiny.engine.scheduler.plan()
    assert plan.decode == [victim]
    assert len(victim.pages) == 2
    freed_under(tiny, victim, 1)
    assert [event.finish for event in tiny.engine._stop_holders_of_foreign_pages(plan)] == [victim.finish]
    assert plan.empty


def test_all_who_share_a_page_that_changed_hands_end_and_it_is_never_found_again(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    first = tiny.submit(PROMPT, 20)
    steps(tiny, 1)
    second, stranger = tiny.submit(PROMPT, 20), tiny.submit(PROMPT, 20, cache_scope="elsewhere")
    steps(tiny, 2)
    assert second.cached_tokens == 32
    freed_under(tiny, first, 1)
    tiny.drain()
    assert first.finish == second.finish == Finish(FinishReason.ABORT, failure=INTEGRITY_ABORT)
    assert stranger.finish == Finish(FinishReason.LENGTH)
    again = tiny.submit(PROMPT, 20)
    tiny.drain()
    assert again.cached_tokens == 16, "the page before it is in order"
    assert again.tokens == stranger.tokens


def test_a_stale_prefix_is_refused_at_the_hand_over_and_its_finder_computes_for_itself(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine()
    first = tiny.submit(PROMPT, 20)
    tiny.drain()
    prefix = tiny.engine.scheduler.prefix
    assert prefix is not None
    node = prefix.lock_longest("", PROMPT)
    assert node is not None
    prefix.unlock(node)
    tiny.engine.allocator.free(node.claim)
    second = tiny.submit(PROMPT, 20)
    tiny.drain()
    assert second.finish == Finish(FinishReason.LENGTH)
    assert second.cached_tokens == 16
    assert second.tokens == first.tokens
    quarantine = tiny.engine.allocator.quarantine
    assert (quarantine.handovers_refused, quarantine.requests_aborted) == (1, 0)


def test_near_twins_never_trip_the_check(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine(pages=12, chunk=24)
    for round_ in range(6):
        for at in range(8):
            tiny.submit([*PROMPT[: 40 - at], round_ + 3, at + 3], 40)
        steps(tiny, 5)
    tiny.drain()
    assert tiny.engine.totals.retractions > 0
    assert tiny.engine.totals.cached_tokens > 0
    assert tiny.engine.allocator.quarantine.requests_aborted == 0
    assert tiny.engine.pairs_checked > 1000


def test_switched_off_nothing_is_compared(tiny_engine: StartTiny) -> None:
    tiny = tiny_engine(page_tags=False)
    sequence = tiny.submit(PROMPT, 20)
    tiny.drain()
    assert sequence.finish == Finish(FinishReason.LENGTH)
    assert tiny.engine.pairs_checked == 0
    assert set(sequence.tags) == set()


def test_tags_change_no_output(tiny_engine: StartTiny) -> None:
    tokens = []
    for page_tags in (True, False):
        tiny = tiny_engine(page_tags=page_tags, pages=12)
        sequences = [tiny.submit([*PROMPT[:30], at + 3], 20) for at in range(6)]
        tiny.drain()
        tokens.append([sequence.tokens for sequence in sequences])
    assert tokens[0] == tokens[1]
