"""How often the truth stayed below the forecast: counted once per decision, when all of its requests have ended."""

from gateway.calibration import Coverage, Inside


def test_a_decision_is_judged_by_the_true_lengths_of_all_who_were_inside() -> None:
    coverage = Coverage()
    assert coverage.wants()
    coverage.decided(250.0, [Inside("a", 100, 5), Inside("b", 50, 0)])
    coverage.ended("b", 20)
    assert coverage.decisions == 0
    coverage.ended("a", 45)  # b is gone after 20 steps, a after 40: 150 + 2 * 20 at most
    assert (coverage.decisions, coverage.covered) == (1, 1)
    coverage.wants()
    coverage.decided(150.0, [Inside("c", 100, 0)])
    coverage.ended("c", 51)
    assert (coverage.decisions, coverage.covered) == (2, 1)
    assert coverage.share == 0.5


def test_a_request_may_be_inside_of_many_decisions_and_choices_grow_together() -> None:
    coverage = Coverage()
    for number in range(3):
        coverage.wants()
        coverage.decided(1000.0 if number else 10.0, [Inside("long", 10, number, 2)])
    coverage.ended("long", 30)
    assert (coverage.decisions, coverage.covered) == (3, 2)
    assert not coverage._open


def test_one_of_several_decisions_is_followed() -> None:
    coverage = Coverage(every=4)
    assert [coverage.wants() for _ in range(9)] == [True, False, False, False, True, False, False, False, True]


def test_no_more_decisions_are_open_than_a_bound() -> None:
    coverage = Coverage()
    followed = 0
    for number in range(1000):
        if coverage.wants():
            followed += 1
            coverage.decided(1.0, [Inside(str(number), 1, 0)])
    assert followed == 256
    coverage.ended("0", 1)
    assert coverage.wants()
