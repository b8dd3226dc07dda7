"""The rollouts of this gateway's deployment while it runs: told of what is deployed, asked who is served by which
revision, and every second brought in line with what SQL says.

Each gateway adds what it counted, compares the sums of all, and may take back or promote; SQL lets one of them. Made by
the composition root; api/deployed.py declares what the file has and is told when a revision starts or ends.
"""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

import structlog

from backends.topology import Deployment, Model
from gateway.lifecycle.store import units_named
from gateway.rollouts import store
from gateway.rollouts.comparison import Judgement, Limits, Verdict, judge
from gateway.rollouts.split import Split
from gateway.rollouts.starting import never_started
from gateway.rollouts.store import Cause, Standing, State, Telling
from gateway.rollouts.tally import Tally
from tenancy.audit_log import SERVICE
from tenancy.database import Database

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Trial:
    """One model's rollout in this process. split: who goes where; None once it is over. judgement: the last one."""

    model: Model
    standing: Standing
    tally: Tally = field(default_factory=Tally)
    judgement: Judgement | None = None

    @property
    def split(self) -> Split | None:
        known, table = self.standing, self.model.rollout
        if known.state is not State.RUNNING or table is None:
            return None
        return Split(known.new_revision, known.old_revision, known.share_bp, table.when_full == "other")


class Trials:
    """clock: Unix nanoseconds."""

    def __init__(self, database: Database, *, clock: Callable[[], int] = time.time_ns) -> None:
        self._database = database
        self._clock = clock
        self.by_model: dict[str, Trial] = {}
        # What was counted and is not in SQL yet, as far as is known; more is taken once this is told. SQL adds what has
        # a number once, though the answer to its commit be lost.
        self._untold: deque[tuple[Standing, Counter[tuple[str, str, int]], Telling]] = deque()
        self._process = secrets.token_hex(8)
        self._numbers = count(1)
        # A call that was given up may still run, and would tell the same.
        self._telling = threading.Lock()

    async def declare(self, deployment: Deployment) -> None:
        """What the file deploys from now on; a rollout that is new to SQL begins. Raises TenancyUnavailable."""
        await self._database.call(self._declare, deployment)

    def _declare(self, deployment: Deployment) -> None:
        declared = [model for model in deployment.models if model.rollout is not None]
        for model in declared:
            assert model.rollout is not None, "they were picked so"
            store.begin(
                self._database,
                model.id,
                new=model.rollout.revision,
                old=model.old_revision,
                share_bp=round(model.rollout.share_percent * 100),
                by=SERVICE,
                at_ns=self._clock(),
            )
        self._follow(declared, store.read_standings(self._database) if declared else {})

    async def refresh(self) -> bool:
        """Pass on what was counted, see what was decided, decide. True if a share, or who serves, is another now.

        Raises TenancyUnavailable; what was counted is then passed on later.
        """
        if not self.by_model:
            return False
        before = self._served()
        if not self._untold:
            # Taken here: runs count on this thread.
            taken = ((trial.standing, trial.tally.take()) for trial in self.by_model.values())
            self._untold.extend(
                (standing, counts, Telling(self._process, next(self._numbers))) for standing, counts in taken if counts
            )
        await self._database.call(self._refresh)
        return before != self._served()

    def in_force(self, deployment: Deployment) -> Deployment:
        """The deployment without the revisions that serve nobody any more."""
        losers = {model: trial.standing.loser for model, trial in self.by_model.items()}
        return without_losers(deployment, losers)

    def _served(self) -> dict[str, tuple[Split | None, str | None]]:
        return {model: (trial.split, trial.standing.loser) for model, trial in self.by_model.items()}

    def _refresh(self) -> None:
        if not self._telling.acquire(blocking=False):
            return
        try:
            while self._untold:
                store.add_counts(self._database, *self._untold[0])
                self._untold.popleft()
        finally:
            self._telling.release()
        self._follow([trial.model for trial in self.by_model.values()], store.read_standings(self._database))
        for trial in self.by_model.values():
            if trial.standing.state is State.RUNNING:
                self._judge(trial)

    def _judge(self, trial: Trial) -> None:
        table, known = trial.model.rollout, trial.standing
        assert table is not None, "only models with one are followed"
        old, new = store.read_samples(self._database, known)
        found = trial.judgement = judge(old, new, limits_of(trial.model), known.evaluation)
        automatic = {Verdict.ROLLBACK: State.ROLLED_BACK}
        if table.promote == "automatic":
            automatic[Verdict.PROMOTE] = State.PROMOTED
        state = automatic.get(found.verdict)
        if state is not None:
            self._end(trial, state, found.why, Cause.COMPARISON)
        elif (why := self._given_up(trial, served=new.requests)) is not None:
            self._end(trial, State.ROLLED_BACK, why, Cause.NEVER_STARTED)

    def _given_up(self, trial: Trial, *, served: int) -> str | None:
        """Why nothing will ever be compared, if so: the new revision's engines don't start."""
        known = trial.standing
        names = names_of(trial.model, known.new_revision)
        units = units_named(self._database, known.model, names)
        return never_started(units, names, since_ns=known.started_at_ns, now_ns=self._clock(), served=served)

    def _end(self, trial: Trial, state: State, why: str, cause: Cause) -> None:
        """In SQL, unless somebody else has changed it meanwhile; as it stands there then."""
        known = trial.standing
        action = "rollout.promote" if state is State.PROMOTED else "rollout.roll_back"
        ended = {"state": state, "cause": cause}
        if store.change(self._database, known, action, by=SERVICE, at_ns=self._clock(), why=why, **ended):
            log.warning("a rollout is over", model=known.model, revision=known.new_revision, state=state, why=why)
        trial.standing = store.read_standing(self._database, known.model)

    def _follow(self, models: Iterable[Model], standings: Mapping[str, Standing]) -> None:
        followed: dict[str, Trial] = {}
        for model in models:
            standing, trial = standings.get(model.id), self.by_model.get(model.id)
            if standing is None or model.rollout is None or standing.new_revision != model.rollout.revision:
                continue  # another gateway has another file: its rollout is not this one's
            if trial is None or trial.standing.round != standing.round:
                trial = Trial(model, standing)
            trial.model, trial.standing = model, standing
            followed[model.id] = trial
        self.by_model = followed


