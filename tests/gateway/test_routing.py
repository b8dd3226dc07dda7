"""In which order replicas are asked: affinity within a bound, then load."""

from dataclasses import dataclass

from gateway.routing import by_load, with_affinity


@dataclass(frozen=True)
class Place:
    name: str
    load: float


A, B, C = Place("a", 0.9), Place("b", 0.1), Place("c", 0.5)


def test_the_emptiest_is_asked_first() -> None:
    assert by_load([A, B, C]) == [B, C, A]


def test_who_has_the_prefix_goes_first_within_the_bound() -> None:
    others = by_load([A, B, C])
    assert with_affinity([(A, 0.5)], others, 0.2, delay_s_max=1.0) == [A, B, C]
    assert with_affinity([(A, 1.5)], others, 0.2, delay_s_max=1.0) == others
    assert with_affinity([(C, 0.9), (A, 0.3)], others, 0.2, delay_s_max=1.0) == [A, C, B]


def test_nobody_is_lost_or_asked_twice() -> None:
    others = by_load([A, B, C])
    assert sorted(place.name for place in with_affinity([(A, 0.1), (B, 0.1)], others, 0.1, delay_s_max=0.0)) == [
        "a",
        "b",
        "c",
    ]
