"""What counts as the time of a process, and what does not."""

import signal
import subprocess
import sys
import time

import psutil

from tests.doubles.own_time import OwnTime
from tests.engines import ROOT

STOPPED_S = 0.3
# Says how much more the clock on the wall counts than it does, from one line to the next.
PROGRAM = """
import sys
from tests.doubles.own_time import OwnTime
with OwnTime() as own:
    began = own.now()
    print("counts", flush=True)
    sys.stdin.readline()
    print(own.now().wall_s - began.wall_s - own.since(began), flush=True)
"""


def test_what_is_waited_for_or_computed_counts() -> None:
    with OwnTime() as own:
        began = own.now()
        while own.since(began) < 0.05:
            time.sleep(0.001)
        waited = own.now()
        assert waited.wall_s - began.wall_s >= 0.05
        while own.since(waited) < 0.05:
            pass
        assert own.since(began) <= own.now().wall_s - began.wall_s


def test_what_it_was_stopped_for_does_not_count() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "counts\n"
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        left_out_s = float(process.stdout.readline())
    assert left_out_s > STOPPED_S / 2
