"""Rollouts in /metrics: shares, states, what this process saw of each revision, and how the two compare."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.rollouts.split import WHOLE_BP
from gateway.rollouts.store import Cause
from gateway.rollouts.trials import Trials


class RolloutCollector(Collector):
    """Reads what Trials has when scraped. Labels are of the deployment file, so they are few."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def collect(self) -> Iterator[Metric]:
        labels = ["model", "revision"]
        share = GaugeMetricFamily(
            "pagegate_rollout_share", "Part of new conversations that the revision is to serve.", labels=labels
        )
        state = GaugeMetricFamily(
            "pagegate_rollout_state", "1 for the state of the new revision's rollout.", labels=[*labels, "state"]
        )
        unstarted = GaugeMetricFamily(
            "pagegate_rollout_never_started",
            "1 for a new revision that was taken back because its engines did not start.",
            labels=labels,
        )
        ended = CounterMetricFamily(
            "pagegate_rollout_requests", "Requests that ended at engines of the revision.", labels=[*labels, "outcome"]
        )
        compared = GaugeMetricFamily(
            "pagegate_rollout_compared",
            "What is compared, as all gateways saw it: failed requests as a share, times at the 90th percentile in "
            "seconds.",
            labels=[*labels, "measure"],
        )
        for model, trial in sorted(self._trials.by_model.items()):
            known = trial.standing
            new, old = known.new_revision, known.old_revision
            part = {None: known.share_bp / WHOLE_BP, old: 1.0, new: 0.0}[known.loser]
            share.add_metric([model, new], part)
            share.add_metric([model, old], 1 - part)
            state.add_metric([model, new, known.state.value], 1)
            unstarted.add_metric([model, new], float(known.cause is Cause.NEVER_STARTED))
            for (revision, outcome), count in sorted(trial.tally.ends.items()):
                ended.add_metric([model, revision, outcome], count)
            for finding in () if trial.judgement is None else trial.judgement.findings:
                for revision, figure in ((old, finding.old), (new, finding.new)):
                    if figure is not None:
                        compared.add_metric([model, revision, finding.measure], figure)
        yield from (share, state, unstarted, ended, compared)
