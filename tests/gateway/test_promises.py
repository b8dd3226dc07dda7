"""A hint is a promise, kept once and in time, for the same tenant and prompt. Lapsed ones are learned from."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.promises import Promises


def test_who_comes_when_told_is_known_and_only_once() -> None:
    promises = Promises()
    promises.give("a", b"p", now=100.0, in_s=10.0, cost_s=1.0)
    assert not promises.redeem("a", b"p", 105.0)  # too early: the promise stands
    assert not promises.redeem("b", b"p", 110.0)
    assert not promises.redeem("a", b"other", 110.0)
    assert promises.redeem("a", b"p", 110.5)
    assert not promises.redeem("a", b"p", 110.5)


def test_a_promise_ends_some_time_after_its_moment() -> None:
    promises = Promises()
    promises.give("a", b"p", now=0.0, in_s=10.0, cost_s=1.0)
    assert not promises.redeem("a", b"p", 21.0)
    assert len(promises) == 0


def test_what_is_owed_counts_by_how_many_come() -> None:
    promises = Promises()
    for number in range(200):
        promises.give("a", b"%d" % number, now=0.0, in_s=1.0, cost_s=1.0)
        promises.redeem("a", b"%d" % number, 1.0)
    promises.give("a", b"next", now=0.0, in_s=1.0, cost_s=2.0)
    assert 1.9 < promises.owed_s("a") <= 2.0
    for number in range(200):
        promises.give("b", b"%d" % number, now=0.0, in_s=1.0, cost_s=1.0)
    promises.lapse(100.0)
    promises.give("a", b"next", now=100.0, in_s=1.0, cost_s=2.0)
    assert promises.owed_s("a") < 0.1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["give", "redeem", "lapse"]), st.sampled_from("ab"), st.integers(0, 3), st.floats(0, 20)
        ),
        max_size=80,
    )
)
def test_what_is_owed_is_the_sum_of_open_promises_and_never_more_than_are_remembered(
    history: list[tuple[str, str, int, float]],
) -> None:
    promises, now = Promises(most=4), 0.0
    for deed, tenant, which, seconds in history:
        now += seconds
        if deed == "give":
            promises.give(tenant, bytes([which]), now=now, in_s=seconds, cost_s=seconds)
        elif deed == "redeem":
            promises.redeem(tenant, bytes([which]), now)
        else:
            promises.lapse(now)
        assert len(promises) <= 4
        for each in "ab":
            owed = sum(promise.cost_s for (name, _), promise in promises._open.items() if name == each)
            assert abs(promises._owed_s.get(each, 0.0) - owed) < 1e-6
