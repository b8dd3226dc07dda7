"""What every board promises, in process and on a real Valkey: grants stay inside the pool, leases, epochs, turns."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from backends.wire import Loads
from gateway.sharing.board import Board, BoardAway, Claim, Grant, Report
from gateway.sharing.process import ProcessBoard
from gateway.sharing.redis import RedisBoard, open_calls
from tests.stores import ValkeyServer

TOTAL = 1000
# Nobody is taken for dead whose test was not given a core for a while. What waits for an end has a brief lease.
LEASE_S = 60.0
BRIEF_S = 0.1


@pytest.fixture(params=["process", *(pytest.param(kind, marks=pytest.mark.stores) for kind in ("valkey", "cluster"))])
async def board(request: pytest.FixtureRequest) -> AsyncIterator[Board]:
    if request.param == "process":
        yield ProcessBoard(lease_s=LEASE_S)
        return
    url: str = request.getfixturevalue("valkey_url" if request.param == "valkey" else "cluster_url")
    async with open_calls(url, timeout_s=5) as calls:
        yield RedisBoard(calls, f"model-{random.random()}", lease_s=LEASE_S)


@contextmanager
def brief_leases(board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of what is asked meanwhile."""
    with monkeypatch.context() as patch:
        if isinstance(board, RedisBoard):
            patch.setattr(board, "_lease_ms", round(BRIEF_S * 1000))
        else:
            patch.setattr(board, "_lease_s", BRIEF_S)
        yield


def claim(
    process: str, wanted: int, *, least: int = 0, hunger: float | None = None, epoch: str = "1", replica: str = "r"
) -> Claim:
    return Claim(process, replica, epoch, TOTAL, least, wanted, hunger)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - a board tells of nothing by itself
            await asyncio.sleep(0.02)


async def test_one_process_may_have_all(board: Board) -> None:
    assert await board.claim(claim("a", TOTAL)) == Grant("1", TOTAL, 0)


async def test_of_two_that_want_the_last_pages_one_gets_them(board: Board) -> None:
    await board.claim(claim("a", 600))
    grants = await asyncio.gather(*(board.claim(claim(process, 400)) for process in ("b", "c")))
    assert sorted(grant.tokens for grant in grants) == [0, 400]


async def test_what_is_given_back_can_be_had(board: Board) -> None:
    await board.claim(claim("a", TOTAL))
    assert (await board.claim(claim("b", 300))).tokens == 0
    await board.claim(claim("a", 500))
    assert (await board.claim(claim("b", 300))).tokens == 300


async def test_what_is_in_use_already_is_granted_in_any_case(board: Board) -> None:
    await board.claim(claim("a", 900))
    assert (await board.claim(claim("b", 300, least=200))).tokens == 200


async def test_replicas_are_apart(board: Board) -> None:
    await board.claim(claim("a", TOTAL))
    assert (await board.claim(claim("b", TOTAL, replica="s"))).tokens == TOTAL


async def test_the_account_that_was_served_least_gets_what_is_freed(board: Board) -> None:
    await board.claim(claim("a", 900))
    assert (await board.claim(claim("b", 500, hunger=1.0))).tokens == 100
    assert (await board.claim(claim("c", 500, hunger=7.0))).tokens == 0
    await board.claim(claim("a", 300))
    assert await board.claim(claim("c", 500, hunger=7.0)) == Grant("1", 0, 400, yields=True)  # b is hungrier
    assert (await board.claim(claim("b", 500, hunger=1.0))).tokens == 500
    assert (await board.claim(claim("b", 500))).tokens == 500  # and now it is not hungry any more
    assert (await board.claim(claim("c", 500, hunger=7.0))).tokens == 200


async def test_hunger_of_a_process_that_has_gone_blocks_nobody_for_long(board: Board) -> None:
    await board.claim(claim("a", 900))
    await board.claim(claim("b", 500, hunger=1.0))
    await board.claim(claim("b", 0, hunger=1.0))

    async def is_granted() -> bool:
        return (await board.claim(claim("c", 100, hunger=7.0))).tokens == 100

    await until(is_granted)
    assert (await board.beat("a", {"r": 0})).hungry == {"r"}  # c waits until it says that it doesn't
    await board.claim(claim("c", 100))
    assert (await board.beat("a", {"r": 0})).hungry == frozenset()


async def test_a_new_epoch_voids_all_claims_and_an_old_one_gets_nothing(board: Board) -> None:
    await board.claim(claim("a", TOTAL))
    assert await board.claim(claim("b", 100, epoch="2")) == Grant("1", 0, TOTAL)
    await board.restarted("r", "1", "2")
    assert (await board.claim(claim("b", TOTAL, epoch="2"))).tokens == TOTAL
    stale = await board.claim(claim("a", TOTAL))
    assert (stale.epoch, stale.tokens) == ("2", 0)
    await board.restarted("r", "1", "2")  # heard late: nothing is voided twice
    assert (await board.claim(claim("c", 100, epoch="2"))).tokens == 0


