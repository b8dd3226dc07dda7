"""How units stand, as one process knows it: by what is read, by what its keeper says, and as others are told."""

import asyncio
from dataclasses import replace

import orjson

from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish
from gateway.lifecycle.watch import Watch, as_fields, foremost, from_fields

A, B = Unit("m", "a", "here"), Unit("m", "b", "here")
FIRST = Record(A, version=1, fence=3)


class Seen:
    """A watch that is told what it reads, and what it made of it."""

    def __init__(self) -> None:
        self.heard: list[Record] = []
        self.lost: list[Unit] = []
        self.watch = Watch(self._nothing, heard=self.heard.append, lost=self.lost.append)

    async def _nothing(self) -> list[Record]:
        return []


def test_what_is_new_is_told_once_and_what_the_keeper_said_later_stands() -> None:
    seen = Seen()
    seen.watch.learn([FIRST])
    seen.watch.learn([FIRST])
    later = replace(FIRST, version=2)
    seen.watch.hear(later)
    seen.watch.learn([FIRST])
    assert seen.heard == [FIRST, later]
    named_again = replace(FIRST, version=1, fence=1)
    seen.watch.learn([named_again])
    assert seen.heard[2:] == [named_again]


def test_a_sign_of_life_of_its_owner_is_heard_of_though_nothing_changed() -> None:
    seen = Seen()
    seen.watch.learn([FIRST])
    renewed = replace(FIRST, lease_until_ns=1)
    seen.watch.learn([renewed])
    seen.watch.learn([FIRST])
    assert seen.heard == [FIRST, renewed]


def test_a_unit_that_is_no_more_is_lost_before_another_of_its_name_is_heard_of() -> None:
    seen = Seen()
    seen.watch.learn([FIRST])
    seen.watch.learn([replace(FIRST, unit=B)])
    assert seen.lost == [A]
    assert [record.unit for record in seen.heard] == [A, B]


async def test_whoever_asks_is_told_at_once_of_what_it_has_not_seen_and_else_of_the_next_change() -> None:
    watch = Seen().watch
    assert await watch.news(-1, within_s=0) is None, "nothing has been read"
    watch.learn([])
    first = await watch.news(-1, within_s=0)
    assert first == (0, [])
    waits = asyncio.create_task(watch.news(0, within_s=60))
    await asyncio.sleep(0)
    watch.learn([])
    await asyncio.sleep(0)
    assert not waits.done(), "nothing has changed"
    watch.hear(FIRST)
    assert await waits == (1, [FIRST])
    assert await watch.news(1, within_s=0) == (1, [FIRST])


def test_a_record_is_the_same_after_its_way_to_another_process() -> None:
    record = Record(
        A,
        State.WARMING,
        version=7,
        owner="me",
        wish=Wish.HELD,
        wish_by=By.OPERATOR,
        wish_depth=Depth.RELEASED,
        depth=Depth.RELEASED,
        why="because",
    )
    found = from_fields(orjson.loads(orjson.dumps(as_fields(record))))
    assert found == record
    assert all(isinstance(value, kind) for value, kind in ((found.state, State), (found.depth, Depth)))


def test_of_several_places_elsewhere_that_name_an_engine_the_one_that_has_it_counts() -> None:
    mine = replace(FIRST, state=State.FAILED)
    idle, serving = (replace(FIRST, unit=Unit("m", "r", place)) for place in ("there", "yonder"))
    serving = replace(serving, state=State.READY)
    other = replace(FIRST, unit=Unit("m", "s", "there"), state=State.FAILED)
    assert set(foremost([idle, mine, serving, other], ("here", ""))) == {mine, serving, other}
