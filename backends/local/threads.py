"""How many threads a step computes with: all cores, or half of them when others use the machine as well.

Two threads share each product and wait for each other by spinning. With the cores to itself the pair is nearly twice
as fast; next to a busy neighbour each wait lasts until the kernel runs the other half again. Measured on two cores
beside three busy processes: 33 ms a step with one thread, 100 to 600 ms with two. So the choice is tried out now and
then, on decode steps, which are alike. Products give the same bits with one thread and with two (checked for all
shapes of the default model), so a choice never changes a result.

Pure: the runner tells how long steps took and sets what `threads` says.
"""

from collections import deque
from statistics import median

TRIAL_STEPS = 4
FIRST_INTERVAL = 4
"""Steps until the first trial; each trial that changes nothing doubles the interval."""
LAST_INTERVAL = 1024
GIVE_UP_FACTOR = 3.0
"""A trial ends early at a step that is so much slower than usual."""
GAIN_FACTOR = 0.9
"""A trial must be that much faster to be adopted."""
SLOW_FACTOR = 2.0
"""All cores, and so much slower than they were: something else runs, so it is time for a trial."""


class ThreadChooser:
    def __init__(self, cores: int) -> None:
        assert cores > 0
        self._all = cores
        self._fewer = max(1, cores // 2)
        self._chosen = cores
        self._rows = 0
        self._usual: deque[float] = deque(maxlen=TRIAL_STEPS)
        self._best = float("inf")
        self._trial: list[float] | None = None
        self._interval = FIRST_INTERVAL
        self._countdown = FIRST_INTERVAL

    @property
    def threads(self) -> int:
        """For the next step."""
        if self._trial is None:
            return self._chosen
        return self._other

    @property
    def _other(self) -> int:
        return self._fewer if self._chosen == self._all else self._all

    def note(self, rows: int, seconds: float) -> None:
        """A decode step of so many rows took so long with `threads`."""
        if self._all == self._fewer:
            return
        if rows != self._rows:
            # Steps of another size can't be compared with those before.
            self._rows, self._best, self._trial = rows, float("inf"), None
            self._usual.clear()
        elif self._trial is None:
            self._note_usual(seconds)
        else:
            self._trial.append(seconds)
            self._judge(self._trial, median(self._usual))

    def _note_usual(self, seconds: float) -> None:
        self._usual.append(seconds)
        self._best = min(self._best, seconds)
        self._countdown -= 1
        if len(self._usual) < TRIAL_STEPS:
            return
        slow = self._chosen == self._all and median(self._usual) > SLOW_FACTOR * self._best
        if slow or self._countdown <= 0:
            self._trial = []

    def _judge(self, trial: list[float], usual: float) -> None:
        if len(trial) < TRIAL_STEPS and trial[-1] <= GIVE_UP_FACTOR * usual:
            return
        adopted = len(trial) == TRIAL_STEPS and median(trial) < GAIN_FACTOR * usual
        if adopted:
            self._chosen = self._other
        self._trial = None
        self._interval = FIRST_INTERVAL if adopted else min(2 * self._interval, LAST_INTERVAL)
        self._countdown = self._interval
        self._usual.clear()
