from collections import Counter
from collections.abc import Callable

from backends.local.threads import LAST_INTERVAL, ThreadChooser


def run(chooser: ThreadChooser, steps: int, cost: Callable[[int], float], rows: int = 1) -> Counter[int]:
    """How many steps ran with how many threads, when a step with n threads costs `cost(n)`."""
    used: Counter[int] = Counter()
    for _ in range(steps):
        used[chooser.threads] += 1
        chooser.note(rows, cost(chooser.threads))
    return used


def quiet(threads: int) -> float:
    return 0.02 if threads == 2 else 0.03


def busy(threads: int) -> float:
    return 0.3 if threads == 2 else 0.035


def test_a_quiet_machine_computes_with_all_cores() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 1000, quiet)
    used = run(chooser, 2000, quiet)
    assert used[1] <= 0.02 * 2000


def test_a_busy_machine_soon_computes_with_half_and_rarely_tries_all() -> None:
    chooser = ThreadChooser(2)
    assert run(chooser, 20, busy)[2] <= 9
    run(chooser, 1000, busy)
    assert run(chooser, 2000, busy)[2] <= 4


def test_a_neighbour_that_arrives_is_noticed_within_a_few_steps() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 3000, quiet)
    assert run(chooser, 40, busy)[2] <= 12


def test_a_neighbour_that_leaves_is_noticed_in_the_end() -> None:
    chooser = ThreadChooser(2)
    run(chooser, 3000, busy)
    run(chooser, LAST_INTERVAL + 20, quiet)
    assert run(chooser, 100, quiet)[2] > 80


def test_steps_of_different_sizes_are_never_compared() -> None:
    chooser = ThreadChooser(2)
    for at in range(500):
        assert chooser.threads == 2
        chooser.note(at % 3, 0.01 + at % 3)


def test_one_core_leaves_nothing_to_choose() -> None:
    chooser = ThreadChooser(1)
    assert run(chooser, 100, quiet) == {1: 100}
