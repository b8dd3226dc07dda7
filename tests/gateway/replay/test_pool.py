"""The simulated pool: pages are conserved through locks, evictions and doubles."""

import random

import pytest

from gateway.replay.pool import Pool


def test_cached_blocks_are_found_locked_and_evicted_least_recent_and_deepest_first() -> None:
    pool = Pool(512 * 4, 64)
    pool.take(16)
    pool.keep((1, 2))
    assert pool.matched((1, 2, 3)) == 2
    pool.unlock((1, 2))
    assert pool.used_tokens == 0
    assert pool.available_pages == pool.total_pages
    pool.take(24)  # one block must go: the deeper one
    assert pool.matched((1, 2)) == 1


def test_a_double_of_a_cached_block_is_freed() -> None:
    pool = Pool(512 * 4, 64)
    pool.take(8)
    pool.keep((1,))
    pool.take(8)
    pool.keep((1,))
    assert pool.free_pages == pool.total_pages - 8
    pool.unlock((1,))
    assert pool.available_pages == pool.total_pages - 8
    pool.unlock((1,))
    assert pool.available_pages == pool.total_pages


def test_taking_more_than_there_is_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Pool(1024, 64).take(17)


@pytest.mark.parametrize("page", [1, 64])
def test_pages_are_conserved_in_random_histories(page: int) -> None:
    draw = random.Random(page)
    pool = Pool(512 * 40, page)
    held: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            pages, blocks = held.pop(draw.randrange(len(held)))
            pool.give_back(pages)
            pool.unlock(blocks)
        else:
            start = draw.randrange(20) * 10
            blocks = tuple(range(start, start + draw.randint(0, 4)))
            count = pool.matched(blocks)
            pages = draw.randint(0, pool.block_pages) + (len(blocks) - count) * pool.block_pages
            pinned = pool.matched_evictable(blocks, count) * pool.block_pages
            if pages <= pool.available_pages - pinned:
                pool.lock(blocks[:count])
                pool.take(pages)
                pool.keep(blocks[count:])
                held.append((pages - (len(blocks) - count) * pool.block_pages, blocks))
        private = sum(pages for pages, _ in held)
        assert pool.free_pages + private + pool.cached_pages == pool.total_pages
