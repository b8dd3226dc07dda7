"""Placing over decode halves whose prompts other engines compute: both sides have room, or neither is begun."""

import random

from gateway.gate import EngineReport, GateLimits
from gateway.placing import Placing, PlacingLimits
from gateway.site import Placed
from gateway.want import Ended, Want

LIMITS = GateLimits(prefill_chunk_tokens=1 << 40, running_max=64, engine_clip_tokens=0, unified=False)
POOL_TOKENS = 10_000


class Pools:
    """The prefill halves' pages, by number."""

    def __init__(self) -> None:
        self.room = True

    def takes(self, tokens: int, choices: int) -> bool:
        return self.room and tokens * choices > 0


def make_placing(prefill: int, decode: int, *, total: int = POOL_TOKENS, pools: Pools | None = None) -> Placing:
    placing = Placing(PlacingLimits())
    for number in range(prefill):
        half = placing.join_half(f"p{number}", total, tokens_ahead_max=8192, takes=(pools or Pools()).takes)
        half.open = True
    halves = tuple(placing.halves.values())
    for number in range(decode):
        site = placing.join(f"d{number}", total, 1, LIMITS)
        site.halves = halves
        placing.reported(site.id, EngineReport(0, 0.0), 0.0)
    return placing


def want(name: str, prompt: int = 1000, cap: int = 1000, **more: object) -> Want:
    return Want(name, "a", "chat", prompt, 1, cap, **more)  # type: ignore[arg-type]  # few fields, by name


def place(placing: Placing, asked: Want) -> Placed | None:
    return placing.place(asked, 0.0, charged_s=1.0)


def halves_of(placed: list[Placed | None]) -> list[tuple[str, str]]:
    found = []
    for one in placed:
        assert one is not None
        assert one.quote is not None, "another engine computes its prompt"
        found.append((one.quote.half.id, one.site.id))
    return found


def test_prompts_spread_over_the_prefill_halves_and_pages_over_the_decode_halves() -> None:
    placing = make_placing(3, 2)
    found = halves_of([place(placing, want(f"r{number}")) for number in range(6)])
    assert sorted(prefill for prefill, _ in found) == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert sorted(decode for _, decode in found) == ["d0", "d0", "d0", "d1", "d1", "d1"]
    assert len(set(found)) > 3, "any works with any"


def test_nothing_is_computed_for_which_no_decode_half_has_room() -> None:
    placing = make_placing(2, 2)
    entered = [f"r{number}" for number in range(40) if place(placing, want(f"r{number}")) is not None]
    assert 0 < len(entered) < 40
    for name in entered:
        placing.prompt_done(name)
    assert place(placing, want("late")) is None
    assert not placing.waits_for_prefill
    assert [len(half) for half in placing.halves.values()] == [0, 0]
    assert "late" not in placing.inside


def test_no_pages_are_taken_where_no_prefill_half_has_room() -> None:
    pools = Pools()
    placing = make_placing(2, 1, pools=pools)
    pools.room = False
    assert place(placing, want("r")) is None
    assert placing.sites["d0"].gate.resident_tokens == 0
    assert placing.waits_for_prefill
    pools.room = True
    assert place(placing, want("r")) is not None


def test_a_prefill_batch_that_is_full_is_no_matter_of_others() -> None:
    placing = make_placing(2, 1, total=100_000)
    assert halves_of([place(placing, want("a", 8000)), place(placing, want("b", 8000))]) == [("p0", "d0"), ("p1", "d0")]
    assert place(placing, want("c", 8000)) is None
    placing.prompt_done("b")
    assert halves_of([place(placing, want("c", 8000))]) == [("p1", "d0")]


def test_equal_prompts_and_sessions_go_to_the_half_that_had_the_last_one() -> None:
    placing = make_placing(3, 1, total=100_000)
    blocks = (11, 12)
    (first, _) = halves_of([place(placing, want("a", 1200, blocks=blocks))])[0]
    placing.prompt_done("a")
    place(placing, want("between", 900))
    placing.prompt_done("between")
    assert halves_of([place(placing, want("b", 1200, blocks=blocks))])[0][0] == first
    placing.prompt_done("b")
    place(placing, want("other", 4000))  # the first half is busy now
    (ofsession, _) = halves_of([place(placing, want("s1", 100, session="s"))])[0]
    placing.prompt_done("other")
    placing.prompt_done("s1")
    assert halves_of([place(placing, want("s2", 100, session="s"))])[0][0] == ofsession != first


def test_a_prefill_is_foreseen_and_its_speed_learned_at_its_own_half() -> None:
    placing = make_placing(2, 1, total=100_000)
    before = placing.halves["p1"].speed.prefill_token_s
    for number in range(200):
        name = f"r{number}"
        placed = place(placing, want(name, 4000))
        assert placed is not None
        assert placed.quote is not None
        slow_s = 8.0 if placed.quote.half.id == "p0" else 0.2
        placing.ended(name, Ended(10, 4000, slow_s, 0.01))
    slow, quick = (placing.halves[name].speed.prefill_token_s for name in ("p0", "p1"))
    assert slow > quick
    assert quick <= max(before, 0.2 / 4000) * 1.01
    chosen = halves_of([place(placing, want("last", 4000))])[0][0]
    assert chosen == "p1"


def test_a_half_that_starts_anew_has_forgotten_its_prompts_and_its_cache() -> None:
    placing = make_placing(1, 1)
    placed = place(placing, want("a", 1200, blocks=(1, 2)))
    assert placed is not None
    placing.part_half("p0")
    assert place(placing, want("b")) is None, "nobody computes prompts"
    half = placing.join_half("p0", POOL_TOKENS, tokens_ahead_max=8192, takes=Pools().takes)
    half.open, placing.sites["d0"].halves = True, (half,)
    assert half.prefixes.known((1, 2), 1200).cached_tokens == 0
    placing.ended("a", Ended(0, 0))
    assert (len(half), half.prefilling_s()) == (0, 0.0)


def test_random_histories_end_with_nothing_at_either_side() -> None:
    draw = random.Random(11)
    placing, inside = make_placing(3, 3, total=20_000), list[str]()
    for number in range(1500):
        dice = draw.random()
        if dice < 0.5:
            blocks = tuple(range(draw.randrange(3)))
            asked = want(f"r{number}", draw.randrange(600, 6000), draw.randrange(1, 2000), blocks=blocks)
            if place(placing, asked) is not None:
                inside.append(asked.request_id)
        elif inside and dice < 0.7:
            placing.prompt_done(draw.choice(inside))
        elif inside and dice < 0.75:
            placing.part(f"d{draw.randrange(3)}")
            inside = [name for name in inside if name in placing.inside]
            for name in {"d0", "d1", "d2"} - placing.sites.keys():
                placing.join(name, 20_000, 1, LIMITS).halves = tuple(placing.halves.values())
        elif inside:
            placing.ended(inside.pop(draw.randrange(len(inside))), Ended(5, 100, 0.1, 0.01))
        there = {name for half in placing.halves.values() for name in half._inside}
        assert there <= placing.inside.keys()
    for name in inside:
        placing.ended(name, Ended(5, 100, 0.1, 0.01))
    assert [len(half) for half in placing.halves.values()] == [0, 0, 0]
    assert all(site.gate.resident_tokens == 0 for site in placing.sites.values())
