"""When a replica is trusted: probes, faults, movement and draining, and that one flap changes nothing."""

import random

from gateway.health import HealthLimits, ReplicaHealth, Standing

LIMITS = HealthLimits(probes_failed_max=3, probes_seen=5, faults_max=3, faults_seen=6, rest_s=2.0, stalled_s=30.0)


def up() -> ReplicaHealth:
    health = ReplicaHealth(LIMITS)
    health.probed(answered=True)
    return health


def test_it_is_down_until_it_has_answered() -> None:
    assert ReplicaHealth(LIMITS).verdict(0.0) is Standing.DOWN
    assert up().verdict(0.0) is Standing.OPEN


def test_one_failed_probe_changes_nothing_and_three_of_five_do() -> None:
    health = up()
    for answered in (False, True, False, True):
        health.probed(answered=answered)
        assert health.verdict(0.0) is Standing.OPEN
    health.probed(answered=False)
    assert health.verdict(0.0) is Standing.DOWN


def test_after_trouble_two_answers_in_a_row_count() -> None:
    health = up()
    for _ in range(3):
        health.probed(answered=False)
    health.probed(answered=True)
    assert health.verdict(0.0) is Standing.DOWN
    health.probed(answered=True)
    assert health.verdict(0.0) is Standing.OPEN


def test_a_lost_connection_takes_it_down_at_once_and_an_answer_brings_it_back() -> None:
    health = up()
    health.lost()
    assert health.verdict(0.0) is Standing.DOWN
    health.probed(answered=True)
    assert health.verdict(0.0) is Standing.OPEN


def test_faults_make_it_rest_then_try_one_and_a_good_end_closes_the_matter() -> None:
    health = up()
    for _ in range(3):
        assert health.verdict(10.0) is Standing.OPEN
        health.ended(fault=True, now=10.0)
    assert health.verdict(10.0) is Standing.TRIPPED
    assert health.verdict(12.0) is Standing.TRIAL
    health.ended(fault=False, now=12.5)
    assert health.verdict(12.5) is Standing.OPEN


def test_a_failed_trial_rests_twice_as_long_up_to_a_bound() -> None:
    health, now, rests = up(), 0.0, []
    for _ in range(3):
        health.ended(fault=True, now=now)
    for _ in range(8):
        began = now
        while health.verdict(now) is Standing.TRIPPED:
            now += 0.5
        rests.append(now - began)
        health.ended(fault=True, now=now)
    assert rests[:4] == [2.0, 4.0, 8.0, 16.0]
    assert max(rests) == 60.0


def test_all_that_one_crash_ends_is_one_fault_in_the_length_of_its_rest() -> None:
    health = up()
    for _ in range(100):  # what ran there when it died
        health.ended(fault=True, now=10.0)
    assert health.verdict(11.9) is Standing.TRIPPED
    health.ended(fault=True, now=11.9)
    assert health.verdict(12.0) is Standing.TRIAL
    health.ended(fault=True, now=12.0)
    assert health.verdict(15.9) is Standing.TRIPPED
    assert health.verdict(16.0) is Standing.TRIAL


def test_faults_that_are_few_among_good_ends_trip_nothing() -> None:
    health, draw = up(), random.Random(1)
    for moment in range(500):
        health.ended(fault=draw.random() < 0.05, now=float(moment))
        assert health.verdict(float(moment)) is Standing.OPEN


def test_an_engine_that_runs_and_does_not_move_is_stalled_until_it_moves() -> None:
    health = up()
    for second in range(29):
        health.moved((96, 4, 0), float(second), busy=True)
    assert health.verdict(29.0) is Standing.OPEN
    health.moved((96, 4, 0), 31.0, busy=True)
    assert health.verdict(31.0) is Standing.STALLED
    health.moved((97, 4, 0), 32.0, busy=True)
    assert health.verdict(32.0) is Standing.OPEN


def test_an_idle_engine_need_not_move() -> None:
    health = up()
    for second in range(1000):
        health.moved((0, 0, 0), float(second), busy=False)
    assert health.verdict(1000.0) is Standing.OPEN


def test_draining_goes_before_everything_and_ends() -> None:
    health = up()
    health.draining = True
    assert health.verdict(0.0) is Standing.DRAINING
    health.draining = False
    assert health.verdict(0.0) is Standing.OPEN


def test_it_stands_still_from_the_last_sign_of_work_on_whether_it_answers_or_not() -> None:
    health = up()
    health.moved((1,), 10.0, busy=True)
    health.moved((1,), 12.0, busy=True)
    health.probed(answered=False)
    assert health.still_s(15.0) == 5.0
    health.moved((2,), 16.0, busy=True)
    assert health.still_s(17.0) == 1.0
    health.moved((2,), 30.0, busy=False)
    assert health.still_s(30.0) == 0.0
