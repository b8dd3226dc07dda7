"""Prefixes that the gateway knows of: counted once, inherited, bounded, and never shared between tenants."""

import random

from gateway.prefixes import BLOCK_TOKENS, Known, Prefixes, block_ids


def test_the_gateways_prefixes_count_a_shared_block_once_and_pass_it_on() -> None:
    prefixes = Prefixes(512 * 10)
    assert prefixes.known((1, 2), 1200) == Known(0, 0)
    prefixes.entered("a", (1, 2))
    assert prefixes.known((1, 2, 3), 2000) == Known(1024, 1024)
    assert prefixes.known((1, 2), 1024) == Known(512, 512)  # the last token is always computed
    prefixes.entered("b", (1, 2, 3))
    assert prefixes.left("a", (1, 2)) == {"b": 1024}
    assert prefixes.left("b", (1, 2, 3)) == {}
    assert prefixes.known((1, 2, 3), 2000) == Known(0, 1536)
    for block in range(100, 110):
        prefixes.entered("c", (block,))
        prefixes.left("c", (block,))
    assert prefixes.known((1, 2, 3), 2000) == Known(0, 0)


def test_a_block_is_named_by_all_that_comes_before_it() -> None:
    draw = random.Random(1)
    prompt = [draw.randrange(50_000) for _ in range(3 * BLOCK_TOKENS + 7)]
    ids = block_ids(prompt, b"tenant")
    assert len(ids) == 3
    assert block_ids(prompt[: 2 * BLOCK_TOKENS], b"tenant") == ids[:2]
    other = [prompt[0] + 1, *prompt[1:]]
    assert not set(block_ids(other, b"tenant")) & set(ids)


def test_equal_prompts_of_two_tenants_share_nothing() -> None:
    prompt = list(range(BLOCK_TOKENS))
    assert block_ids(prompt, b"a") != block_ids(prompt, b"b")
    assert block_ids(prompt, b"a") == block_ids(prompt, b"a")


def test_a_prompt_below_a_block_has_none() -> None:
    assert block_ids(list(range(BLOCK_TOKENS - 1)), b"a") == ()