def limits_of(model: Model) -> Limits:
    table = model.rollout
    assert table is not None, "asked of a model with a rollout"
    return Limits(
        requests_min=table.requests_min,
        errors_more=table.errors_more_percent / 100,
        first_slower=table.first_token_slower_percent / 100,
        between_slower=table.between_tokens_slower_percent / 100,
        answer_slower=table.answers_slower_percent / 100,
        evaluation_min=table.evaluation_min,
    )


def names_of(model: Model, revision: str) -> list[str]:
    """Of the replicas and pairs that are of this revision."""
    return [name for name, _ in model.of_revision(revision).units()]


def losers_of(deployment: Deployment, standings: Mapping[str, Standing]) -> dict[str, str | None]:
    """By model whose rollout this file has, the revision that serves nobody any more."""
    return {
        model.id: standings[model.id].loser
        for model in deployment.models
        if model.rollout is not None
        and model.id in standings
        and standings[model.id].new_revision == model.rollout.revision
    }


def without_losers(deployment: Deployment, losers: Mapping[str, str | None]) -> Deployment:
    """losers: by model, the revision that is to serve nobody."""
    models = [
        model.of_revision(next(name for name in model.revisions if name != loser))
        if (loser := losers.get(model.id)) in model.revisions and len(model.revisions) > 1
        else model
        for model in deployment.models
    ]
    return deployment.model_copy(update={"models": tuple(models)})
