"""Work that nobody holds: known ids are aborted, unknown ones counted, and a moment's excess is nothing."""

from gateway.ghosts import Ghosts


def test_a_short_excess_is_nothing() -> None:
    ghosts = Ghosts()
    ghosts.died("a", 0.0)
    assert ghosts.reported(running=3, known=1, now=0.0).abort == ()
    assert ghosts.reported(running=1, known=1, now=1.0).abort == ()
    assert ghosts.reported(running=3, known=1, now=2.5).abort == ()


def test_an_excess_that_lasts_names_the_dead_again_and_again() -> None:
    ghosts = Ghosts()
    ghosts.died("a", 0.0)
    ghosts.reported(running=1, known=0, now=0.0)
    assert ghosts.reported(running=1, known=0, now=3.0).abort == ("a",)
    assert ghosts.reported(running=1, known=0, now=4.0).abort == ()
    assert ghosts.reported(running=1, known=0, now=9.0).abort == ("a",)
    assert ghosts.unknown == 0


def test_what_nobody_knows_is_counted_until_it_is_gone() -> None:
    ghosts = Ghosts()
    ghosts.died("a", 0.0)
    ghosts.reported(running=5, known=1, now=0.0)
    assert ghosts.reported(running=5, known=1, now=3.0).unknown == 3
    assert ghosts.unknown == 3
    ghosts.reported(running=1, known=1, now=4.0)
    assert ghosts.unknown == 0


def test_the_dead_are_forgotten_in_time_and_in_number() -> None:
    ghosts = Ghosts()
    for number in range(2000):
        ghosts.died(f"r{number}", 0.0)
    ghosts.reported(running=9, known=0, now=0.0)
    assert len(ghosts.reported(running=9, known=0, now=10.0).abort) == 512
    assert ghosts.reported(running=9, known=0, now=1000.0).abort == ()
