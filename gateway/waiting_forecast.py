"""When will it start? The wait that a queue's work predicts, corrected by what waits turned out to be.

Work ahead is counted in dominant seconds (fairness.py), which says nothing of how well the engine overlaps them; the
ratio of actual to predicted waits is learned online, at its median and its 90 % quantile. `Retry-After` is judged by
what becomes of those who come again when they were told. Pure; seconds only.
"""

from dataclasses import dataclass

_RATIO_LEAST, _RATIO_MOST = 0.1, 10.0
# Below this a wait is one scheduling turn and its ratio noise.
_WORTH_LEARNING_S = 0.2
_ENOUGH = 16
# Nine retries of ten are to be let in; a failure stretches later hints nine times as much as a success shortens them.
_RETRY_ADMITTED = 0.9
_RETRY_PACE = 0.1
_RETRY_STRETCH_MOST = 4.0
# A little cautious until retries have been seen: who comes too early is refused again.
_RETRY_STRETCH_FIRST = 1.5


class _Quantile:
    """A running quantile of a positive stream: steps up or down by a share of itself, so that it settles at τ."""

    def __init__(self, share: float, start: float) -> None:
        self._share = share
        self.value = start

    def observe(self, sample: float, *, pace: float) -> None:
        step = self._share if sample > self.value else self._share - 1
        self.value = min(_RATIO_MOST, max(_RATIO_LEAST, self.value * (1 + pace * step)))


@dataclass(frozen=True, slots=True)
class StartsIn:
    """Seconds until a request starts: as likely before as after, and one in ten later."""

    p50_s: float
    p90_s: float


class WaitForecast:
    def __init__(self) -> None:
        self._p50 = _Quantile(0.5, 1.0)
        self._p90 = _Quantile(0.9, 1.5)
        self._retry_stretch = _RETRY_STRETCH_FIRST
        self._seen = 0
        self.retries = 0
        self.retries_admitted = 0

    @property
    def learned(self) -> bool:
        """Has it seen enough waits that somebody may be refused on its word?"""
        return self._seen >= _ENOUGH

    def starts_in(self, ahead_s: float) -> StartsIn:
        """ahead_s: dominant seconds of work that is served before it."""
        p50 = ahead_s * self._p50.value
        return StartsIn(p50, max(p50, ahead_s * self._p90.value))

    def observe(self, ahead_s: float, waited_s: float) -> None:
        """A request has started: what was ahead of it on arrival, and how long it then waited."""
        if ahead_s < _WORTH_LEARNING_S:
            return
        self._seen += 1
        for quantile in (self._p50, self._p90):
            quantile.observe(waited_s / ahead_s, pace=0.05)

    def retry_after_s(self, late_s: float, *, jitter: float, most_s: float) -> float:
        """Seconds until a retry is let in nine times out of ten: what it is late by now, stretched by experience.

        jitter: in [0, 1), drawn per tenant; spreads retries over a further quarter.
        """
        ratio = self._p90.value / self._p50.value
        return max(1.0, min(most_s, max(1.0, late_s * ratio) * self._retry_stretch * (1 + jitter / 4)))

    def observe_retry(self, *, admitted: bool) -> None:
        """What became of a retry at its hinted time."""
        self.retries_admitted += admitted
        self.retries += 1
        step = -_RETRY_PACE * (1 - _RETRY_ADMITTED) if admitted else _RETRY_PACE * _RETRY_ADMITTED
        self._retry_stretch = min(_RETRY_STRETCH_MOST, max(1.0, self._retry_stretch * (1 + step)))
