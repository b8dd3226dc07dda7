"""Placing and the door over several regions: home first, elsewhere when that is sooner, and never where it may not."""

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.door import Door, Let, Sent, Waiting
from gateway.fairness import QueueBounds
from gateway.gate import EngineReport, GateLimits
from gateway.placing import Placing, PlacingLimits
from gateway.site import Placed
from gateway.want import Ended, Want

HOME, NEAR, FAR = "eu-west", "eu-north", "us-east"
AWAY_S = {HOME: 0.0, NEAR: 0.02, FAR: 0.08}
EU = frozenset({HOME, NEAR})
POOL_TOKENS = 10_000
# A token of a prompt takes 50 µs at first, so 8,192 of them some 0.4 s.
LIMITS = GateLimits(prefill_chunk_tokens=8192, running_max=64, engine_clip_tokens=0)
BOUNDS = QueueBounds(entries_max=64, tokens_max=1 << 30, tenant_entries_max=64, tenant_tokens_max=1 << 30)


def make_placing(*regions: str, limits: GateLimits = LIMITS) -> Placing:
    placing = Placing(PlacingLimits())
    for number, region in enumerate(regions):
        placing.join(f"{region}-{number}", POOL_TOKENS, 1, limits)
        placing.reported(f"{region}-{number}", EngineReport(0, 0.0), 0.0)
        placing.locate(f"{region}-{number}", region, AWAY_S[region])
    return placing


def want(
    name: str,
    prompt: int = 1000,
    *,
    tenant: str = "a",
    regions: frozenset[str] | None = None,
    session: str = "",
    blocks: tuple[int, ...] = (),
) -> Want:
    return Want(name, tenant, "chat", prompt, 1, 10, regions=regions, session=session, blocks=blocks)


def place(placing: Placing, asked: Want, now: float = 0.0) -> str | None:
    """The region where it enters."""
    placed = placing.place(asked, now, charged_s=placing.expect(asked).cost_s)
    return None if placed is None else placed.site.region


def started(placing: Placing, name: str) -> None:
    """Its prefill is over, and it goes on."""
    placing.progressed(name, 1, 0.0)


def test_home_takes_what_it_has_room_for_and_the_nearest_the_rest() -> None:
    placing = make_placing(FAR, NEAR, HOME)
    where = []
    for number in range(4):
        where.append(place(placing, want(f"r{number}", 4900)))
        started(placing, f"r{number}")
    assert where == [HOME, HOME, NEAR, NEAR]


def test_prefills_under_way_count_against_home_like_the_way_against_others() -> None:
    placing = make_placing(HOME, FAR)
    assert place(placing, want("a", 1000)) == HOME  # 50 ms of prefill, which is less than the way
    assert place(placing, want("b", 1000)) == HOME
    assert place(placing, want("c", 1000)) == FAR  # 100 ms are more


def test_who_would_have_its_first_token_sooner_at_home_waits_there_and_is_asked_again_by_then() -> None:
    narrow = GateLimits(prefill_chunk_tokens=1000, running_max=64, engine_clip_tokens=0)
    placing = make_placing(HOME, FAR, limits=narrow)
    assert place(placing, want("a", 1000)) == HOME
    assert place(placing, want("b", 500)) is None
    assert placing.waits_in is not None
    assert placing.waits_in.keys() == {HOME}
    assert 0 < placing.ask_again_s <= placing.waits_in[HOME]
    started(placing, "a")
    assert place(placing, want("b", 500)) == HOME


def test_sessions_and_prefixes_draw_nobody_further_than_they_save() -> None:
    placing = make_placing(HOME, FAR)
    prefix = tuple(range(40))
    first = want("a", 2000, session="s", blocks=prefix)
    placing.sites[f"{HOME}-0"].open = False
    assert place(placing, first) == FAR
    placing.sites[f"{HOME}-0"].open = True
    placing.ended("a", Ended(1, 2000))
    assert place(placing, want("b", 1000, session="s", blocks=prefix)) == HOME


