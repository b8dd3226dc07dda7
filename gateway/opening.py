"""Which replicas of a model take new requests, alone or few at first, and which halves compute their prompts.

model_fleet.py asks after each report and each change of standing; what is found is written where placing.py reads it.
What a replica's own standing is, health.py and replica.py say.
"""

from collections.abc import Sequence

from gateway.health import Standing
from gateway.placing import Placing
from gateway.prefill_half import PrefillHalf
from gateway.replica import Replica
from gateway.slow_start import SlowStart


class Opening:
    """slow_start_s: until one that comes back carries its whole share."""

    def __init__(self, placing: Placing, *, slow_start_s: float) -> None:
        self._placing = placing
        self._slow_start = SlowStart(slow_start_s)
        self._any_open = False

    def look(self, replicas: Sequence[Replica], now: float) -> bool:
        """A replica takes new requests if it is served, answers, has somebody to compute prompts if it does not do that
        itself, and has not been found unfit. True if there was none, and now there is.
        """
        placing = self._placing
        if placing.halves:
            self._look_at_halves(replicas, now)
        standings = {replica.id: replica.standing(now) for replica in replicas if replica.known}
        answering = {
            replica.id: replica.region
            for replica in replicas
            if standings.get(replica.id, Standing.DOWN) is not Standing.DOWN
        }
        self._slow_start.look(answering, now)
        for site in placing.sites.values():
            standing = standings.get(site.id, Standing.DOWN)
            site.open = standing in {Standing.OPEN, Standing.TRIAL}
            site.on_trial = standing is Standing.TRIAL
            site.share = self._slow_start.share(site.id, now)
        placing.ramping = any(site.share < 1 for site in placing.sites.values())
        had_any, self._any_open = self._any_open, any(site.open for site in placing.sites.values())
        return self._any_open and not had_any

    def forget(self, site_id: str) -> None:
        """It is served no more."""
        self._slow_start.forget(site_id)

    def _look_at_halves(self, replicas: Sequence[Replica], now: float) -> None:
        """As replicas; each replica that only decodes gets its prompts from those that agree with it."""
        engines = {half.id: half for replica in replicas for half in replica.prefills}
        for half in self._placing.halves.values():
            engine = engines.get(half.id)
            standing = Standing.DOWN if engine is None or not engine.answers else engine.health.verdict(now)
            half.open, half.on_trial = standing in {Standing.OPEN, Standing.TRIAL}, standing is Standing.TRIAL
        # Replicas of one group that keep their pages alike get the same tuple: it is asked once for all of them.
        alike: dict[tuple[tuple[Replica, ...], int, str], tuple[PrefillHalf, ...]] = {}
        for replica in replicas:
            site = self._placing.sites.get(replica.id)
            if site is None or not replica.prefills or replica.info is None:
                continue
            kept = replica.prefills, replica.info.page_tokens, replica.info.kv_cache_dtype
            if kept not in alike:
                agreeing = [half.id for half in replica.prefills if not replica.disagreement(half)]
                found = (self._placing.halves.get(name) for name in agreeing)
                alike[kept] = tuple(half for half in found if half is not None and half.open)
            site.halves = alike[kept]
