"""What is known of each rollout, as fields: for the console, the command line and the dashboard. Blocks on SQL."""

from collections.abc import Iterable
from typing import Any

from backends.topology import Model
from billing.instants import instant_text
from gateway.lifecycle.store import units_named
from gateway.rollouts.comparison import Finding, Judgement, Sample, Verdict, judge
from gateway.rollouts.starting import in_trouble
from gateway.rollouts.store import Standing, State, read_samples, read_standings
from gateway.rollouts.trials import limits_of, names_of
from tenancy.database import Database


def report(database: Database, models: Iterable[Model], now_ns: int) -> list[dict[str, Any]]:
    """Of all models that have or had one. models: of the deployment file, whose limits judge those that run."""
    tried = {model.id: model for model in models if model.rollout is not None}
    rows = []
    for standing in sorted(read_standings(database).values(), key=lambda known: known.model):
        old, new = read_samples(database, standing)
        model, judgement, trouble = tried.get(standing.model), None, None
        if model is not None and standing.state is State.RUNNING:
            judgement = judge(old, new, limits_of(model), standing.evaluation)
            units = units_named(database, model.id, names_of(model, standing.new_revision))
            trouble = in_trouble(units, now_ns=now_ns)
        rows.append(_fields(standing, old, new, judgement, trouble))
    return rows


def _fields(
    standing: Standing, old: Sample, new: Sample, judgement: Judgement | None, trouble: str | None
) -> dict[str, Any]:
    """trouble: of engines of the new revision that fail to start."""
    return {
        "model": standing.model,
        "state": standing.state.value,
        "new_revision": standing.new_revision,
        "old_revision": standing.old_revision,
        "share_percent": standing.share_bp / 100,
        "new": {"requests": new.requests, "errors": new.errors},
        "old": {"requests": old.requests, "errors": old.errors},
        "verdict": (judgement.verdict if judgement else Verdict.HOLD).value if standing.loser is None else None,
        "why": "; ".join(filter(None, (judgement.why if judgement else standing.why, trouble))),
        "cause": standing.cause,
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
        "rare": finding.rare,
    }