def test_whoever_is_bound_goes_nowhere_else_however_full_these_are() -> None:
    placing = make_placing(HOME, FAR)
    for number in range(2):
        assert place(placing, want(f"r{number}", 4900, regions=EU)) == HOME
        started(placing, f"r{number}")
    assert place(placing, want("bound", 4900, regions=EU)) is None
    assert placing.would_take(want("bound", regions=frozenset({NEAR})), 0.0) is None
    assert placing.verdicts(want("bound", regions=EU), 0.0).keys() == {f"{HOME}-0"}
    assert place(placing, want("free", 4900)) == FAR


def test_one_region_alone_still_refuses_who_is_bound_to_another() -> None:
    placing = make_placing(FAR, FAR)
    assert not placing.apart
    assert place(placing, want("bound", regions=EU)) is None
    assert place(placing, want("free")) == FAR


def test_who_has_just_come_back_carries_its_share_of_what_others_do_and_one_request_at_least() -> None:
    placing = make_placing(HOME, HOME, HOME)
    for number in range(6):
        placed = placing.place(want(f"r{number}", 900), 0.0, charged_s=1.0)
        assert placed is not None
        started(placing, f"r{number}")
    back = placing.sites[f"{HOME}-2"]
    for request_id in [name for name, placed in placing.inside.items() if placed.site is back]:
        placing.ended(request_id, Ended(1, 900))
    back.share, placing.ramping = 0.1, True
    where = []
    for number in range(4):
        placed = placing.place(want(f"s{number}", 900), 1.0, charged_s=1.0)
        assert placed is not None
        where.append(placed.site is back)
        started(placing, f"s{number}")
    assert where == [True, False, False, False], "the emptiest would have got two at least"
    back.share, placing.ramping = 1.0, False
    assert placing.would_take(want("t", 900), 1.0) is back


def test_who_has_come_back_alone_takes_what_there_is() -> None:
    placing = make_placing(HOME)
    placing.sites[f"{HOME}-0"].share, placing.ramping = 0.1, True
    assert [place(placing, want(f"r{number}", 900)) for number in range(4)] == [HOME] * 4


@given(
    seed=st.integers(0, 1 << 30),
    fleet=st.lists(st.sampled_from([HOME, NEAR, FAR]), min_size=1, max_size=6),
    steps=st.integers(1, 60),
)
def test_no_history_ever_brings_a_prompt_where_it_may_not_go(seed: int, fleet: list[str], steps: int) -> None:
    draw = random.Random(seed)
    placing = make_placing(*fleet)
    door = Door(placing, BOUNDS, retry_after_s_max=60)
    bindings = {
        f"t{number}": draw.choice([None, frozenset({HOME}), EU, frozenset({FAR}), frozenset({"mars"})])
        for number in range(4)
    }
    inside: list[Placed] = []

    def keep(answer: object) -> None:
        if isinstance(answer, Let):
            bound = bindings[answer.placed.want.tenant]
            assert bound is None or answer.placed.site.region in bound
            inside.append(answer.placed)

    for number in range(steps):
        now = float(number)
        site = draw.choice(list(placing.sites.values()))
        match draw.randrange(4):
            case 0:
                site.open = not site.open
            case 1 if inside:
                over = inside.pop(draw.randrange(len(inside)))
                door.ended(over.want.request_id, Ended(5, over.want.prompt_tokens, 0.1, 0.01))
            case _:
                tenant = draw.choice(list(bindings))
                asked = want(
                    f"r{number}",
                    draw.choice([100, 3000, 9000]),
                    tenant=tenant,
                    regions=bindings[tenant],
                    session=draw.choice(["", "s"]),
                    blocks=tuple(range(draw.randrange(3))),
                )
                keep(door.arrive(asked, now, wait_s=draw.choice([0.0, 10.0])))
        while (answer := door.next(now)) is not None:
            keep(answer)


