"""Who waited in the engine's own queue, told from how many wait there and who has no first token."""

import random

from gateway.engine_queue import EngineQueue


def test_who_stays_in_the_queue_is_counted_once() -> None:
    queue = EngineQueue()
    for waiting, unstarted in ((2, "abc"), (2, "bc"), (1, "c"), (0, "c"), (0, "")):
        queue.reported(waiting, list(unstarted))
    assert queue.joined == 2


def test_who_is_being_prefilled_while_nobody_waits_is_not_counted() -> None:
    queue = EngineQueue()
    for _ in range(10):
        queue.reported(0, ["a", "b"])
    assert queue.joined == 0


def test_who_takes_the_place_of_one_that_started_is_counted() -> None:
    queue = EngineQueue()
    queue.reported(1, ["a"])
    queue.reported(1, ["b"])
    assert queue.joined == 2


def test_requests_of_other_gateways_are_counted_by_those() -> None:
    queue = EngineQueue()
    for _ in range(5):
        queue.reported(9, [])
    queue.reported(9, ["a"])
    assert queue.joined == 1


def test_the_counts_of_gateways_whose_requests_are_not_prefilled_at_the_time_add_up_to_those_that_waited() -> None:
    queues = [EngineQueue() for _ in range(4)]
    for _ in range(3):
        for queue, unstarted in zip(queues, ("ab", "c", "", ""), strict=True):
            queue.reported(3, list(unstarted))
    assert sum(queue.joined for queue in queues) == 3


def test_in_a_queue_by_arrival_the_count_is_exact() -> None:
    draw, queue = random.Random(3), EngineQueue()
    prefilled: list[str] = []
    waiting: list[str] = []
    waited: set[str] = set()
    for number in range(500):
        prefilled, waiting = waiting[: (starts := draw.randint(0, 2))], waiting[starts:]
        come = [f"r{number}-{each}" for each in range(draw.randint(0, 3))]
        if not waiting and draw.random() < 0.5:
            prefilled, come = prefilled + come, []
        waiting += come
        waited.update(waiting)
        queue.reported(len(waiting), prefilled + waiting)
    assert queue.joined == len(waited) > 100