async def test_a_dead_processs_claims_stand_until_it_is_buried(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with brief_leases(board, monkeypatch):
        await board.claim(claim("dead", 700))
    await board.note_requests("dead", {"r1": "r", "r2": "r"}, ())
    await board.note_requests("dead", {}, ("r1",))

    async def is_dead() -> bool:
        return "dead" in (await board.beat("alive", {"r": 0})).dead

    await until(is_dead)
    assert (await board.claim(claim("alive", TOTAL))).tokens == 300
    assert await board.estate("dead") == {"r2": "r"}
    await board.bury("dead", ("r",))
    assert (await board.claim(claim("alive", TOTAL))).tokens == TOTAL
    assert "dead" not in (await board.beat("alive", {"r": 0})).dead


async def test_who_beats_is_not_buried_when_its_first_lease_ends(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with brief_leases(board, monkeypatch):
        await board.claim(claim("a", 700))
        await board.claim(claim("silent", 0))
    await board.beat("a", {"r": 0})

    async def is_dead() -> bool:
        return "silent" in (await board.beat("b", {"r": 0})).dead

    await until(is_dead)
    assert "a" not in (await board.beat("b", {"r": 0})).dead
    await board.bury("a", ("r",))
    assert (await board.claim(claim("b", TOTAL))).tokens == 300


async def test_each_replica_is_polled_by_one_and_by_another_when_that_one_dies(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await board.beat("a", {"r": 0})).polls == {"r"}
    assert (await board.beat("b", {"r": 0, "s": 0})).polls == {"s"}
    with brief_leases(board, monkeypatch):
        assert (await board.beat("a", {"r": 0})).polls == {"r"}

    async def polls_both() -> bool:
        return (await board.beat("b", {"r": 0, "s": 0})).polls == {"r", "s"}

    await until(polls_both)


async def test_a_beat_says_how_much_others_have_until_they_leave_or_are_buried(board: Board) -> None:
    await board.beat("a", {"r": 3, "s": 0})
    await board.beat("b", {"r": 1, "s": 2})
    assert (await board.beat("c", {"r": 5, "s": 0})).others == {"r": 4, "s": 2}
    await board.beat("a", {"r": 0, "s": 1})
    assert (await board.beat("c", {"r": 5, "s": 0})).others == {"r": 1, "s": 3}
    await board.leave("b", ("r", "s"))
    assert (await board.beat("c", {"r": 5, "s": 0})).others == {"r": 0, "s": 1}


async def test_a_beat_says_where_others_wait_for_pages(board: Board) -> None:
    await board.claim(claim("a", TOTAL))
    await board.claim(claim("b", 500, hunger=1.0))
    assert (await board.beat("a", {"r": 0, "s": 0})).hungry == {"r"}
    assert (await board.beat("b", {"r": 0, "s": 0})).hungry == frozenset()
    await board.claim(claim("b", 500))
    assert (await board.beat("a", {"r": 0, "s": 0})).hungry == frozenset()


async def test_a_report_is_told_to_all_with_its_age(board: Board) -> None:
    first, second = Loads(1000, 10, 1, 0, 64), Loads(1000, 20, 2, 1, 64, worked=7.5, told_at=1.5, unplaced=1)
    assert await board.reports(("r", "s")) == {}
    await board.report(Report("r", "1", first, age_s=5.0))
    await board.report(Report("r", "2", second, age_s=0.25))
    told = await board.reports(("r", "s"))
    assert list(told) == ["r"]
    assert (told["r"].loads, told["r"].epoch) == (second, "2")

    async def older() -> bool:
        return (await board.reports(("r",)))["r"].age_s >= 0.3

    assert 0.25 <= told["r"].age_s < 5
    await until(older)


async def test_who_leaves_well_is_free_at_once(board: Board) -> None:
    await board.claim(claim("a", TOTAL))
    await board.leave("a", ("r",))
    assert (await board.claim(claim("b", TOTAL))).tokens == TOTAL


async def test_what_accounts_were_served_adds_up_over_processes(board: Board) -> None:
    assert await board.served("a", {"x": 1.5}) == {"x": 1.5}
    assert await board.served("b", {"x": 2.0, "y": 0.0}) == {"x": 3.5, "y": 0.0}
    assert await board.served("b", {}) == {}


@pytest.mark.parametrize("seed", range(5))
async def test_random_claims_never_pass_the_pool(board: Board, seed: int) -> None:
    draw, granted, least = random.Random(seed), dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0)
    for _ in range(150):
        process = draw.choice("abcd")
        least[process] = draw.randint(0, granted[process])
        hunger = draw.choice([None, draw.random()])
        grant = await board.claim(claim(process, draw.randint(0, 600), least=least[process], hunger=hunger))
        granted[process] = grant.tokens
        assert grant.tokens >= least[process]
        assert sum(granted.values()) <= TOTAL
        assert grant.others == sum(granted.values()) - grant.tokens


@pytest.mark.stores
async def test_a_board_that_hangs_is_away_after_its_bound() -> None:
    with ValkeyServer() as server:
        async with open_calls(server.url, timeout_s=0.2) as calls:
            board = RedisBoard(calls, "m", lease_s=1)
            await board.claim(claim("a", 10))
            server.hang()
            with pytest.raises(BoardAway):
                await board.claim(claim("a", 20))
            server.wake()

            async def back() -> bool:
                try:
                    return (await board.claim(claim("a", 20))).tokens == 20
                except BoardAway:
                    return False

            await until(back)