class TestQueue:
    def full_home(self, *regions: str) -> Door:
        door = Door(make_placing(*regions), BOUNDS, retry_after_s_max=60)
        for number in range(2):
            assert isinstance(door.arrive(want(f"r{number}", 4900, regions=frozenset({HOME})), 0.0, wait_s=9), Let)
            started(door.placing, f"r{number}")
        return door

    def test_who_is_bound_to_a_full_region_holds_up_nobody_who_may_go_elsewhere(self) -> None:
        door = self.full_home(HOME, FAR)
        bound = door.arrive(want("bound", 4900, tenant="b", regions=EU), 0.0, wait_s=9)
        assert isinstance(bound, Waiting)
        free = door.arrive(want("free", 4900, tenant="c"), 0.0, wait_s=9)
        assert isinstance(free, Let)
        assert free.placed.site.region == FAR

    def test_nobody_takes_the_room_that_a_bound_one_waits_for(self) -> None:
        door = self.full_home(HOME, FAR)
        assert isinstance(door.arrive(want("bound", 4900, tenant="b", regions=EU), 0.0, wait_s=9), Waiting)
        small = door.arrive(want("small", 100, tenant="c"), 0.0, wait_s=9)
        assert isinstance(small, Let)
        assert small.placed.site.region == FAR, "it fits at home, where somebody was before it"
        door.ended("r0", Ended(10, 4900))
        let = door.next(1.0)
        assert isinstance(let, Let)
        assert let.placed.want.request_id == "bound"

    def test_once_elsewhere_is_full_as_well_those_behind_wait_in_their_order(self) -> None:
        door = self.full_home(HOME, FAR)
        for number in range(2):
            assert isinstance(door.arrive(want(f"f{number}", 4900, regions=frozenset({FAR})), 0.0, wait_s=9), Let)
            started(door.placing, f"f{number}")
        names = ["bound", "large", "small"]
        for name, regions in zip(names, (EU, None, None), strict=True):
            asked = want(name, 150 if name == "small" else 4900, tenant=name, regions=regions)
            assert isinstance(door.arrive(asked, 0.0, wait_s=9), Waiting)
        assert door.next(0.5) is None
        door.ended("f0", Ended(10, 4900))
        large = door.next(1.0)
        assert isinstance(large, Let)
        assert (large.placed.want.request_id, large.placed.site.region) == ("large", FAR)
        assert door.next(1.0) is None, "the small one may go to neither before its turn"

    def test_one_behind_whose_time_is_up_is_sent_away(self) -> None:
        door = self.full_home(HOME, FAR)
        assert isinstance(door.arrive(want("bound", 4900, tenant="b", regions=EU), 0.0, wait_s=90), Waiting)
        assert isinstance(door.arrive(want("other", 4900, tenant="c", regions=EU), 0.0, wait_s=1), Waiting)
        sent = door.next(2.0)
        assert isinstance(sent, Sent)
        assert sent.waiting.id == "other"
        assert len(door.queue) == 1

    def test_those_who_wait_for_home_by_choice_let_the_next_go_elsewhere_when_home_is_taken_for_longer(self) -> None:
        narrow = GateLimits(prefill_chunk_tokens=1000, running_max=64, engine_clip_tokens=0)
        door = Door(make_placing(HOME, FAR, limits=narrow), BOUNDS, retry_after_s_max=60)
        assert isinstance(door.arrive(want("a", 1000), 0.0, wait_s=9), Let)
        assert isinstance(door.arrive(want("b", 500), 0.0, wait_s=9), Waiting), "50 ms here are sooner than 80 there"
        elsewhere = door.arrive(want("c", 500), 0.0, wait_s=9)
        assert isinstance(elsewhere, Let)
        assert elsewhere.placed.site.region == FAR, "its turn here would come later than that"
