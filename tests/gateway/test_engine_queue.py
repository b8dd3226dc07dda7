"""Who waited in the engine's own queue, told from its length and from first tokens."""

import random

from gateway.engine_queue import EngineQueue


def test_who_stays_in_the_queue_is_counted_once() -> None:
    queue = EngineQueue()
    for waiting in (0, 2, 2, 1, 0):
        queue.reported(waiting)
    assert queue.joined == 2


def test_who_takes_the_place_of_one_that_started_is_counted() -> None:
    queue = EngineQueue()
    queue.reported(2)
    queue.started = 2
    queue.reported(2)
    assert queue.joined == 4


def test_first_tokens_of_those_who_never_waited_count_for_nothing() -> None:
    queue = EngineQueue()
    for _ in range(10):
        queue.started += 5
        queue.reported(0)
    assert queue.joined == 0


def test_in_a_first_come_first_served_queue_the_count_is_exact() -> None:
    draw, queue = random.Random(3), EngineQueue()
    waiting = joined = 0
    for _ in range(500):
        left = draw.randint(0, waiting)
        came = draw.randint(0, 3)
        waiting, joined = waiting - left + came, joined + came
        queue.started += left
        queue.reported(waiting)
    assert queue.joined == joined
