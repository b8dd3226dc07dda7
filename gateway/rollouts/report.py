"""What is known of each rollout, as fields: for the console, the command line and the dashboard. Blocks on SQL."""

from collections.abc import Iterable
from typing import Any

from backends.topology import Model
from billing.instants import instant_text
from gateway.rollouts.comparison import Finding, Judgement, Sample, Verdict, judge
from gateway.rollouts.store import Standing, State, read_samples, read_standings
from gateway.rollouts.trials import limits_of
from tenancy.database import Database


def report(database: Database, models: Iterable[Model]) -> list[dict[str, Any]]:
    """Of all models that have or had one. models: of the deployment file, whose limits judge those that run."""
    limits = {model.id: limits_of(model) for model in models if model.rollout is not None}
    rows = []
    for standing in sorted(read_standings(database).values(), key=lambda known: known.model):
        old, new = read_samples(database, standing)
        known = limits.get(standing.model)
        judgement = None
        if known is not None and standing.state is State.RUNNING:
            judgement = judge(old, new, known, standing.evaluation)
        rows.append(_fields(standing, old, new, judgement))
    return rows


def _fields(standing: Standing, old: Sample, new: Sample, judgement: Judgement | None) -> dict[str, Any]:
    return {
        "model": standing.model,
        "state": standing.state.value,
        "new_revision": standing.new_revision,
        "old_revision": standing.old_revision,
        "share_percent": standing.share_bp / 100,
        "new": {"requests": new.requests, "errors": new.errors},
        "old": {"requests": old.requests, "errors": old.errors},
        "verdict": (judgement.verdict if judgement else Verdict.HOLD).value if standing.loser is None else None,
        "why": judgement.why if judgement else standing.why,
        "findings": [_finding(finding) for finding in judgement.findings] if judgement else [],
        "evaluation": standing.evaluation,
        "started_at": instant_text(standing.started_at_ns),
        "changed_at": instant_text(standing.changed_at_ns),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    """Times in seconds, failed requests and evaluations as shares."""
    return {
        "measure": finding.measure,
        "old": None if finding.old is None else round(finding.old, 6),
        "new": None if finding.new is None else round(finding.new, 6),
        "worse": finding.harm,
        "as_good": finding.good,
    }
