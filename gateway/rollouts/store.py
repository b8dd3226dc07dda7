"""Rollouts in SQL, so that a decision outlives a restart and is every gateway's: states, and counts of both revisions.

All functions block: callers use Database.call. A change is made against the version that was read, so that of several
gateways that come to the same decision one makes it, and an operator's own is not overwritten.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa

from gateway.errors import RolloutNotFound, RolloutRefused
from gateway.rollouts.comparison import Sample
from gateway.rollouts.split import WHOLE_BP
from gateway.rollouts.tables import rollout_counts, rollout_tellings, rollouts
from gateway.rollouts.tally import ANSWER, BETWEEN, ERRORS, FIRST, REQUESTS
from tenancy import audit_log
from tenancy.audit_log import Actor
from tenancy.database import Database, insert_missing

_ROLLOUTS_MAX: Final = 1_000
_WHY_MAX: Final = 500
_KEYS: Final = ("model", "round", "revision", "measure", "bucket")


class State(StrEnum):
    RUNNING = "running"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


class Cause(StrEnum):
    """Who or what ended it."""

    OPERATOR = "operator"
    COMPARISON = "comparison"
    NEVER_STARTED = "never_started"


@dataclass(frozen=True, slots=True)
class Telling:
    """Names counts, so that they are added once however often they are told. process: this life of it. number: greater
    with each.
    """

    process: str
    number: int


@dataclass(frozen=True, slots=True)
class Standing:
    """What is decided of a model's rollout. share_bp: hundredths of a percent. why: of the last change. cause: of its
    end, where a process of this version ended it.
    """

    model: str
    round: int
    version: int
    new_revision: str
    old_revision: str
    state: State
    share_bp: int
    started_at_ns: int
    changed_at_ns: int
    why: str
    evaluation: float | None
    cause: Cause | None

    @property
    def loser(self) -> str | None:
        """The revision that serves nobody any more."""
        return {State.PROMOTED: self.old_revision, State.ROLLED_BACK: self.new_revision}.get(self.state)


def read_standings(database: Database) -> dict[str, Standing]:
    with database.read() as connection:
        rows = connection.execute(sa.select(rollouts).limit(_ROLLOUTS_MAX)).mappings()
        return {row["model"]: _standing(row) for row in rows}


def read_standing(database: Database, model: str) -> Standing:
    """Raises RolloutNotFound."""
    with database.read() as connection:
        row = connection.execute(sa.select(rollouts).where(rollouts.c.model == model)).mappings().first()
    if row is None:
        raise RolloutNotFound(model)
    return _standing(row)


def begin(database: Database, model: str, *, new: str, old: str, share_bp: int, by: Actor, at_ns: int) -> None:
    """A rollout between these two, unless it is there already: a decision about it stands, whoever starts again."""
    with database.write() as connection:
        row = connection.execute(sa.select(rollouts).where(rollouts.c.model == model)).mappings().first()
        if row is not None and (row["new_revision"], row["old_revision"]) == (new, old):
            return
        values = {
            "new_revision": new,
            "old_revision": old,
            "state": State.RUNNING,
            "share_bp": share_bp,
            "started_at_ns": at_ns,
            "changed_at_ns": at_ns,
            "why": "the deployment file asks for it",
            "evaluation": None,
            "cause": None,
        }
        if row is None:
            begun = insert_missing(connection, rollouts, [{"model": model, "round": 1, "version": 1, **values}])
        else:
            values |= {"round": row["round"] + 1, "version": row["version"] + 1}
            begun = _swap(connection, model, row["version"], values)
        if begun:
            _forget_counts(connection, model)
            _log(connection, by, at_ns, "rollout.start", model, revision=new, share_bp=share_bp)


def change(
    database: Database,
    known: Standing,
    action: str,
    *,
    by: Actor,
    at_ns: int,
    why: str,
    **values: Any,
) -> bool:
    """Set fields of a rollout that is still as `known`; False if somebody has changed it meanwhile."""
    with database.write() as connection:
        changes = {"version": known.version + 1, "changed_at_ns": at_ns, "why": why[:_WHY_MAX], **values}
        changed = _swap(connection, known.model, known.version, changes)
        if changed:
            if values.get("round"):
                _forget_counts(connection, known.model)
            _log(connection, by, at_ns, action, known.model, revision=known.new_revision, why=why[:_WHY_MAX])
        return changed


def set_share(database: Database, model: str, share_bp: int, *, by: Actor, at_ns: int) -> None:
    """Raises RolloutNotFound, or RolloutRefused for one that is over or a share that is none."""
    if not 0 <= share_bp <= WHOLE_BP:
        raise RolloutRefused("A share is from 0 to 100 percent.")
    known = _running(database, model)
    why = f"share {share_bp / 100:g} %"
    _must(change(database, known, "rollout.share", by=by, at_ns=at_ns, why=why, share_bp=share_bp))


def note_evaluation(database: Database, model: str, score: float, *, by: Actor, at_ns: int) -> None:
    """Raises as set_share."""
    known = _running(database, model)
    why = f"evaluated at {score:g}"
    _must(change(database, known, "rollout.evaluate", by=by, at_ns=at_ns, why=why, evaluation=score))


def promote(database: Database, model: str, *, by: Actor, at_ns: int, unseen: bool = False) -> None:
    """The new revision serves all, and the old one ends. Raises as set_share, and RolloutRefused for a new one that has
    served nothing yet, unless `unseen`.
    """
    known = _running(database, model)
    if not unseen and not read_samples(database, known)[1].requests:
        raise RolloutRefused(f"The revision {known.new_revision} of {model} has served no request yet.")
    ended = {"state": State.PROMOTED, "cause": Cause.OPERATOR}
    _must(change(database, known, "rollout.promote", by=by, at_ns=at_ns, why="promoted", **ended))


def roll_back(database: Database, model: str, *, by: Actor, at_ns: int, why: str) -> None:
    """The old revision serves all, as before. Raises as set_share."""
    known = _running(database, model)
    ended = {"state": State.ROLLED_BACK, "cause": Cause.OPERATOR}
    _must(change(database, known, "rollout.abort", by=by, at_ns=at_ns, why=why, **ended))


def start_again(database: Database, model: str, *, by: Actor, at_ns: int) -> None:
    """A rollout that is over runs once more, with its last share and counts of its own. Raises as set_share."""
    known = read_standing(database, model)
    if known.state is State.RUNNING:
        raise RolloutRefused(f"The rollout of {model} is running.")
    values = {"state": State.RUNNING, "round": known.round + 1, "started_at_ns": at_ns}
    values |= {"evaluation": None, "cause": None}
    _must(change(database, known, "rollout.start", by=by, at_ns=at_ns, why="started again", **values))


def add_counts(
    database: Database, known: Standing, counts: Mapping[tuple[str, str, int], int], telling: Telling
) -> None:
    """counts: by revision, measure and bucket. Those of a round that is over are dropped, and those added before."""
    keys = sorted(counts)  # in order, so that two processes can't lock each other out
    rows = [dict(zip(_KEYS, (known.model, known.round, *key), strict=True)) for key in keys]
    table = rollout_counts
    update = table.update().values(requests=table.c.requests + sa.bindparam("more"))
    for name in _KEYS:
        update = update.where(table.c[name] == sa.bindparam(f"of_{name}"))
    with database.write() as connection:
        of_round = sa.select(rollouts.c.round).where(rollouts.c.model == known.model)
        if connection.scalar(of_round) != known.round or not _is_news(connection, known.model, telling):
            return
        insert_missing(connection, table, [row | {"requests": 0} for row in rows])
        connection.execute(
            update,
            [
                {f"of_{name}": value for name, value in row.items()} | {"more": counts[key]}
                for row, key in zip(rows, keys, strict=True)
            ],
        )


def _is_news(connection: sa.Connection, model: str, telling: Telling) -> bool:
    """Noted with the counts: one whose answer was lost finds that it was heard, and waits where it is still heard."""
    table = rollout_tellings
    of = (table.c.model == model, table.c.process == telling.process)
    insert_missing(connection, table, [{"model": model, "process": telling.process, "number": 0}])
    later = table.update().where(*of, table.c.number < telling.number).values(number=telling.number)
    return connection.execute(later).rowcount == 1


def read_samples(database: Database, known: Standing) -> tuple[Sample, Sample]:
    """Of the old revision and of the new one, by all gateways, in this round."""
    samples = {known.old_revision: Sample(), known.new_revision: Sample()}
    query = sa.select(rollout_counts).where(
        rollout_counts.c.model == known.model, rollout_counts.c.round == known.round
    )
    with database.read() as connection:
        for row in connection.execute(query):
            sample = samples.get(row.revision)
            if sample is not None:
                _add(sample, row.measure, row.bucket, row.requests)
    return samples[known.old_revision], samples[known.new_revision]


def _add(sample: Sample, measure: str, bucket: int, requests: int) -> None:
    if measure == REQUESTS:
        sample.requests += requests
    elif measure == ERRORS:
        sample.errors += requests
    elif (histogram := {FIRST: sample.first, BETWEEN: sample.between, ANSWER: sample.answer}.get(measure)) is not None:
        histogram[bucket] = histogram.get(bucket, 0) + requests


def _standing(row: Mapping[Any, Any]) -> Standing:
    cause = row["cause"]
    return Standing(**{**row, "state": State(row["state"]), "cause": None if cause is None else Cause(cause)})


def _running(database: Database, model: str) -> Standing:
    known = read_standing(database, model)
    if known.state is not State.RUNNING:
        raise RolloutRefused(f"The rollout of {model} is over: it was {known.state.replace('_', ' ')}.")
    return known


def _must(changed: bool) -> None:  # noqa: FBT001 - the one thing it looks at
    if not changed:
        raise RolloutRefused("Somebody else has just changed this rollout; look again.")


def _swap(connection: sa.Connection, model: str, version: int, values: Mapping[str, Any]) -> bool:
    of = (rollouts.c.model == model, rollouts.c.version == version)
    return connection.execute(rollouts.update().where(*of).values(**values)).rowcount == 1


def _forget_counts(connection: sa.Connection, model: str) -> None:
    for table in (rollout_counts, rollout_tellings):
        connection.execute(table.delete().where(table.c.model == model))


def _log(connection: sa.Connection, by: Actor, at_ns: int, action: str, model: str, **detail: str | int | None) -> None:
    audit_log.record(connection, at_ns=at_ns, by=by, account_id=None, action=action, subject=model, **detail)
